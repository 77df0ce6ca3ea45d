"""The real drafter, over heads that know the future: every kind of tree and size, no other token.

Hits must come from the drafter's own ranking, sizing and book-keeping, so only the heads are
planted: some rank of some heads carries the right token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.draft import TreeDrafter
from medusa_plugin.tree.budget import CostCurve, StepCosts
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.vllm_glue import costs as measuring
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.drafters import PlantedDrafter
from tests.engine.planted_heads import Planted, PlantedBranches, PlantedHeads

NUM_NODES = 12
KINDS = [PlantedHeads, PlantedBranches]
FREE = StepCosts(CostCurve((1, 64), (1.0, 1.0)), CostCurve((1,), (0.0,)))
STEEP = StepCosts(CostCurve((1, 64), (1.0, 128.0)), CostCurve((1,), (0.1,)))
ROWS_COST_AFTER_FOUR = StepCosts(CostCurve((1, 4, 64), (1.0, 1.0, 12.0)), CostCurve((1,), (0.01,)))


class Watched:
    """A `TreeDrafter` over planted heads; keeps the trees that were verified."""

    def __init__(self, drafter: TreeDrafter, heads: Planted, known: PlantedDrafter) -> None:
        self.drafter, self.heads, self.known = drafter, heads, known
        self.verified: list[DraftTree] = []
        self.accepted: list[int] = []
        self.proposed: list[int] = []
        """Nodes of the whole batch by step."""
        self.steps: list[tuple[int, int, float]] = []
        self._calls = 0

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        for request, path in zip(requests, paths, strict=True):
            if request.tree.num_nodes:
                self.verified.append(request.tree)
                self.accepted.append(len(path.rows))
        self.heads.futures = [
            self.known._future((*request.committed.tolist(), *path.tokens))
            for request, path in zip(requests, paths, strict=True)
        ]
        trees = self.drafter.draft(requests, paths, hidden_states)
        self.proposed.append(sum(tree.num_nodes for tree in trees))
        return trees

    def forget(self, request_ids: Iterable[str]) -> None:
        self.drafter.forget(request_ids)

    def observe_step(
        self, num_rows: int, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        self.steps.append((num_rows, num_requests, seconds))
        costs = self.drafter.costs
        if costs is None:
            return
        # Not this machine's time, but what the costs that were given say.
        seconds = float(costs.step(num_requests, np.array([num_rows - num_requests]))[0])
        if self.heads.calls > self._calls:
            seconds += costs.draft_seconds(num_requests)
        self._calls = self.heads.calls
        self.drafter.observe_step(num_rows, num_requests, num_tokens, seconds)


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        speculative_config=harness.speculation(random_heads, num_speculative_tokens=NUM_NODES)
    )


def run(
    plain: Any,
    medusa: Any,
    hit_rate: float,
    params: SamplingParams | None = None,
    count: int = 6,
    kind: type[Planted] = PlantedHeads,
    **options: Any,
) -> Watched:
    """Compare with plain decoding; returns what was watched."""
    params = params or SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    heads = kind(hit_rate)
    known = PlantedDrafter([harness.CHAIN], VOCAB_SIZE, 1.0)
    watched = Watched(TreeDrafter(heads, num_nodes=NUM_NODES, **options), heads, known)
    harness.runner_of(medusa).drafter.drafter = watched
    requests = harness.prompts(count, lengths=[3, 17, 40], vocab_size=VOCAB_SIZE, seed=21)
    harness.teach(known, plain, requests, params)
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)
    known_requests = set(harness.runner_of(medusa).requests)
    assert set(watched.drafter.estimate._requests) <= known_requests, "ended requests are kept"
    return watched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("costs", [None, FREE, ROWS_COST_AFTER_FOUR], ids=["fixed", "free", "dear"])
@pytest.mark.parametrize("tree", [None, harness.BUSHY], ids=["dynamic", "static"])
def test_output_is_that_of_plain_decoding(
    plain: Any,
    medusa: Any,
    tree: Any,
    costs: StepCosts | None,
    hit_rate: float,
    kind: type[Planted],
) -> None:
    if tree is not None:
        tree = tree.prefix(NUM_NODES)
    watched = run(plain, medusa, hit_rate, tree=tree, costs=costs, kind=kind)
    assert (sum(watched.accepted) > 0) == (hit_rate > 0)
    assert all(rows >= requests and seconds > 0 for rows, requests, seconds in watched.steps)
    verified = sum(rows - requests for rows, requests, _ in watched.steps)
    assert 0 < verified <= sum(watched.proposed) or costs is ROWS_COST_AFTER_FOUR
    if costs is not ROWS_COST_AFTER_FOUR:
        assert any(not draft.is_chain for draft in watched.verified)
    if costs is None:
        assert {draft.num_nodes for draft in watched.verified} >= {NUM_NODES}
        if hit_rate == 1.0:
            assert max(watched.accepted) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_sampling_equals_plain_decoding(
    plain: Any, medusa: Any, kind: type[Planted]
) -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=30, ignore_eos=True)
    watched = run(plain, medusa, 0.8, params, costs=FREE, kind=kind)
    assert sum(watched.accepted) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hit_rate", [0.0, 0.7])
@pytest.mark.parametrize("costs", [None, FREE, STEEP], ids=["fixed", "free", "steep"])
def test_branches_of_repeating_text_are_accepted(
    plain: Any, medusa: Any, costs: StepCosts | None, hit_rate: float, kind: type[Planted]
) -> None:
    # Nothing but these few tokens may come, so the text is full of repeats.
    params = SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=[1, 2, 3]
    )
    watched = run(plain, medusa, hit_rate, params, lookup=True, costs=costs, kind=kind)
    if costs is not STEEP:
        assert max(watched.accepted) > PlantedHeads.num_heads, "no branch went beyond the heads"
    assert not (set(watched.drafter._lookup._requests) - set(harness.runner_of(medusa).requests))


def test_trees_that_lose_vanish(plain: Any, medusa: Any) -> None:
    assert len(run(plain, medusa, 0.7, costs=STEEP).verified) == 0


def test_a_small_batch_gets_larger_trees_than_a_large_one(plain: Any, medusa: Any) -> None:
    def mean(count: int) -> float:
        found = run(plain, medusa, 0.9, costs=ROWS_COST_AFTER_FOUR, count=count).verified
        return sum(draft.num_nodes for draft in found) / max(1, len(found))

    assert mean(1) > 1.5 * mean(12)


def test_heads_that_are_never_right_stop_drafting(plain: Any, medusa: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    # Even free rows are not worth the heads' time once these are known to be wrong.
    costs = StepCosts(CostCurve((1, 64), (1.0, 1.0)), CostCurve((1,), (0.1,)))
    sizes = run(plain, medusa, 0.0, params, count=2, costs=costs).proposed
    assert sum(size > 0 for size in sizes[:20]) >= 6
    # One look of four steps. In the last step one request is left: a load not met before.
    assert sum(size > 0 for size in sizes[-41:-1]) <= 4


def test_costs_are_measured_at_start(medusa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = harness.runner_of(medusa)
    proposer = runner.drafter
    assert proposer.sizes_follow_cost
    proposer.load_model(runner.model)
    assert proposer.drafter.costs is None
    measured = measuring._measure(runner, proposer.drafter)
    assert measured.verify.rows == measuring.ROWS
    assert min(measured.verify.seconds) > 0 and min(measured.draft.seconds) > 0
    runner.measure_costs()
    assert proposer.drafter.costs is not None
    # A quiet machine's costs are kept and not measured twice, a busy one's are not kept.
    calm = StepCosts(CostCurve((1, 2), (0.1, 0.2)), measured.draft)
    for found, kept in (
        (StepCosts(CostCurve((1, 2), (0.2, 0.1)), calm.draft), False),
        (calm, True),
    ):
        monkeypatch.setenv("MEDUSA_CACHE", tempfile.mkdtemp(prefix="medusa-test-"))
        monkeypatch.setattr(measuring, "_measure", lambda *_, found=found: found)
        assert measuring.step_costs(runner, proposer.drafter) == found
        monkeypatch.setattr(measuring, "_measure", lambda *_: pytest.fail("measured again"))
        if kept:
            assert measuring.step_costs(runner, proposer.drafter) == found
        else:
            with pytest.raises(pytest.fail.Exception):
                measuring.step_costs(runner, proposer.drafter)
