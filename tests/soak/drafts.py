"""Drafts of every kind in one batch: planted on any tree, and those of the real drafter."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.draft import Drafter, TreeDrafter
from medusa_plugin.heads.base import DraftHeads
from medusa_plugin.tree.budget import CostCurve, StepCosts
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.drafters import PlantedDrafter
from tests.engine.planted_heads import Planted, PlantedBranches, PlantedHeads
from tests.soak.cases import Case

Futures = Mapping[tuple[str, int], Sequence[int]]
"""(request, index of the answer) -> tokens that plain decoding gives, and more of them."""

_NO_HEADS = CostCurve((1,), (0.0,))
CHEAP = StepCosts(CostCurve((1, 64), (1.0, 1.0)), _NO_HEADS)
DEAR = StepCosts(CostCurve((1, 8, 64), (1.0, 1.0, 8.0)), CostCurve((1,), (0.02,)))


def identify(request_id: str) -> tuple[str, int]:
    """Name and index of the answer out of vLLM's internal id: `[INDEX_]NAME-RANDOM`."""
    name = request_id.rsplit("-", 1)[0]
    index, _, rest = name.rpartition("_")
    return (rest, int(index)) if index else (name, 0)


class KnownFutures:
    """What plain decoding goes on with, as long as a text follows it.

    Args:
        cases: the requests.
        futures: their answers.
    """

    def __init__(self, cases: Sequence[Case], futures: Futures) -> None:
        self._starts = {case.name: len(case.prompt) for case in cases}
        self._futures = futures

    def of(self, request: StepRequest, path: AcceptedPath) -> list[int]:
        """Tokens after `path`, none where they are not known."""
        name, index = identify(request.request_id)
        known = self._futures.get((name, index))
        if known is None:
            return []
        output = [*request.committed[self._starts[name] :].tolist(), *path.tokens]
        return list(known[len(output) :]) if list(known[: len(output)]) == output else []


class PlantedTrees(PlantedDrafter):
    """Random trees; how often they are right changes from draft to draft."""

    def __init__(self, known: KnownFutures, num_nodes: int, seed: int) -> None:
        pick = random.Random(seed)
        super().__init__(random_trees(pick, 24, num_nodes), VOCAB_SIZE, 1.0, seed)
        self._known = known

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `medusa_plugin.draft.Drafter`."""
        self.hit_rate = self._random.choice([0.0, 0.5, 0.8, 0.95, 1.0, 1.0])
        self._upcoming = [self._known.of(*pair) for pair in zip(requests, paths, strict=True)][::-1]
        return super().draft(requests, paths, hidden_states)

    def _future(self, sequence: tuple[int, ...]) -> list[int]:
        return self._upcoming.pop()


class TellingDrafter:
    """The real drafter; its planted heads are told the future before each draft.

    Args:
        drafter: over `heads`.
        heads: to be told; other heads guess.
        known: the future.
    """

    def __init__(self, drafter: TreeDrafter, heads: DraftHeads, known: KnownFutures) -> None:
        self.drafter, self._heads, self._known = drafter, heads, known
        self._rows = self._tokens = self._requests = 0

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `medusa_plugin.draft.Drafter`."""
        if isinstance(self._heads, Planted):
            pairs = zip(requests, paths, strict=True)
            self._heads.futures = [self._known.of(*pair) for pair in pairs]
        self._requests = len(requests)
        self._rows = sum(request.tree.num_rows for request in requests)
        self._tokens = sum(len(path.tokens) for path in paths)
        return self.drafter.draft(requests, paths, hidden_states)

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `medusa_plugin.draft.Drafter`."""
        self.drafter.forget(request_ids)

    def observe_step(
        self, num_rows: int, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """Its own share of the step, and what that costs by what it was told, not by a clock."""
        costs = self.drafter.costs
        if costs is None or not self._requests:
            return
        drafted = np.array([self._rows - self._requests])
        usual = float(costs.step(self._requests, drafted)[0])
        self.drafter.observe_step(self._rows, self._requests, self._tokens, usual)

    @property
    def kept(self) -> set[str]:
        """Requests of which anything is kept."""
        drafter = self.drafter
        lookup = drafter._lookup
        return {
            *drafter.estimate._requests,
            *drafter._trees_estimate._expected,
            *(() if lookup is None else lookup._requests),
        }


class MixedDrafter:
    """Each request has its own kind of draft, whatever else is in the batch.

    Args:
        cases: the requests.
        futures: their answers.
        heads: the engine's own, which know nothing.
        num_nodes: most nodes of a tree.
        seed: of all choices.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        futures: Futures,
        heads: DraftHeads,
        num_nodes: int,
        seed: int,
    ) -> None:
        known = KnownFutures(cases, futures)

        def real(heads: DraftHeads, **options: Any) -> TellingDrafter:
            return TellingDrafter(TreeDrafter(heads, num_nodes=num_nodes, **options), heads, known)

        def right(rate: float) -> PlantedHeads:
            return PlantedHeads(rate, seed)

        def branching(rate: float) -> PlantedBranches:
            return PlantedBranches(rate, seed)

        planted = PlantedTrees(known, num_nodes, seed)
        bushy = harness.BUSHY.prefix(min(num_nodes, harness.BUSHY.num_nodes))
        self._drafters: list[Drafter] = [
            planted,
            planted,
            planted,
            real(right(0.9)),
            real(right(0.7), tree=bushy),
            real(right(0.8), lookup=True, costs=CHEAP),
            real(right(0.95), costs=DEAR),
            real(branching(0.9)),
            real(branching(0.7), tree=bushy),
            real(branching(0.8), lookup=True, costs=CHEAP),
            real(heads),
        ]
        self._seed = seed
        self.accepted = self.branching = self.drafts = 0

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `medusa_plugin.draft.Drafter`."""
        shares: dict[int, list[int]] = {}
        for i, (request, path) in enumerate(zip(requests, paths, strict=True)):
            self.drafts += request.tree.num_nodes > 0
            self.branching += not request.tree.is_chain
            self.accepted += len(path.rows)
            shares.setdefault(self._kind(request.request_id), []).append(i)
        trees: dict[int, DraftTree] = {}
        for kind, share in sorted(shares.items()):
            drafted = self._drafters[kind].draft(
                [requests[i] for i in share], [paths[i] for i in share], hidden_states[share]
            )
            trees.update(zip(share, drafted, strict=True))
        return [trees[i] for i in range(len(requests))]

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `medusa_plugin.draft.Drafter`."""
        ids = list(request_ids)
        for drafter in set(self._drafters):
            drafter.forget(ids)

    def observe_step(
        self, num_rows: int, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """See `medusa_plugin.draft.Drafter`."""
        for drafter in set(self._drafters):
            drafter.observe_step(num_rows, num_requests, num_tokens, seconds)

    @property
    def kept(self) -> set[str]:
        """Requests of which anything is kept."""
        real = [drafter for drafter in self._drafters if isinstance(drafter, TellingDrafter)]
        return set().union(*(drafter.kept for drafter in real))

    def _kind(self, request_id: str) -> int:
        # A request keeps its kind for life, in every run of the same seed.
        name, index = identify(request_id)
        return zlib.crc32(f"{self._seed}/{name}/{index}".encode()) % len(self._drafters)


def random_trees(pick: random.Random, count: int, most_nodes: int) -> list[TokenTree]:
    """Trees of all shapes, and those that `harness` names."""
    named = harness.TREES.values()
    return [
        *harness.random_trees(pick, count, most_nodes),
        *(tree.prefix(min(tree.num_nodes, most_nodes)) for tree in named),
    ]
