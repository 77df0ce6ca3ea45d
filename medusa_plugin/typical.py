"""Typical acceptance: Medusa's rule, which is LOSSY.

A drafted token is accepted where the target finds it probable enough, whether the target would
have drawn it or not. With p = softmax(logits / temperature) at a row and
H = -sum(p * log(p + 1e-5)) in nats, a child of the row that carries token x is accepted iff

    p(x) > min(epsilon, alpha * exp(-H))

so where the target is unsure (H above ln(alpha / epsilon), 1.204 for the defaults), less
probability suffices. More tokens per step than any lossless rule gives, but their distribution is
no longer the target's. As the temperature goes to 0 only the most likely token remains, which is
lossless greedy decoding: such requests are walked, not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medusa_plugin.tree.draft_tree import DraftTree

_ENTROPY_SHIFT = 1e-5
_ROWS_AT_ONCE = 256  # bounds the float32 copies of the logits


@dataclass(frozen=True)
class TypicalRule:
    """Parameters of the rule."""

    epsilon: float
    """Probability that always suffices, in (0, 1)."""
    alpha: float
    """Scale of the entropy-dependent threshold, above 0."""


def typical_paths(
    trees: Sequence[DraftTree],
    logits: torch.Tensor,
    first_rows: Sequence[int],
    temperatures: Sequence[float],
    rule: TypicalRule,
) -> list[tuple[int, ...]]:
    """Choose each tree's path: the longest whose nodes are all accepted.

    Among paths of the same length, the one with the largest sum of log p; among equals of that
    too, the one that ends in the lowest row.

    Args:
        trees: n trees; a node with a negative token (a placeholder) is never accepted.
        logits: `[num_rows, vocab_size]` of the target, unprocessed, any floating dtype; read only.
        first_rows: row of each tree's root in `logits`.
        temperatures: of each tree's request, above 0.
        rule: the thresholds.

    Returns:
        Accepted rows of each tree in path order, root excluded; empty where none is.
    """
    nodes = [tree.num_nodes for tree in trees]
    if not sum(nodes):
        return [() for _ in trees]
    tokens = np.concatenate([tree.tokens for tree in trees]).astype(np.int64)
    # Children of one row share its softmax.
    rows, row_of_node = np.unique(
        np.concatenate(
            [first + tree.parents for first, tree in zip(first_rows, trees, strict=True)]
        ),
        return_inverse=True,
    )
    temperature_of_row = np.empty(len(rows), dtype=np.float32)
    temperature_of_row[row_of_node] = np.repeat(np.asarray(temperatures, np.float32), nodes)
    p, thresholds = _probabilities_and_thresholds(
        logits,
        torch.from_numpy(rows),
        torch.from_numpy(temperature_of_row),
        torch.from_numpy(row_of_node),
        torch.from_numpy(tokens.clip(min=0)),
        rule,
    )
    accepted = (p > thresholds) & (tokens >= 0)
    ends = np.cumsum(nodes)
    return [
        _longest(tree.parents, p[end - n : end], accepted[end - n : end])
        for tree, n, end in zip(trees, nodes, ends, strict=True)
    ]


def _probabilities_and_thresholds(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    row_of_node: torch.Tensor,
    tokens: torch.Tensor,
    rule: TypicalRule,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What the target makes of each node, float32 `[num_nodes]` each.

    Args:
        logits: `[num_rows, vocab_size]`.
        rows: int64 `[r]` rows of `logits` that have children.
        temperatures: float32 `[r]` of these rows.
        row_of_node: int64 `[num_nodes]` index into `rows` of each node's parent.
        tokens: int64 `[num_nodes]`.
        rule: the thresholds.
    """
    device = logits.device
    rows, temperatures = rows.to(device), temperatures.to(device).unsqueeze(1)
    row_of_node, tokens = row_of_node.to(device), tokens.to(device)
    probabilities = torch.empty(len(tokens), dtype=torch.float32, device=device)
    thresholds = torch.empty_like(probabilities)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        p = torch.softmax(logits[rows[part]].float() / temperatures[part], dim=-1)
        entropy = -(p * torch.log(p + _ENTROPY_SHIFT)).sum(dim=-1)
        threshold = (rule.alpha * torch.exp(-entropy)).clamp(max=rule.epsilon)
        nodes = torch.nonzero(row_of_node // _ROWS_AT_ONCE == start // _ROWS_AT_ONCE).squeeze(1)
        local_rows = row_of_node[nodes] - start
        probabilities[nodes] = p[local_rows, tokens[nodes]]
        thresholds[nodes] = threshold[local_rows]
    return probabilities.cpu().numpy(), thresholds.cpu().numpy()


def _longest(
    parents: npt.NDArray[np.int64], p: npt.NDArray[np.float32], accepted: npt.NDArray[np.bool_]
) -> tuple[int, ...]:
    """The best path of one tree; row r is node r - 1 of the arguments."""
    depths, scores = {0: 0}, {0: 0.0}
    best = 0
    for row in np.flatnonzero(accepted).tolist():
        row, parent = row + 1, int(parents[row])
        if parent not in depths:
            continue
        depths[row] = depths[parent] + 1
        scores[row] = scores[parent] + math.log(p[row - 1])
        if (depths[row], scores[row]) > (depths[best], scores[best]):
            best = row
    path: list[int] = []
    while best:
        path.append(best)
        best = int(parents[best - 1])
    return tuple(reversed(path))
