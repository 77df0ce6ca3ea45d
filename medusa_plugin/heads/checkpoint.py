"""Reads plain Medusa heads from disk and refuses what does not fit, file and key named.

The tensors' names decide: how many heads and layers, own or shared language-model head. The
config is only a hint, since public checkpoints often contradict their own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from medusa_plugin.heads.base import HeadsError, TargetSpec
from medusa_plugin.heads.files import (
    Shape,
    is_there,
    read_json_object,
    read_shapes,
    read_tensors,
)
from medusa_plugin.heads.tuning import HeadsTuning, find_tuning

logger = logging.getLogger("vllm.medusa")

WEIGHTS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
CONFIG_FILE = "config.json"
CALIBRATION_FILE = "calibration.json"
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
DRAFT_VOCAB_KEY = "token_ids"

_KEY = re.compile(
    r"(?:medusa_heads?\.|heads\.)?"
    r"(?P<head>[0-9]{1,9})\.(?P<layer>[0-9]{1,9})\.(?:linear\.(?P<linear>weight|bias)|weight)"
)

Entry = TypeVar("Entry")
Accuracies = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HeadsInfo:
    """What the headers of a heads directory say; no weight is read for it."""

    path: Path
    """The weights file."""
    num_heads: int
    num_layers: int
    """Residual blocks per head."""
    hidden_size: int
    vocab_size: int | None
    """Rows of each head's own language-model head; None where the target's is shared."""
    has_bias: bool
    accuracies: Accuracies | None
    """Entry [h][k]: how often candidate k of head h is right, by the tuning, else by
    `calibration.json`; None without either."""
    draft_vocab_ranked: int
    """Token ids ranked by frequency in `draft_vocab.safetensors`; 0 without that file."""
    tuning: HeadsTuning | None = None
    """What `medusa tune` learnt about these weights."""

    @property
    def owns_lm_head(self) -> bool:
        """Whether each head has its own language-model head."""
        return self.vocab_size is not None

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

    def describe(self) -> str:
        """One phrase for the log, e.g. "4 Medusa heads, 1 layer, shared lm head"."""
        heads = f"{self.num_heads} Medusa head{'s' * (self.num_heads != 1)}"
        layers = f"{self.num_layers} layer{'s' * (self.num_layers != 1)}"
        return f"{heads}, {layers}, {'own lm heads' if self.owns_lm_head else 'shared lm head'}"


@dataclass(frozen=True)
class HeadWeights:
    """Weights of all heads, stacked, in the target's dtype and on its device."""

    num_heads: int
    weights: tuple[torch.Tensor, ...]
    """Per layer `[num_heads, hidden_size, hidden_size]`, output features before input features."""
    biases: tuple[torch.Tensor, ...]
    """Per layer `[num_heads, hidden_size]`; empty for heads without biases."""
    lm_heads: torch.Tensor | None
    """`[num_heads, vocab_size, hidden_size]`; None where the target's is shared."""


def peek_heads(path: str | Path, *, use_tuning: bool = True) -> HeadsInfo:
    """Read the headers of the heads in directory `path`, and what is known about the heads.

    Args:
        path: the directory.
        use_tuning: whether to look for the heads' tuning.

    Raises:
        HeadsError: a file is missing, corrupt or of another kind; names it and the first bad key.
    """
    directory = Path(path)
    file = _weights_file(directory)
    shapes = _canonical(read_shapes(file), file)
    info = _infer(shapes, file, _read_calibration(directory), _draft_vocab_size(directory))
    _check_shapes(shapes, info)
    _compare_config(directory, info)
    tuning = find_tuning(info.path, info.num_heads) if use_tuning else None
    if tuning is None:
        return info
    return replace(info, tuning=tuning, accuracies=tuning.accuracies)


def read_weights(info: HeadsInfo, target: TargetSpec) -> HeadWeights:
    """Read the weights that `info` describes, for `target`.

    Raises:
        HeadsError: the file is corrupt, or a tensor has NaN or infinite values.
    """
    tensors = _canonical(read_tensors(info.path), info.path)

    def stacked(names: list[str]) -> torch.Tensor:
        stack = torch.stack([tensors[name].to(target.dtype) for name in names])
        for name, tensor in zip(names, stack, strict=True):
            if not torch.isfinite(tensor).all():
                raise HeadsError(
                    f"{info.path}: {name} has NaN or infinite values in {target.dtype}: the file "
                    "is damaged, its training diverged, or the dtype is too narrow for it"
                )
        return stack.to(target.device)

    heads, layers = range(info.num_heads), range(info.num_layers)
    linear = "{}.{}.linear.{}".format
    return HeadWeights(
        num_heads=info.num_heads,
        weights=tuple(stacked([linear(h, layer, "weight") for h in heads]) for layer in layers),
        biases=tuple(
            stacked([linear(h, layer, "bias") for h in heads]) for layer in layers if info.has_bias
        ),
        lm_heads=stacked([f"{h}.{info.num_layers}.weight" for h in heads])
        if info.owns_lm_head
        else None,
    )


def read_draft_vocab(path: str | Path, vocab_size: int) -> torch.Tensor:
    """Token ids of the heads in directory `path`, most frequent first: int64 `[n]`.

    Raises:
        HeadsError: the file is missing or corrupt, or an id is repeated or not in the vocabulary.
    """
    file = Path(path) / DRAFT_VOCAB_FILE
    if not is_there(file):
        raise HeadsError(
            f"{file} is missing: a draft vocabulary needs this ranking of token ids; "
            "set draft_vocab_size to 'full' to do without"
        )
    tensors = read_tensors(file)
    token_ids = tensors.get(DRAFT_VOCAB_KEY)
    integer = (torch.int32, torch.int64)
    if token_ids is None or token_ids.dim() != 1 or token_ids.dtype not in integer:
        raise HeadsError(f"{file}: expected one int32 vector {DRAFT_VOCAB_KEY!r}")
    token_ids = token_ids.long()
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.numel():
        raise HeadsError(f"{file}: token id {int(outside[0])} is not in 0..{vocab_size - 1}")
    if len(set(token_ids.tolist())) != len(token_ids):
        raise HeadsError(f"{file}: token ids are repeated")
    return token_ids


def _weights_file(directory: Path) -> Path:
    if not directory.is_dir():
        raise HeadsError(f"no directory of Medusa heads at {directory}")
    for name in WEIGHTS_FILES:
        if is_there(directory / name):
            return directory / name
    raise HeadsError(f"{directory} holds no Medusa heads: expected {' or '.join(WEIGHTS_FILES)}")


def _canonical(entries: Mapping[str, Entry], file: Path) -> dict[str, Entry]:
    """Entries under names without prefix; refuses names that plain Medusa heads do not have."""
    canonical: dict[str, Entry] = {}
    for key, entry in entries.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise HeadsError(
                f"{file}: unknown tensor {key[:100]!r}: plain Medusa heads hold "
                "HEAD.LAYER.linear.weight, HEAD.LAYER.linear.bias and HEAD.LAYER.weight only; "
                "other kinds (Hydra, EAGLE, merged models) are not supported"
            )
        linear = f"linear.{match['linear']}" if match["linear"] else "weight"
        name = f"{int(match['head'])}.{int(match['layer'])}.{linear}"
        if name in canonical:
            raise HeadsError(f"{file}: tensor {name} is there twice, the second time as {key!r}")
        canonical[name] = entry
    if not canonical:
        raise HeadsError(f"{file} holds no tensors")
    return canonical


def _infer(
    shapes: Mapping[str, Shape], file: Path, accuracies: Accuracies | None, ranked: int
) -> HeadsInfo:
    """Structure from the names: every head must have every layer, and nothing else."""
    parts = [name.split(".") for name in shapes]
    num_heads = 1 + max(int(part[0]) for part in parts)
    num_layers = 1 + max((int(part[1]) for part in parts if part[2] == "linear"), default=-1)
    has_bias = any(part[-1] == "bias" for part in parts)
    own_lm_heads = [name for name, part in zip(shapes, parts, strict=True) if part[2] == "weight"]

    def expected() -> Iterator[str]:
        for head in range(num_heads):
            for layer in range(num_layers):
                yield f"{head}.{layer}.linear.weight"
                if has_bias:
                    yield f"{head}.{layer}.linear.bias"
            if own_lm_heads:
                yield f"{head}.{num_layers}.weight"

    structure = f"{num_heads} heads of {num_layers} layers"
    # Lazily: a wild head number must not build a huge list.
    for name in expected():
        if name not in shapes:
            raise HeadsError(f"{file}: tensor {name} is missing from {structure}")
    known = set(expected())
    unexpected = next((name for name in shapes if name not in known), None)
    if unexpected is not None:
        raise HeadsError(f"{file}: tensor {unexpected} does not belong to {structure}")
    if accuracies is not None and len(accuracies) != num_heads:
        raise HeadsError(
            f"{file.parent / CALIBRATION_FILE} is for {len(accuracies)} heads, but {file.name} "
            f"has {num_heads}: calibrate again"
        )
    # A scalar has no width; `_check_shapes` refuses it.
    hidden_size = (shapes[next(expected())] or (0,))[-1]
    return HeadsInfo(
        path=file,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=(shapes[own_lm_heads[0]] or (0,))[0] if own_lm_heads else None,
        has_bias=has_bias,
        accuracies=accuracies,
        draft_vocab_ranked=ranked,
    )


def _check_shapes(shapes: Mapping[str, Shape], info: HeadsInfo) -> None:
    hidden = info.hidden_size
    for name, shape in shapes.items():
        if name.endswith("linear.weight"):
            expected: tuple[int | None, ...] = (hidden, hidden)
        elif name.endswith("bias"):
            expected = (hidden,)
        else:
            expected = (info.vocab_size, hidden)
        if shape != expected:
            raise HeadsError(
                f"{info.path}: {name} has shape {list(shape)}, expected {list(expected)} as in "
                "the other tensors"
            )


def _compare_config(directory: Path, info: HeadsInfo) -> None:
    file = directory / CONFIG_FILE
    if not is_there(file):
        return
    config = read_json_object(file)
    for key, found in (
        ("medusa_num_heads", info.num_heads),
        ("medusa_num_layers", info.num_layers),
    ):
        if config.get(key, found) != found:
            logger.warning(
                "%s says %s = %r, but %s holds %d: the weights decide",
                file,
                key,
                config[key],
                info.path.name,
                found,
            )


def _read_calibration(directory: Path) -> Accuracies | None:
    file = directory / CALIBRATION_FILE
    if not is_there(file):
        return None
    table = read_json_object(file).get("accuracies")
    if not isinstance(table, list) or not table or not all(map(_is_accuracy_row, table)):
        raise HeadsError(
            f"{file}: 'accuracies' must be a list of one list per head, of numbers from 0 to 1"
        )
    return tuple(tuple(map(float, row)) for row in table)


def _is_accuracy_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) > 0
        and all(type(value) in (int, float) and 0 <= value <= 1 for value in row)
    )


def _draft_vocab_size(directory: Path) -> int:
    file = directory / DRAFT_VOCAB_FILE
    if not is_there(file):
        return 0
    try:
        with safe_open(file, framework="pt") as opened:
            return int(opened.get_slice(DRAFT_VOCAB_KEY).get_shape()[0])
    except (SafetensorError, OSError, IndexError) as error:
        raise HeadsError(
            f"{file}: no readable int32 vector {DRAFT_VOCAB_KEY!r}: {error}"
        ) from error
