"""Dynamic trees: the most probable nodes of this step, for all requests at once.

A node's probability is the product of its path's, and never more than its parent's. The n best
nodes are therefore a tree, and so is every prefix of them in the order of falling probability:
what best-first search finds (OPT-Tree, EAGLE-2), level by level and without a loop over nodes.

A branch is a chain of tokens from another source, such as prompt look-up. It joins the same
ranking: where it goes on, the next token's distribution is a mixture of the head's and the
branch's, so a token that both propose is one node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankedNodes:
    """The best nodes of each request, most probable first. Column c is row c + 1 of the tree."""

    log_probs: FloatArray
    """`[batch, n]` of the whole path, natural logarithm, falling; -inf where there is no node."""
    parents: Int64Array
    """`[batch, n]` row of the parent; 0 is the root."""
    tokens: Int64Array
    """`[batch, n]`."""


@dataclass(frozen=True)
class Branches:
    """One chain of candidate tokens for each request."""

    tokens: Int64Array
    """`[batch, length]`; -1 from where a request's chain ends."""
    probs: FloatArray
    """`[batch, length]` of each token where those before it are right; 0 from the end on."""


@dataclass(frozen=True)
class Level:
    """Nodes of one depth that were kept, c for each request."""

    values: FloatArray
    """`[batch, c]` log-probability of the path; -inf where there is no node."""
    parents: Int64Array
    """`[batch, c]` column in the level above."""
    tokens: Int64Array
    """`[batch, c]`; of the first level's parents, which are the roots, 0."""
    on_branch: Int64Array
    """`[batch]` column that the branch has reached; -1 where it ended or was not kept."""


@dataclass(frozen=True)
class Expansion:
    """Candidates for the children of w nodes of a level, for each request."""

    columns: Int64Array
    """`[batch, w]` of the nodes in their level, distinct; the branch's is among them."""
    tokens: Int64Array
    """`[batch, w or 1, k]`, distinct within a node; one for all where they do not differ."""
    log_probs: FloatArray
    """`[batch, w or 1, k]` of a candidate where its path is right, at most 0."""


Expand = Callable[[int, Level], Expansion]
"""Head and the level whose nodes' children it proposes -> candidates."""


def independent(tokens: Int64Array, log_probs: FloatArray) -> Expand:
    """Candidates of heads that do not look at the path: the same for every node of a level.

    Args:
        tokens: `[batch, num_heads, k]` candidates of each head, distinct within a head.
        log_probs: `[batch, num_heads, k]` of a candidate where its path is right, at most 0.
    """

    def expand(head: int, above: Level) -> Expansion:
        columns = np.broadcast_to(np.arange(above.values.shape[1]), above.values.shape)
        return Expansion(columns, tokens[:, head, None], log_probs[:, head, None])

    return expand


def rank_nodes(
    expand: Expand,
    shape: tuple[int, int],
    num_nodes: int,
    branches: Branches | None = None,
) -> RankedNodes:
    """The `num_nodes` most probable nodes of each request, fewer where there are fewer candidates.

    A node among the n best of all has fewer than n better ones at its own depth, and its parent
    is among the n best of the level above: so n nodes a level are enough.

    Args:
        expand: called once for each head, from the first.
        shape: batch and number of heads.
        num_nodes: at least 1.
        branches: joined with the candidates.
    """
    batch, num_heads = shape
    length = 0 if branches is None else branches.tokens.shape[1]
    root = np.zeros((batch, 1), np.int64)
    level = Level(root.astype(np.float32), root, root, np.zeros(batch, np.int64))
    levels: list[Level] = []
    for depth in range(num_heads):
        branch = None
        if branches is not None and depth < length:
            branch = branches.tokens[:, depth], branches.probs[:, depth]
        level = _next_level(level, expand(depth, level), branch, num_nodes)
        levels.append(level)
    if branches is not None and length > num_heads:
        levels += _tail(level, branches, num_heads)
    return _best(levels, batch, num_nodes)


def _next_level(
    above: Level,
    expansion: Expansion,
    branch: tuple[Int64Array, FloatArray] | None,
    num_nodes: int,
) -> Level:
    """The best `num_nodes` children of a level.

    Args:
        above: the level.
        expansion: of its nodes.
        branch: `[batch]` next token of each branch and its probability.
        num_nodes: how many are kept.
    """
    columns, k = expansion.columns, expansion.tokens.shape[2]
    batch, width = columns.shape
    request = np.arange(batch)
    rows = request[:, None]
    pool = above.values[rows, columns][:, :, None] + expansion.log_probs
    tokens = np.broadcast_to(expansion.tokens, pool.shape)
    if branch is None:
        pool = pool.reshape(batch, -1)
        joined = np.full(batch, -1)
    else:
        next_token, prob = branch
        goes_on = above.on_branch >= 0
        prob = np.where(goes_on, prob, 0).astype(np.float32)
        reached = above.values[request, above.on_branch]
        at = (columns == above.on_branch[:, None]).argmax(1)
        log_probs = np.broadcast_to(expansion.log_probs, pool.shape)[request, at]
        same = tokens[request, at] == next_token[:, None]
        mixed = np.exp(log_probs) * (1 - prob[:, None]) + prob[:, None] * same
        agrees = same.any(1)
        with np.errstate(divide="ignore"):  # log 0 is -inf: no node
            pool[request, at] = np.where(
                goes_on[:, None], np.log(mixed) + reached[:, None], pool[request, at]
            )
            # A token that the head does not propose gets a column of its own.
            extra = np.where(agrees, -np.inf, reached + np.log(prob)).astype(np.float32)
        pool = np.concatenate([pool.reshape(batch, -1), extra[:, None]], 1)
        joined = np.where(agrees, at * k + same.argmax(1), width * k)
        joined[prob == 0] = -1
    count = min(num_nodes, pool.shape[1])
    # Sorted by column: of equal values the head's better candidate comes first.
    kept = np.sort(np.argpartition(-pool, count - 1, axis=1)[:, :count], axis=1)
    is_extra = kept == width * k
    place = np.where(is_extra, 0, kept // k)
    parents, chosen = columns[rows, place], tokens[rows, place, kept % k]
    if branch is not None:
        parents = np.where(is_extra, above.on_branch[:, None], parents)
        chosen = np.where(is_extra, branch[0][:, None], chosen)
    found = kept == joined[:, None]
    return Level(pool[rows, kept], parents, chosen, np.where(found.any(1), found.argmax(1), -1))


def _tail(above: Level, branches: Branches, start: int) -> list[Level]:
    """What of the branches lies deeper than the heads reach: one node a level."""
    batch, length = branches.tokens.shape
    reached = above.values[np.arange(batch), above.on_branch]
    reached = np.where(above.on_branch >= 0, reached, -np.inf).astype(np.float32)
    with np.errstate(divide="ignore"):
        values = reached[:, None] + np.log(branches.probs[:, start:]).cumsum(1)
    column = np.zeros((batch, 1), np.int64)
    ended = np.zeros(batch, np.int64)
    return [
        Level(
            values[:, i, None],
            np.maximum(above.on_branch, 0)[:, None] if i == 0 else column,
            branches.tokens[:, start + i, None],
            ended,
        )
        for i in range(length - start)
    ]


def _best(levels: list[Level], batch: int, num_nodes: int) -> RankedNodes:
    """The best nodes of all levels in the order of falling probability."""
    if not levels:
        nothing = np.zeros((batch, 0), np.int64)
        return RankedNodes(nothing.astype(np.float32), nothing, nothing)
    values = np.concatenate([level.values for level in levels], 1)
    # Index of each node's parent among all nodes; the first level's is the root, at -1.
    parents = [np.full_like(levels[0].parents, -1)]
    offset = 0
    for previous, level in itertools.pairwise(levels):
        parents.append(level.parents + offset)
        offset += previous.values.shape[1]
    request = np.arange(batch)[:, None]
    # Stable: of equals the shallower node comes first, so parents come before their children.
    order = np.argsort(-values, axis=1, kind="stable")[:, :num_nodes]
    row_of = np.zeros((batch, values.shape[1] + 1), np.int64)  # the last is the root's
    row_of[request, order] = np.arange(1, order.shape[1] + 1)
    return RankedNodes(
        values[request, order],
        row_of[request, np.concatenate(parents, 1)[request, order]],
        np.concatenate([level.tokens for level in levels], 1)[request, order],
    )
