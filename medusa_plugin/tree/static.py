"""Static trees: the one of given choices, or the best of a size by head accuracies."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from medusa_plugin.tree.choices import parse_choices
from medusa_plugin.tree.token_tree import MAX_ROWS, Path, TokenTree, TreeError

MAX_RANK = 64
"""Candidates per head that a tree may use: more never paid and would slow the top-k."""

STATIC = "static"
"""In place of choices: the best tree on average."""

Accuracies = Sequence[Sequence[float]]

GENERIC_ACCURACIES: Accuracies = (
    # How often candidate k (column) of head h (row) is right, for heads without a calibration.
    # First column: about the mean of published Medusa-1 heads of 7B to 33B models (0.59, 0.34,
    # 0.21, 0.15, 0.13), rounded; the other candidates of a head fall off as rank ** -1.5 does,
    # scaled so that the second one gets a quarter of what the first leaves (published: the five
    # best of the first head are right 0.78 to 0.82 of the time, here 0.81).
    *(
        tuple([top] + [round((1 - top) * 0.25 * (2 / rank) ** 1.5, 4) for rank in range(2, 11)])
        for top in (0.59, 0.34, 0.21, 0.15, 0.13)
    ),
)


def choose_tree(
    tree: Sequence[Sequence[int]] | str,
    *,
    num_heads: int,
    num_nodes: int,
    accuracies: Accuracies | None,
) -> TokenTree:
    """The tree to draft on.

    Args:
        tree: what `parse_choices` reads; "static" for the best tree of `num_nodes` nodes.
        num_heads: depth that a tree may have.
        num_nodes: size of the tree where it is grown; fewer where there are too few candidates.
        accuracies: entry [h][k] is how often candidate k of head h is right; None: unknown.

    Raises:
        TreeError: names the path that is malformed or needs a head that is not there.
    """
    if tree != STATIC:
        return tree_from_choices(parse_choices(tree), num_heads, MAX_RANK, accuracies)
    return grow_tree((accuracies or GENERIC_ACCURACIES)[:num_heads], num_nodes)


def tree_from_choices(
    choices: Sequence[Path],
    num_heads: int,
    top_k_limit: int,
    accuracies: Accuracies | None = None,
) -> TokenTree:
    """The tree of `choices`, its rows ordered so that every prefix is the best one it can be.

    Without accuracies, shallow and likely candidates come first.

    Raises:
        TreeError: names the path that is orphaned, repeated, too deep or has a rank out of range.
    """
    if not choices:
        raise TreeError("the tree has no paths: give at least [[0]]")
    if len(choices) >= MAX_ROWS:
        raise TreeError(f"the tree has {len(choices)} nodes, at most {MAX_ROWS - 1} fit")
    for path in choices:
        if len(path) > num_heads:
            raise TreeError(
                f"path {list(path)} is {len(path)} deep, but there are {num_heads} heads"
            )
        if not all(0 <= rank < top_k_limit for rank in path):
            raise TreeError(f"path {list(path)} has a rank outside 0..{top_k_limit - 1}")

    def order(path: Sequence[int]) -> tuple[float, int, Path]:
        value = path_value(path, accuracies) if accuracies is not None else 0.0
        return -value, len(path), tuple(path)

    return TokenTree.from_choices(sorted(choices, key=order))


def path_value(path: Sequence[int], accuracies: Accuracies) -> float:
    """Probability that every token of `path` is right if heads err independently.

    Ranks and heads beyond the table count as never right.
    """
    return math.prod(
        accuracies[head][rank] if head < len(accuracies) and rank < len(accuracies[head]) else 0.0
        for head, rank in enumerate(path)
    )


def grow_tree(accuracies: Accuracies, num_nodes: int) -> TokenTree:
    """The tree of `num_nodes` nodes with the most accepted tokens if heads err independently.

    Best-first: a node is worth the product of the accuracies on its path, never more than its
    parent, so taking the best node next to the tree is optimal (the greedy search of Medusa's
    sparse trees). Rows come in the order of falling value: every prefix is optimal for its size.

    Args:
        accuracies: entry [h][k] is how often candidate k of head h is right.
        num_nodes: 1 to 63; the tree is smaller where the table has fewer candidates.

    Raises:
        TreeError: `num_nodes` is out of range.
    """
    if not 1 <= num_nodes < MAX_ROWS:
        raise TreeError(f"a tree has 1 to {MAX_ROWS - 1} nodes, got {num_nodes}")
    chosen: list[Path] = []
    frontier: list[tuple[float, int, Path]] = []

    def open_children(path: Path, value: float) -> None:
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)][:MAX_RANK]):
                heapq.heappush(frontier, (-value * accuracy, len(path) + 1, (*path, rank)))

    open_children((), 1.0)
    while frontier and len(chosen) < num_nodes:
        negated, _, path = heapq.heappop(frontier)
        chosen.append(path)
        open_children(path, -negated)
    return TokenTree.from_choices(chosen)
