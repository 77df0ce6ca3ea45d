"""Static trees: the heads' candidates put into a topology."""

from __future__ import annotations

import numpy as np

from medusa_plugin.growth import Growth
from medusa_plugin.tree.dynamic import FloatArray, Int64Array, Level, RankedNodes
from medusa_plugin.tree.token_tree import TokenTree


class StaticNodes:
    """A topology of n nodes, as arrays over them.

    Args:
        tree: the topology.
    """

    def __init__(self, tree: TokenTree) -> None:
        self._parents = tree.parent_array
        self._depths = tree.depth_array[1:]
        self._ranks = np.array(tree.ranks[1:], np.int64)
        rows = tree.mask_array[1:, None] >> np.arange(1, tree.num_rows) & 1
        self._is_ancestor = rows.astype(np.float32)  # of the row's node, itself included

    def pick(self, tokens: Int64Array, log_probs: FloatArray) -> RankedNodes:
        """Nodes from heads that do not look at the path.

        Args:
            tokens: `[batch, num_heads, k]` candidates.
            log_probs: `[batch, num_heads, k]` of a candidate where its path is right.
        """
        heads = self._depths - 1
        with np.errstate(invalid="ignore"):
            own = np.maximum(log_probs[:, heads, self._ranks], -1e30)
        return self._ranked(own @ self._is_ancestor.T, tokens[:, heads, self._ranks])

    def grow(self, growth: Growth) -> RankedNodes:
        """Nodes from heads that read the path: one call for each level with children."""
        batch, n = growth.batch, len(self._parents)
        values, tokens = np.zeros((batch, n), np.float32), np.zeros((batch, n), np.int64)
        root = np.zeros((batch, 1), np.int64)
        level = Level(root.astype(np.float32), root, root, root[:, 0] - 1)
        above = np.zeros(1, np.int64)  # rows of the level, 0 the root
        for depth in range(1, int(self._depths.max()) + 1):
            nodes = np.flatnonzero(self._depths == depth)
            parents = np.searchsorted(above, self._parents[nodes])
            columns = np.unique(parents)
            expansion = growth.expand(depth - 1, level, np.tile(columns, (batch, 1)))
            place = np.searchsorted(columns, parents)
            own = np.maximum(expansion.log_probs[:, place, self._ranks[nodes]], -1e30)
            values[:, nodes] = level.values[:, parents] + own
            tokens[:, nodes] = expansion.tokens[:, place, self._ranks[nodes]]
            level = Level(
                values[:, nodes], np.tile(parents, (batch, 1)), tokens[:, nodes], level.on_branch
            )
            above = nodes + 1
        return self._ranked(values, tokens)

    def _ranked(self, values: FloatArray, tokens: Int64Array) -> RankedNodes:
        # A prefix of the list is drafted: no node may look better than one before it.
        falling = np.minimum.accumulate(values, axis=1)
        return RankedNodes(falling, np.tile(self._parents, (len(tokens), 1)), tokens)
