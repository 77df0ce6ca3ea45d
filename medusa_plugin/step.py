"""One decode step after the target's forward pass: accept, compact, draft, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from medusa_plugin.accept import AcceptedPath, TargetSampler, walk
from medusa_plugin.compact import IntArray, compact
from medusa_plugin.heads.base import DraftHeads
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from tvm_ops import KVCacheGroup


@dataclass(frozen=True)
class StepRequest:
    """One request of the batch, as the target's forward pass saw it."""

    request_id: str
    tree: DraftTree
    """What was verified; just the root where nothing was drafted."""
    first_row: int
    """Row of the root in the step's logits and hidden states."""
    root_position: int
    """Position of the root token in the sequence, which is its index in the block table."""
    committed: npt.NDArray[np.int32]
    """Prompt and output token ids before this step (a view: valid during the step only)."""
    drafts_next: bool
    """False where the step's token is discarded (a prefill chunk): no new draft."""
    chain_only: bool
    """True where the host can follow only a chain (structured output)."""


@dataclass(frozen=True)
class StepResult:
    """`paths` and `drafts` follow the order of the requests; None where nothing is drafted."""

    paths: list[AcceptedPath]
    drafts: list[DraftTree | None]


class Drafter(Protocol):
    """Proposes the next trees; the only implementation outside tests is `HeadsDrafter`."""

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """Propose one tree per request.

        Args:
            requests: the requests that draft, n of them.
            paths: what each gained in this step; its last token is the new root.
            hidden_states: `[n, hidden_size]`, after the final norm, at each last accepted row.
        """
        ...


class HeadsDrafter:
    """Medusa heads over a static tree.

    Args:
        heads: evaluated once per step for the whole batch.
        tree: topology proposed; `max(tree.ranks) + 1` candidates per head are needed.
    """

    def __init__(self, heads: DraftHeads, tree: TokenTree) -> None:
        self.heads = heads
        self.tree = tree
        self._chain = TokenTree.chain(min(heads.num_heads, tree.num_nodes))
        self._top_k = max(tree.ranks) + 1
        self._node_heads = torch.tensor(tree.depths[1:], dtype=torch.int64) - 1
        self._node_ranks = torch.tensor(tree.ranks[1:], dtype=torch.int64)

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `Drafter.draft`."""
        roots = torch.tensor([path.tokens[-1] for path in paths], dtype=torch.int64)
        candidates = self.heads.propose(
            hidden_states, roots.to(hidden_states.device), self._top_k
        ).token_ids.cpu()
        nodes: list[list[int]] = candidates[:, self._node_heads, self._node_ranks].tolist()
        best: list[list[int]] = candidates[:, : self._chain.num_nodes, 0].tolist()
        return [
            DraftTree(self._chain, tuple(best[i]))
            if request.chain_only
            else DraftTree(self.tree, tuple(nodes[i]))
            for i, request in enumerate(requests)
        ]


def decode_step(
    requests: Sequence[StepRequest],
    hidden_states: torch.Tensor,
    sampler: TargetSampler,
    caches: KVCacheGroup,
    block_table: IntArray,
    drafter: Drafter,
) -> StepResult:
    """Accept what the target confirms, compact the KV cache, draft the next trees.

    Args:
        requests: the batch, in row order.
        hidden_states: `[num_rows, hidden_size]` target states after the final norm, one row per
            logits row.
        sampler: draws the target's token at a row.
        caches: KV caches of all layers; accepted rows are moved in place.
        block_table: `[num_reqs, max_blocks]` physical blocks of each request.
        drafter: proposes the next trees.
    """
    paths = walk([request.tree for request in requests], sampler)
    compact(caches, paths, [request.root_position for request in requests], block_table)

    drafting = [i for i, request in enumerate(requests) if request.drafts_next]
    drafts: list[DraftTree | None] = [None] * len(requests)
    if drafting:
        rows = [requests[i].first_row + paths[i].last_row for i in drafting]
        proposed = drafter.draft(
            [requests[i] for i in drafting], [paths[i] for i in drafting], hidden_states[rows]
        )
        for i, tree in zip(drafting, proposed, strict=True):
            drafts[i] = tree
    return StepResult(paths, drafts)
