"""Draft: the heads' candidates -> for each request the tree that pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.branches import LookupSource
from medusa_plugin.growth import Growth, propose_all
from medusa_plugin.heads.base import DraftHeads, SequentialHeads
from medusa_plugin.static_nodes import StaticNodes
from medusa_plugin.tree.budget import CostLearner, StepCosts, choose_sizes
from medusa_plugin.tree.draft_tree import DraftTree, trees_of
from medusa_plugin.tree.dynamic import (
    Branches,
    Int64Array,
    RankedNodes,
    independent,
    rank_nodes,
)
from medusa_plugin.tree.estimate import HeadCalibration, HeadsEstimate, TreesEstimate
from medusa_plugin.tree.switch import DraftSwitch
from medusa_plugin.tree.token_tree import TokenTree


class Drafter(Protocol):
    """Proposes the next trees; the only implementation outside tests is `TreeDrafter`."""

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """Propose one tree per request, just the root where none pays.

        Args:
            requests: the requests that draft, n of them.
            paths: what each gained in this step; its last token is the new root.
            hidden_states: `[n, hidden_size]`, after the final norm, at each last accepted row.
        """
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept for requests that ended."""
        ...

    def observe_step(
        self, num_rows: int, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """Learn what a step took that did nothing but decode.

        Args:
            num_rows: verified, of all requests.
            num_requests: of the batch; all of them drafted.
            num_tokens: gained, of all requests.
            seconds: from its start until its drafts were there.
        """
        ...


class TreeDrafter:
    """Medusa heads over dynamic or static trees, as large as pays.

    Args:
        heads: evaluated at most once per step for the whole batch.
        num_nodes: most nodes of a tree.
        tree: static topology of at most that many nodes, of which a prefix is drafted; None for
            the most probable nodes of each step.
        calibration: of the heads' probabilities, one per head.
        lookup: whether branches from prompt look-up join; dynamic trees only.
        costs: what a step costs; None drafts as many nodes as allowed, whatever they cost. May be
            set later.
        max_rows: rows that the scheduler grants in a step.
    """

    def __init__(
        self,
        heads: DraftHeads,
        *,
        num_nodes: int,
        tree: TokenTree | None = None,
        calibration: Sequence[HeadCalibration] = (),
        lookup: bool = False,
        costs: StepCosts | None = None,
        max_rows: int = 1 << 30,
    ) -> None:
        self.heads = heads
        self.num_nodes = num_nodes
        self.tree = tree
        self.max_rows = max_rows
        self.estimate = HeadsEstimate(calibration or [HeadCalibration()] * heads.num_heads)
        self._static = None if tree is None else StaticNodes(tree)
        wanted = num_nodes if tree is None else max(tree.ranks) + 1
        self._top_k = min(wanted, heads.max_top_k)
        self._trees_estimate = TreesEstimate()
        self._switch = DraftSwitch()
        self._asked_switch = False
        self._evaluated_heads = False
        if lookup and tree is not None:
            raise ValueError("branches from look-up need dynamic trees")
        self._lookup = LookupSource() if lookup else None
        self._learner: CostLearner | None = None
        self.costs = costs

    @property
    def costs(self) -> StepCosts | None:
        """What a step costs, as far as known by now."""
        return None if self._learner is None else self._learner.costs

    @costs.setter
    def costs(self, costs: StepCosts | None) -> None:
        self._learner = None if costs is None else CostLearner(costs)

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `Drafter.draft`."""
        ids = [request.request_id for request in requests]
        self.estimate.observe(ids, [path.tokens for path in paths])
        for request, path in zip(requests, paths, strict=True):
            self._trees_estimate.observe(request.request_id, request.tree.num_nodes, len(path.rows))
        branches = self._branches(requests, paths)
        limits = np.array([request.options.node_limit(self.num_nodes) for request in requests])
        self._asked_switch = self._evaluated_heads = False
        if not limits.any():  # nobody wants a draft
            return [DraftTree.root_only()] * len(requests)
        if self.costs is None:
            ranked = self._with_heads(requests, paths, hidden_states, branches)
            sizes = np.minimum(limits, np.isfinite(ranked.log_probs).sum(1))
            return trees_of(ranked.tokens, ranked.parents, sizes)
        self._asked_switch = True
        self._evaluated_heads = self._switch.should_draft(len(requests))
        if self._evaluated_heads:
            ranked = self._with_heads(requests, paths, hidden_states, branches)
        elif branches is not None:
            nothing = np.zeros((len(limits), 0, 0), np.int64)
            no_heads = independent(nothing, nothing.astype(np.float32))
            ranked = rank_nodes(no_heads, (len(limits), 0), self.num_nodes, branches)
        else:
            return [DraftTree.root_only()] * len(requests)
        sizes = self._sizes(ids, ranked, limits, self.costs)
        return trees_of(ranked.tokens, ranked.parents, sizes)

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `Drafter.forget`."""
        self.estimate.forget(request_ids)
        self._trees_estimate.forget(request_ids)
        if self._lookup is not None:
            self._lookup.forget(request_ids)

    def observe_step(
        self, num_rows: int, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """See `Drafter.observe_step`."""
        if self._learner is None:
            return
        costs = self._learner.costs
        if self._asked_switch:
            usual = costs.verify.at_count(num_requests)
            self._switch.observe(num_requests, num_tokens, seconds / usual)
        if self._evaluated_heads:
            seconds -= costs.draft_seconds(num_requests)
        self._learner.observe(num_requests, num_rows - num_requests, seconds)

    def _branches(
        self, requests: Sequence[StepRequest], paths: Sequence[AcceptedPath]
    ) -> Branches | None:
        if self._lookup is None:
            return None
        ids = [request.request_id for request in requests]
        self._lookup.advance(
            ids,
            [request.committed for request in requests],
            [np.array(path.tokens, np.int32) for path in paths],
        )
        return self._lookup.propose(ids, self.num_nodes)

    def _with_heads(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
        branches: Branches | None,
    ) -> RankedNodes:
        """Nodes that each request could draft, best first."""
        roots = torch.tensor([path.tokens[-1] for path in paths], dtype=torch.int64)
        roots = roots.to(hidden_states.device)
        ids = [request.request_id for request in requests]
        shape = len(ids), self.heads.num_heads
        if isinstance(self.heads, SequentialHeads):
            growth = Growth(self.heads, hidden_states, roots, self._top_k, self.estimate, ids)
            if self._static is None:
                ranked = rank_nodes(growth.widest(self.num_nodes), shape, self.num_nodes, branches)
            else:
                ranked = self._static.grow(growth)
            growth.offer()
            return ranked
        tokens, log_probs = propose_all(self.heads, hidden_states, roots, self._top_k)
        log_probs = self.estimate.estimate(ids, tokens, log_probs)
        if self._static is None:
            return rank_nodes(independent(tokens, log_probs), shape, self.num_nodes, branches)
        return self._static.pick(tokens, log_probs)

    def _sizes(
        self, ids: Sequence[str], ranked: RankedNodes, limits: Int64Array, costs: StepCosts
    ) -> Int64Array:
        """`[batch]` nodes of each request, as many as pay."""
        probs = np.exp(ranked.log_probs)
        nodes = choose_sizes(
            probs * min(self._trees_estimate.ratio, 1.0),
            limits,
            costs,
            self.max_rows - len(ids),
            costs.draft_seconds(len(ids)) if self._evaluated_heads else 0.0,
        )
        sums = probs.cumsum(1)
        for i, n in enumerate(nodes.tolist()):
            if n:
                self._trees_estimate.expect(ids[i], n, float(sums[i, n - 1]))
        return nodes
