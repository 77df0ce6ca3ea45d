"""What the tests of tensor parallelism run inside the workers, through `LLM.collective_rpc`."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from medusa_plugin.draft import TreeDrafter
from medusa_plugin.tree.budget import StepCosts
from medusa_plugin.vllm_glue import costs, model_runner
from tests.engine.drafters import PlantedDrafter

LONGEST_DELAY = 0.004

Tokens = tuple[int, ...]
Step = tuple[list[tuple[Tokens, Tokens]], list[tuple[list[int], list[int]] | None]]
"""Rows and tokens of each accepted path; tokens and parents of each draft."""


class FailingDrafter:
    """Raises as soon as it is asked to draft."""

    def draft(self, *_: Any) -> NoReturn:
        raise ValueError("planted failure")

    def forget(self, _: Any) -> None:
        pass


def rank() -> int:
    found: int = get_tp_group().rank_in_group
    return found


def disturb(worker: Any) -> None:
    """Give each rank random states, delays and a clock of its own, and all but the first garbage
    for logits: whatever a rank decides by itself is decided differently."""
    runner, pick = worker.model_runner, random.Random(100 + rank())
    torch.manual_seed(100 + rank())
    random.seed(100 + rank())
    np.random.seed(100 + rank())
    sample = runner._sample

    def disturbed(logits: torch.Tensor, metadata: Any) -> Any:
        time.sleep(pick.random() * LONGEST_DELAY)
        if rank():
            logits.normal_()
            for generator in runner.input_batch.generators.values():
                generator.manual_seed(pick.randrange(1 << 31))
        return sample(logits, metadata)

    runner._sample = disturbed
    if rank():
        clock = SimpleNamespace(perf_counter=_wrong_clock(pick).__next__)
        model_runner.time = costs.time = clock


def _wrong_clock(pick: random.Random) -> Iterator[float]:
    for seconds in itertools.count():
        yield seconds + pick.random()


def watch(worker: Any) -> None:
    """Keep the accepted paths and the drafts of every step."""
    runner = worker.model_runner
    runner.steps_of_test = []
    sample = runner._sample

    def watched(*args: Any) -> Any:
        output = sample(*args)
        result = runner._result
        paths = [(path.rows, path.tokens) for path in result.paths]
        drafts = [tree and (tree.tokens.tolist(), tree.parents.tolist()) for tree in result.drafts]
        runner.steps_of_test.append((paths, drafts))
        return output

    runner._sample = watched


def take_steps(worker: Any) -> list[Step]:
    """The steps since the last call."""
    runner = worker.model_runner
    steps: list[Step] = runner.steps_of_test
    runner.steps_of_test = []
    return steps


def plant(worker: Any, drafter: PlantedDrafter) -> None:
    """Let `drafter` draft, on the rank that drafts."""
    if not rank():
        worker.model_runner.drafter.drafter = drafter


def planted(worker: Any) -> PlantedDrafter | None:
    """The drafter that was planted, with what it has counted."""
    return None if rank() else worker.model_runner.drafter.drafter


def has_heads(worker: Any) -> bool:
    return hasattr(worker.model_runner.drafter, "drafter")


def own_heads(worker: Any, costs: StepCosts | None) -> None:
    """Draft with the engine's own heads again, anew."""
    runner = worker.model_runner
    runner.drafter.load_model(runner.model)
    if not rank():
        runner.drafter.drafter.costs = costs


def candidates(
    worker: Any, hidden: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the engine's heads make of `hidden`: token ids and log-probabilities."""
    if rank():
        return None
    drafter = worker.model_runner.drafter.drafter
    assert isinstance(drafter, TreeDrafter)
    found = drafter.heads.propose(hidden, torch.zeros(len(hidden), dtype=torch.int64), top_k)
    return found.token_ids, found.log_probs


def swap_embedding(worker: Any, token: int, row: torch.Tensor) -> torch.Tensor | None:
    """Put `row` in the place of what `token` is embedded as, on the rank that holds it, which
    returns what was there."""
    layer = worker.model_runner.model.model.embed_tokens
    first, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    if not first <= token < end:
        return None
    found = layer.weight.data[token - first].clone()
    layer.weight.data[token - first] = row
    return found


def measure_costs(worker: Any, caches: list[Path]) -> StepCosts | None:
    """Measure as at start, each rank with a cache directory of its own."""
    runner = worker.model_runner
    known = os.environ.get("MEDUSA_CACHE")
    os.environ["MEDUSA_CACHE"] = str(caches[rank()])
    try:
        runner.measure_costs()
    finally:
        os.environ.pop("MEDUSA_CACHE")
        if known is not None:
            os.environ["MEDUSA_CACHE"] = known
    return None if rank() else runner.drafter.drafter.costs
