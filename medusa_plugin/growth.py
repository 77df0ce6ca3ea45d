"""Candidates of heads for nodes of a tree: of all nodes at once, or level by level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from medusa_plugin.heads.base import DraftHeads, ParallelHeads, SequentialHeads
from medusa_plugin.tree.dynamic import Expand, Expansion, FloatArray, Int64Array, Level
from medusa_plugin.tree.estimate import HeadsEstimate, LevelOffer

MAX_EXPANDED = 8
"""Nodes of a level whose children sequential heads propose, for each request."""


def propose_all(
    heads: DraftHeads, hidden: torch.Tensor, roots: torch.Tensor, top_k: int
) -> tuple[Int64Array, FloatArray]:
    """Candidates of parallel heads, `[batch, num_heads, k]`, and their log-probabilities."""
    assert isinstance(heads, ParallelHeads)
    candidates = heads.propose(hidden, roots, top_k)
    log_probs = candidates.log_probs.cpu().numpy()
    return candidates.token_ids.cpu().numpy(), _finite(log_probs)


def propose_along(
    heads: DraftHeads, hidden: torch.Tensor, tokens: torch.Tensor, top_k: int
) -> tuple[Int64Array, FloatArray]:
    """Candidates at every token of a text, where the path before is the text itself.

    Args:
        heads: of any kind.
        hidden: `[n, hidden_size]`, from which the target chose each token.
        tokens: int64 `[n]`.
        top_k: candidates of a head.

    Returns:
        `[n, num_heads, top_k]` tokens and log-probabilities; of no meaning where the path would
        go beyond the text.
    """
    if not isinstance(heads, SequentialHeads):
        return propose_all(heads, hidden, tokens, top_k)
    state = heads.begin(hidden, tokens)
    found = []
    for head in range(heads.num_heads):
        if head:
            state = heads.advance(head, state, tokens.roll(-head))
        found.append(_best(heads, head, state, top_k))
    return np.stack([row[0] for row in found], 1), np.stack([row[1] for row in found], 1)


class Growth:
    """Sequential heads at work on the trees of one step.

    Args:
        heads: sequential ones.
        hidden: `[batch, hidden_size]`, after the target's final norm.
        roots: int64 `[batch]`, the roots' tokens.
        top_k: candidates of a node.
        estimate: corrects the heads' probabilities, and is told what was proposed.
        request_ids: of the batch.
    """

    def __init__(
        self,
        heads: SequentialHeads,
        hidden: torch.Tensor,
        roots: torch.Tensor,
        top_k: int,
        estimate: HeadsEstimate,
        request_ids: Sequence[str],
    ) -> None:
        self._heads, self._hidden, self._roots = heads, hidden, roots
        self._top_k = top_k
        self.batch = len(request_ids)
        self._estimate, self._request_ids = estimate, request_ids
        self._state: torch.Tensor | None = None
        self._levels: list[LevelOffer] = []

    def expand(self, head: int, above: Level, columns: Int64Array) -> Expansion:
        """Candidates for the children of nodes.

        Args:
            head: 0 at first, then one more at each call.
            above: the nodes' level.
            columns: `[batch, w]` of the nodes; their parents were expanded one call before.
        """
        batch, width = columns.shape
        self._state = self._next_state(head, above, columns)
        tokens, log_probs = _best(self._heads, head, self._state, self._top_k)
        values, calibrated = self._estimate.estimate_level(
            self._request_ids, head, log_probs.reshape(batch, width, -1)
        )
        expansion = Expansion(columns, tokens.reshape(batch, width, -1), values)
        self._levels.append(LevelOffer(above, expansion, calibrated))
        return expansion

    def widest(self, num_nodes: int) -> Expand:
        """Expand the most probable nodes of each level that may have a child among the best.

        Args:
            num_nodes: how many of all nodes count as the best.
        """
        best: list[FloatArray] = []

        def expand(head: int, above: Level) -> Expansion:
            if head == 0:
                return self.expand(head, above, np.zeros_like(above.parents))
            best.append(above.values)
            return self.expand(head, above, _promising(above, np.concatenate(best, 1), num_nodes))

        return expand

    def offer(self) -> None:
        """Tell the estimate what was proposed."""
        self._estimate.offer(self._request_ids, self._levels)

    def _next_state(self, head: int, above: Level, columns: Int64Array) -> torch.Tensor:
        if head == 0:
            return self._heads.begin(self._hidden, self._roots)
        assert self._state is not None
        expanded = self._levels[-1].expansion.columns
        batch, width = expanded.shape
        request = np.arange(batch)[:, None]
        # Where a parent's state lies: the states are those of the nodes expanded before.
        row_of = np.zeros((batch, int(expanded.max()) + 1), np.int64)
        row_of[request, expanded] = request * width + np.arange(width)
        rows = row_of[request, above.parents[request, columns]].ravel()
        tokens = torch.from_numpy(above.tokens[request, columns].ravel())
        state = self._state[torch.from_numpy(rows).to(self._state.device)]
        return self._heads.advance(head, state, tokens.to(state.device))


def _promising(above: Level, best: FloatArray, num_nodes: int) -> Int64Array:
    """`[batch, w]` columns of the nodes to expand, at least one each, the branch's among them.

    A node's children are no more probable than the node itself: once `num_nodes` nodes are better,
    none of its children gets into the tree.
    """
    width = above.values.shape[1]
    count = min(MAX_EXPANDED, width)
    if best.shape[1] >= num_nodes:
        least = -np.partition(-best, num_nodes - 1, axis=1)[:, num_nodes - 1, None]
        count = min(count, max(1, int((above.values > least).sum(1).max())))
    columns = np.argpartition(-above.values, count - 1, axis=1)[:, :count]
    missing = (above.on_branch >= 0) & (columns != above.on_branch[:, None]).all(1)
    columns[missing, -1] = above.on_branch[missing]
    return columns


def _best(
    heads: SequentialHeads, head: int, state: torch.Tensor, top_k: int
) -> tuple[Int64Array, FloatArray]:
    """`[rows, top_k]` tokens of the best candidates, and their log-probabilities."""
    logits = heads.logits(head, state)
    best, places = logits.topk(top_k, dim=-1)
    tokens = places if heads.draft_vocab is None else heads.draft_vocab[places]
    log_probs = best - logits.logsumexp(-1, keepdim=True)
    return tokens.cpu().numpy(), _finite(log_probs.cpu().numpy())


def _finite(log_probs: FloatArray) -> FloatArray:
    """Heads that overflow propose nothing: what is learnt from one request counts for all."""
    return np.where(np.isfinite(log_probs), log_probs, -np.inf)
