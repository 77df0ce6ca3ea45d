"""DraftTree: the tokens that one request drafted, as arrays, parents before their children."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from medusa_plugin.tree.token_tree import TokenTree

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]

PLACEHOLDER_TOKEN_ID = -1
"""The host's sign for no token: of padding, and of nodes that may not be accepted."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Drafted tokens on a tree of n nodes. Row 0 is the root, the last committed token.

    Raises:
        ValueError: the arrays do not belong to one tree.
    """

    tokens: IntArray
    """`[n]` token of each node: row r carries `tokens[r - 1]`."""
    parents: Int64Array
    """`[n]` parent row of each node, below the node's own row."""
    depths: Int64Array
    """`[n + 1]` of each row; the root has 0."""
    masks: Int64Array
    """`[n + 1]`, bit j of entry r is set iff row r sees row j: its ancestors and itself.
    Bit 63 is the sign."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.parents) != n or len(self.depths) != n + 1 or len(self.masks) != n + 1:
            raise ValueError(
                f"a tree of {len(self.parents)} nodes needs as many tokens, and depths and masks "
                f"of one row more; got {n}, {len(self.depths)} and {len(self.masks)}"
            )

    @classmethod
    def on(cls, topology: TokenTree, tokens: Sequence[int] | IntArray) -> DraftTree:
        """`tokens`, one per node in row order, on a topology."""
        return cls(
            np.asarray(tokens, dtype=np.int64),
            topology.parent_array,
            topology.depth_array,
            topology.mask_array,
        )

    @classmethod
    def root_only(cls) -> DraftTree:
        """The tree of a request that drafted nothing."""
        return _ROOT_ONLY

    @property
    def num_nodes(self) -> int:
        """Drafted tokens: rows without the root."""
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Rows to verify, root included."""
        return len(self.depths)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row follows the one before it: ordinary causal attention suffices."""
        return bool(self.depths[-1] == len(self.tokens))

    def prefix(self, num_nodes: int) -> DraftTree:
        """The tree of the first `num_nodes` nodes."""
        if num_nodes == len(self.tokens):
            return self
        return DraftTree(
            self.tokens[:num_nodes],
            self.parents[:num_nodes],
            self.depths[: num_nodes + 1],
            self.masks[: num_nodes + 1],
        )

    def granted(self, tokens: Sequence[int]) -> DraftTree | None:
        """The subtree of the first `len(tokens)` nodes, or None if it does not carry `tokens`.

        A scheduler may grant fewer drafts than proposed; since parents come before children the
        granted prefix is itself a tree. A token of -1 stands for a node that may not be accepted,
        and stays in the result, where no draw equals it. Nothing but such tokens are placeholders
        of no tree.
        """
        given = np.asarray(tokens, dtype=np.int64)
        refused = given == PLACEHOLDER_TOKEN_ID
        if len(given) > self.num_nodes or (len(given) and refused.all()):
            return None
        if not ((self.tokens[: len(given)] == given) | refused).all():
            return None
        tree = self.prefix(len(given))
        return replace(tree, tokens=given) if refused.any() else tree

    def children(self, row: int) -> list[int]:
        """Rows whose parent is `row`, ascending."""
        rows: list[int] = (np.flatnonzero(self.parents == row) + 1).tolist()
        return rows

    def leaves(self, rows: Collection[int]) -> list[int]:
        """Those of `rows` that have no child among them, ascending."""
        inner = {int(self.parents[row - 1]) for row in rows}
        return sorted(set(rows) - inner)

    def path(self, row: int) -> list[int]:
        """The rows from a child of the root down to `row`, both included."""
        mask = int(self.masks[row])
        return [ancestor for ancestor in range(1, row + 1) if mask >> ancestor & 1]

    def tokens_of(self, rows: Sequence[int]) -> list[int]:
        """What these rows, which the root is not among, carry."""
        tokens: list[int] = self.tokens[np.asarray(rows, np.int64) - 1].tolist()
        return tokens

    def child_with_token(self, row: int, token: int) -> int | None:
        """The row of the child of `row` that carries `token`, or None."""
        if not self.num_nodes:  # most trees under load: spares them the search
            return None
        found = np.flatnonzero((self.parents == row) & (self.tokens == token))
        return int(found[0]) + 1 if len(found) else None


_ROOT_ONLY = DraftTree.on(TokenTree.chain(0), ())


def trees_of(tokens: Int64Array, parents: Int64Array, sizes: Int64Array) -> list[DraftTree]:
    """The trees of a batch.

    Args:
        tokens: `[batch, n]` token of each node.
        parents: `[batch, n]` parent row of each node, below the node's own row.
        sizes: `[batch]` nodes of each tree, the first ones of its row.
    """
    largest = int(sizes.max(initial=0))
    if not largest:
        return [DraftTree.root_only()] * len(sizes)
    tokens, parents = tokens[:, :largest], parents[:, :largest]
    depths, masks = relations(parents)
    return [
        DraftTree(tokens[i, :n], parents[i, :n], depths[i, : n + 1], masks[i, : n + 1])
        for i, n in enumerate(sizes.tolist())
    ]


def relations(parents: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Depths and ancestor masks of many trees at once, by pointer doubling.

    Args:
        parents: `[batch, n]` parent row of each node; every parent row is below its node's.

    Returns:
        `depths` and `masks` as of `DraftTree`, int64 `[batch, n + 1]`.
    """
    batch, n = parents.shape
    ancestors = np.zeros((batch, n + 1), dtype=np.int64)  # the root is its own
    ancestors[:, 1:] = parents
    depths = np.ones((batch, n + 1), dtype=np.int64)
    depths[:, 0] = 0
    # Shifting by 63 gives the sign bit.
    masks = np.broadcast_to(np.int64(1) << np.arange(n + 1, dtype=np.int64), depths.shape).copy()
    # After round i, both cover the 2 ** i nearest ancestors.
    while ancestors.any():
        depths += np.take_along_axis(depths, ancestors, 1)
        masks |= np.take_along_axis(masks, ancestors, 1)
        ancestors = np.take_along_axis(ancestors, ancestors, 1)
    masks |= 1  # the root, which pointers stop at
    return depths, masks
