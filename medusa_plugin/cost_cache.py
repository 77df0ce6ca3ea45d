"""Measured step costs, kept in the user's cache by model, machine and settings."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from medusa_plugin.atomic_file import write_whole
from medusa_plugin.tree.budget import CostCurve, StepCosts
from tvm_ops.artifact import cache_root

logger = logging.getLogger("vllm.medusa")

Circumstances = Mapping[str, str]
"""Everything that the costs depend on: model, dtype, processor, threads, versions, ..."""


class _Curve(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def curve(self) -> CostCurve:
        return CostCurve(self.rows, self.seconds)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    circumstances: dict[str, str]
    verify: _Curve
    draft: _Curve


def costs_file(circumstances: Circumstances) -> Path:
    """Where costs measured under `circumstances` are kept."""
    text = json.dumps(dict(circumstances), sort_keys=True)
    return cache_root() / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read_costs(circumstances: Circumstances) -> StepCosts | None:
    """Costs measured earlier under the same circumstances, or None.

    A damaged file counts as none, with a warning: it is measured anew and replaced.
    """
    file = costs_file(circumstances)
    try:
        found = _File.model_validate_json(file.read_text())
        if found.circumstances != dict(circumstances):
            return None
        return StepCosts(found.verify.curve(), found.draft.curve())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        logger.warning("medusa: the cost file %s is not usable and is replaced: %s", file, error)
        return None


def write_costs(circumstances: Circumstances, costs: StepCosts) -> None:
    """Keep `costs`. Where the cache cannot be written a warning says so: they still hold now."""
    file = costs_file(circumstances)
    content = _File(
        circumstances=dict(circumstances),
        verify=_Curve(rows=costs.verify.rows, seconds=costs.verify.seconds),
        draft=_Curve(rows=costs.draft.rows, seconds=costs.draft.seconds),
    ).model_dump_json(indent=1)
    try:
        write_whole(file, content)  # two engines may start at once
    except OSError as error:
        logger.warning(
            "medusa: measured step costs cannot be kept in %s (%s): every start measures again",
            file.parent,
            error,
        )
