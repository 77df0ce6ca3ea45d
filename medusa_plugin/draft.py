"""Draft: the heads' candidates -> for each request the tree that pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.heads.base import DraftHeads
from medusa_plugin.tree.budget import DraftSwitch, StepCosts, choose_sizes
from medusa_plugin.tree.draft_tree import DraftTree, relations
from medusa_plugin.tree.dynamic import FloatArray, Int64Array, RankedNodes, rank_nodes
from medusa_plugin.tree.estimate import HeadCalibration, HeadsEstimate
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


@dataclass(frozen=True)
class _Static:
    """A static topology as arrays over its n nodes."""

    heads: Int64Array
    ranks: Int64Array
    is_ancestor: FloatArray
    """`[n, n]`, 1 where the column's node is on the row's path, itself included."""

    @classmethod
    def of(cls, tree: TokenTree) -> _Static:
        rows = tree.mask_array[1:, None] >> np.arange(1, tree.num_rows) & 1
        return cls(tree.depth_array[1:] - 1, np.array(tree.ranks[1:]), rows.astype(np.float32))


class TreeDrafter:
    """Medusa heads over dynamic or static trees, as large as pays.

    Args:
        heads: evaluated at most once per step for the whole batch.
        num_nodes: most nodes of a tree.
        tree: static topology of at most that many nodes, of which a prefix is drafted; None for
            the most probable nodes of each step.
        calibration: of the heads' probabilities, one per head.
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
        costs: StepCosts | None = None,
        max_rows: int = 1 << 30,
    ) -> None:
        self.heads = heads
        self.num_nodes = num_nodes
        self.tree = tree
        self.costs = costs
        self.max_rows = max_rows
        self.estimate = HeadsEstimate(calibration or [HeadCalibration()] * heads.num_heads)
        self._static = None if tree is None else _Static.of(tree)
        wanted = num_nodes if tree is None else max(tree.ranks) + 1
        self._top_k = min(wanted, heads.max_top_k)
        self._switch = DraftSwitch()

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `Drafter.draft`."""
        ids = [request.request_id for request in requests]
        self.estimate.observe(ids, [path.tokens for path in paths])
        batch = len(requests)
        if self.costs is not None and not self._switch.should_draft(batch):
            return [DraftTree.root_only()] * batch
        limits = np.array([request.options.node_limit(self.num_nodes) for request in requests])
        if not limits.any():
            return [DraftTree.root_only()] * batch
        return self._sized(self._ranked(requests, paths, hidden_states), limits)

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `Drafter.forget`."""
        self.estimate.forget(request_ids)

    def _ranked(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> RankedNodes:
        """Nodes that each request could draft, best first."""
        roots = torch.tensor([path.tokens[-1] for path in paths], dtype=torch.int64)
        candidates = self.heads.propose(hidden_states, roots.to(hidden_states.device), self._top_k)
        tokens = candidates.token_ids.cpu().numpy()
        log_probs = self.estimate.estimate(
            [request.request_id for request in requests],
            tokens,
            candidates.log_probs.cpu().numpy(),
        )
        chains = [i for i, request in enumerate(requests) if request.chain_only]
        if self._static is None:
            log_probs[chains, :, 1:] = -np.inf  # one candidate a head is a chain
            return rank_nodes(tokens, log_probs, self.num_nodes)
        ranked = self._on_static_tree(self._static, tokens, log_probs)
        for i in chains:
            _put_chain(ranked, i, tokens[i, :, 0], log_probs[i, :, 0])
        return ranked

    def _on_static_tree(
        self, static: _Static, tokens: Int64Array, log_probs: FloatArray
    ) -> RankedNodes:
        assert self.tree is not None
        with np.errstate(invalid="ignore"):
            own = np.maximum(log_probs[:, static.heads, static.ranks], -1e30)
        # A prefix of the list is drafted: no node may look better than one before it.
        values = np.minimum.accumulate(own @ static.is_ancestor.T, axis=1)
        parents = np.tile(self.tree.parent_array, (len(tokens), 1))
        return RankedNodes(values, parents, tokens[:, static.heads, static.ranks])

    def _sized(self, ranked: RankedNodes, limits: Int64Array) -> list[DraftTree]:
        """The trees of the sizes that pay."""
        batch = len(ranked.tokens)
        sizes = np.minimum(limits, np.isfinite(ranked.log_probs).sum(1))
        if self.costs is not None:
            chosen = choose_sizes(
                np.exp(ranked.log_probs), sizes, self.costs, self.max_rows - batch
            )
            requests = np.array([batch], np.float64)
            plain = self.costs.fixed + float(self.costs.verify.at(requests)[0])
            self._switch.judge(chosen.gain, float(self.costs.draft.at(requests)[0]) / plain)
            sizes = chosen.nodes
        largest = int(sizes.max(initial=0))
        if not largest:
            return [DraftTree.root_only()] * batch
        parents = ranked.parents[:, :largest]
        tokens = ranked.tokens[:, :largest]
        depths, masks = relations(parents)
        return [
            DraftTree(tokens[i, :n], parents[i, :n], depths[i, : n + 1], masks[i, : n + 1])
            for i, n in enumerate(sizes.tolist())
        ]


def _put_chain(
    ranked: RankedNodes, request: int, tokens: Int64Array, log_probs: FloatArray
) -> None:
    """Replace the nodes of `request` by the heads' best candidates in a row, in place."""
    n = min(len(tokens), ranked.tokens.shape[1])
    ranked.log_probs[request] = -np.inf
    ranked.log_probs[request, :n] = log_probs[:n].cumsum()
    ranked.parents[request] = np.arange(ranked.parents.shape[1])
    ranked.tokens[request, :n] = tokens[:n]
