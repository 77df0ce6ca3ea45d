"""One decode step after the target's forward pass: accept, compact, draft, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medusa_plugin.accept import AcceptedPath, TargetSampler, walk
from medusa_plugin.batch import StepRequest
from medusa_plugin.compact import IntArray, compact
from medusa_plugin.draft import Drafter
from medusa_plugin.tree.draft_tree import DraftTree, trees_of
from medusa_plugin.typical import TypicalRule, typical_paths
from tvm_ops import KVCacheGroup


@dataclass
class AcceptedTokens:
    """Drafted tokens accepted since the start, by rule; bonus tokens do not count."""

    lossless: int = 0
    typical: int = 0

    def count(self, requests: Sequence[StepRequest], paths: Sequence[AcceptedPath]) -> None:
        """Add the paths of a step."""
        for request, path in zip(requests, paths, strict=True):
            if request.typical_temperature is None:
                self.lossless += len(path.rows)
            else:
                self.typical += len(path.rows)


@dataclass(frozen=True)
class StepResult:
    """What a step did, its requests in the order of the batch.

    Pickled as plain integers, which takes a fraction of the time that the trees' arrays would.
    """

    paths: list[AcceptedPath]
    drafts: list[DraftTree | None]
    """None where nothing is drafted: prefill chunks, and paths that failed."""
    damaged: Mapping[int, Sequence[int]]
    """Tree rows that are not finite, by request."""

    def __reduce__(self) -> tuple[Any, ...]:
        paths = [(path.rows, path.tokens) for path in self.paths]
        nodes = [
            None if tree is None else (tree.tokens.tolist(), tree.parents.tolist())
            for tree in self.drafts
        ]
        return _unpickled, (paths, nodes, self.damaged)


def _unpickled(
    paths: list[tuple[tuple[int, ...], tuple[int, ...]]],
    nodes: list[tuple[list[int], list[int]] | None],
    damaged: Mapping[int, Sequence[int]],
) -> StepResult:
    sizes = np.array([len(drafted[0]) if drafted else 0 for drafted in nodes], dtype=np.int64)
    shape = len(nodes), int(sizes.max(initial=0))
    tokens, parents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for i, drafted in enumerate(nodes):
        if drafted is not None:
            tokens[i, : sizes[i]], parents[i, : sizes[i]] = drafted
    trees = trees_of(tokens, parents, sizes)
    return StepResult(
        [AcceptedPath(rows, path_tokens) for rows, path_tokens in paths],
        [None if nodes[i] is None else tree for i, tree in enumerate(trees)],
        damaged,
    )


def decode_step(
    requests: Sequence[StepRequest],
    hidden_states: torch.Tensor,
    logits: torch.Tensor,
    sampler: TargetSampler,
    caches: KVCacheGroup,
    block_table: IntArray,
    drafter: Drafter,
    typical_rule: TypicalRule,
) -> StepResult:
    """Accept what the target confirms, compact the KV cache, draft the next trees.

    Args:
        requests: the batch, in row order.
        hidden_states: `[num_rows, hidden_size]` target states after the final norm, one row per
            logits row.
        logits: `[num_rows, vocab_size]` of the target, before any processing; read only.
        sampler: draws the target's token at a row.
        caches: KV caches of all layers; accepted rows are moved in place.
        block_table: `[num_reqs, max_blocks]` physical blocks of each request.
        drafter: proposes the next trees.
        typical_rule: judges the drafts of requests with a `typical_temperature`.
    """
    chosen = _typical_choice(requests, logits, typical_rule)
    paths = walk([request.tree for request in requests], sampler, chosen)
    damaged = _damaged_rows(requests, hidden_states)
    roots = [request.root_position for request in requests]
    compact(caches, paths, roots, block_table, damaged)

    drafting = [
        i for i, request in enumerate(requests) if request.drafts_next and not paths[i].failed
    ]
    drafts: list[DraftTree | None] = [None] * len(requests)
    if drafting:
        rows = [requests[i].first_row + paths[i].last_row for i in drafting]
        proposed = drafter.draft(
            [requests[i] for i in drafting], [paths[i] for i in drafting], hidden_states[rows]
        )
        for i, tree in zip(drafting, proposed, strict=True):
            drafts[i] = tree
    return StepResult(paths, drafts, damaged)


def follow_step(
    result: StepResult,
    root_positions: Sequence[int],
    caches: KVCacheGroup,
    block_table: IntArray,
) -> None:
    """What is left of a step where another rank ran `decode_step` for all.

    Args:
        result: that rank's.
        root_positions: position of each request's root, in the order of the batch.
        caches: this rank's share of the KV caches; accepted rows are moved in place.
        block_table: `[num_reqs, max_blocks]` physical blocks of each request.
    """
    compact(caches, result.paths, root_positions, block_table, result.damaged)


def _damaged_rows(
    requests: Sequence[StepRequest], hidden_states: torch.Tensor
) -> Mapping[int, Sequence[int]]:
    """Tree rows whose hidden state is not finite, by request.

    A row sees itself, so where its keys or values are not finite, its hidden state is not either.
    """
    damaged = (~hidden_states.isfinite().all(dim=-1)).cpu().numpy()
    if not damaged.any():
        return {}
    return {
        i: np.flatnonzero(damaged[request.first_row :][: request.tree.num_rows]).tolist()
        for i, request in enumerate(requests)
    }


def _typical_choice(
    requests: Sequence[StepRequest], logits: torch.Tensor, rule: TypicalRule
) -> Mapping[int, Sequence[int]]:
    """Paths of the requests that the typical rule judges, by their index."""
    temperatures = {
        i: request.typical_temperature
        for i, request in enumerate(requests)
        if request.typical_temperature is not None
    }
    if not temperatures:
        return {}
    paths = typical_paths(
        [requests[i].tree for i in temperatures],
        logits,
        [requests[i].first_row for i in temperatures],
        list(temperatures.values()),
        rule,
    )
    return dict(zip(temperatures, paths, strict=True))
