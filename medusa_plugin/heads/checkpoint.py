"""Finds heads of every kind and format on disk, and says what they are before they are loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_plugin.heads.base import DraftHeads, HeadsError, TargetSpec
from medusa_plugin.heads.draft_vocab import DraftVocabSize, choose_size, count_ranked
from medusa_plugin.heads.files import DRAFT_VOCAB_FILE, is_there, read_json_object
from medusa_plugin.heads.hub import CALIBRATION_FILE, locate_heads
from medusa_plugin.heads.hydra_checkpoint import HydraVariant, recognises_hydra
from medusa_plugin.heads.medusa_checkpoint import MedusaVariant
from medusa_plugin.heads.mlp_checkpoint import MLPSpeculatorVariant, recognises_mlp_speculator
from medusa_plugin.heads.source import TRAINED_FILE, Source, open_source
from medusa_plugin.heads.trained_checkpoint import TrainedVariant
from medusa_plugin.heads.tuning import HeadsTuning, find_tuning
from medusa_plugin.heads.variant import Variant

logger = logging.getLogger("vllm.medusa")

Accuracies = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HeadsInfo:
    """What the headers of a heads directory say; no weight is read for it."""

    variant: Variant
    """What depends on the kind."""
    accuracies: Accuracies | None
    """Entry [h][k]: how often candidate k of head h is right, by the tuning, else by
    `calibration.json`; None without either."""
    draft_vocab_ranked: int
    """The largest draft vocabulary but "full": token ids ranked by frequency, as far as the heads
    know them; 0 without a ranking."""
    tuning: HeadsTuning | None = None
    """What `medusa tune` learnt about these weights."""

    @property
    def path(self) -> Path:
        """The weights file; of several, the first that holds heads."""
        return self.variant.source.file

    @property
    def kind(self) -> str:
        """E.g. "medusa"."""
        return self.variant.kind

    @property
    def num_heads(self) -> int:
        """Most tokens that a branch of a tree can have below its root."""
        return self.variant.num_heads

    @property
    def hidden_size(self) -> int:
        """Of the target."""
        return self.variant.hidden_size

    @property
    def vocab_size(self) -> int | None:
        """Of the target; None where the heads do not tell it."""
        return self.variant.vocab_size

    def describe(self) -> str:
        """One phrase for the log, e.g. "4 Medusa heads, 1 layer, shared lm head"."""
        return self.variant.describe()

    def require_target(self, *, hidden_size: int, vocab_size: int) -> None:
        """Check that the heads were made for a target of this shape.

        Raises:
            HeadsError: gives both numbers.
        """
        if self.hidden_size != hidden_size:
            raise HeadsError(
                f"{self.path}: the heads have hidden size {self.hidden_size}, but the target has "
                f"{hidden_size}: use heads that were trained for this model"
            )
        if self.vocab_size is not None and self.vocab_size != vocab_size:
            raise HeadsError(
                f"{self.path}: the heads have a vocabulary of {self.vocab_size}, but the target "
                f"has {vocab_size}: use heads that were trained for this model"
            )

    def build(self, target: TargetSpec, draft_vocab_size: DraftVocabSize) -> DraftHeads:
        """The heads, with weights.

        Raises:
            HeadsError: they do not fit `target`, a file is corrupt, or there is no such ranking.
        """
        self.require_target(hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        if tuple(target.lm_head.shape[1:]) != (target.hidden_size,) or (
            target.lm_head.shape[0] < target.vocab_size
        ):
            raise HeadsError(
                f"the target's lm_head has shape {list(target.lm_head.shape)}, expected at least "
                f"{target.vocab_size} rows of {target.hidden_size}"
            )
        size = choose_size(
            draft_vocab_size, table_rows=self.variant.table_rows, ranked=self.draft_vocab_ranked
        )
        if size is None:
            return self.variant.build(target, None)
        ranking = self.variant.ranking(target.vocab_size)
        limit = len(ranking)
        if self.variant.table_rows is not None:
            limit = min(limit, self.variant.table_rows)
        if not 1 <= size <= limit:
            raise HeadsError(
                f"draft_vocab_size is {size}, but {self.path.parent / DRAFT_VOCAB_FILE} ranks "
                f"{limit} token ids: choose from 1 to that, or 'full'"
            )
        return self.variant.build(target, ranking[:size].to(target.device))


def peek_heads(path: str | Path, *, use_tuning: bool = True) -> HeadsInfo:
    """Read the headers of the heads at `path`, and what is known about the heads.

    Args:
        path: a directory, or a hub id.
        use_tuning: whether to look for the heads' tuning.

    Raises:
        HeadsError: a file is missing, corrupt or of another kind; names it and the first bad key.
    """
    source = open_source(locate_heads(path))
    variant = _variant(source)
    accuracies = _read_calibration(source.directory, variant)
    ranked = count_ranked(source.directory) if variant.table_rows is None else variant.table_rows
    for warning in variant.warnings:
        logger.warning("%s", warning)
    info = HeadsInfo(variant, accuracies, ranked)
    tuning = find_tuning(info.path, info.num_heads) if use_tuning else None
    if tuning is None:
        return info
    return replace(info, tuning=tuning, accuracies=tuning.accuracies)


def _variant(source: Source) -> Variant:
    if source.file.name == TRAINED_FILE:
        return TrainedVariant(source)
    if recognises_hydra(source):
        return HydraVariant(source)
    if recognises_mlp_speculator(source):
        return MLPSpeculatorVariant(source)
    return MedusaVariant(source)


def _read_calibration(directory: Path, variant: Variant) -> Accuracies | None:
    file = directory / CALIBRATION_FILE
    if not is_there(file):
        return None
    table = read_json_object(file).get("accuracies")
    if not isinstance(table, list) or not table or not all(map(_is_accuracy_row, table)):
        raise HeadsError(
            f"{file}: 'accuracies' must be a list of one list per head, of numbers from 0 to 1"
        )
    if len(table) != variant.num_heads:
        raise HeadsError(
            f"{file} is for {len(table)} heads, but {variant.source.file.name} has "
            f"{variant.num_heads}: calibrate again"
        )
    return tuple(tuple(map(float, row)) for row in table)


def _is_accuracy_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) > 0
        and all(type(value) in (int, float) and 0 <= value <= 1 for value in row)
    )
