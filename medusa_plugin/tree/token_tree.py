"""TokenTree: the shape of a candidate tree, rows listed with parents before their children."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

MAX_ROWS = 64
"""Rows of one tree, root included: an ancestor mask is one 64-bit word."""

Path = tuple[int, ...]


class TreeError(ValueError):
    """A tree is malformed; the message names the offending path or row."""


@dataclass(frozen=True)
class TokenTree:
    """Topology of a candidate tree. Row 0 is the root, the last committed token.

    Since parents come before their children, the first rows of a tree are again a tree: a
    scheduler may grant any prefix.

    Raises:
        TreeError: a row does not follow its parent, siblings share a rank, or there are too many.
    """

    parents: tuple[int, ...]
    """Parent row of each row; -1 for the root."""
    ranks: tuple[int, ...]
    """Which candidate of its depth's head each row carries, 0 the most likely; -1 for the root."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks):
            raise TreeError(f"{len(self.parents)} parents but {len(self.ranks)} ranks")
        if not 1 <= len(self.parents) <= MAX_ROWS:
            raise TreeError(
                f"a tree has 1 to {MAX_ROWS} rows with its root, got {len(self.parents)}"
            )
        if self.parents[0] != -1 or self.ranks[0] != -1:
            raise TreeError("row 0 must be the root, with parent -1 and rank -1")
        seen = set()
        for row in range(1, len(self.parents)):
            parent, rank = self.parents[row], self.ranks[row]
            if not 0 <= parent < row:
                raise TreeError(f"row {row} has parent {parent}, expected a row before it")
            if rank < 0:
                raise TreeError(f"row {row} has rank {rank}, expected 0 or more")
            if (parent, rank) in seen:
                raise TreeError(f"row {row} repeats rank {rank} under parent {parent}")
            seen.add((parent, rank))

    @classmethod
    def chain(cls, num_nodes: int) -> TokenTree:
        """The most likely candidate of each head in a row: no branches."""
        return _chain(num_nodes)

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> TokenTree:
        """Tree of `medusa_choices`: each path lists the candidate rank at each depth.

        Rows keep the order of `choices`, except that a path follows its parent at the earliest.

        Raises:
            TreeError: names an empty, repeated or orphaned path.
        """
        paths = [tuple(path) for path in choices]
        rows: dict[Path, int] = {(): 0}
        waiting = dict.fromkeys(paths)
        if len(waiting) != len(paths):
            repeated = next(path for path in paths if paths.count(path) > 1)
            raise TreeError(f"path {list(repeated)} is given more than once")
        if () in waiting:
            raise TreeError("path [] is the root, which every tree has: leave it out")
        while waiting:
            # One at a time: in waves, a child listed early would fall behind later siblings.
            ready = next((path for path in waiting if path[:-1] in rows), None)
            if ready is None:
                orphan = next(iter(waiting))
                raise TreeError(
                    f"path {list(orphan)} has no parent {list(orphan[:-1])}: list that path too"
                )
            rows[ready] = len(rows)
            del waiting[ready]
        nodes = [path for path in rows if path]
        return cls((-1, *(rows[path[:-1]] for path in nodes)), (-1, *(path[-1] for path in nodes)))

    @property
    def num_rows(self) -> int:
        """Rows to verify, root included."""
        return len(self.parents)

    @property
    def num_nodes(self) -> int:
        """Drafted tokens: rows without the root."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each row; the root has 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ancestor_masks(self) -> tuple[int, ...]:
        """Bit j of entry r is set iff row r sees row j: its ancestors and itself."""
        masks = [1]
        for row, parent in enumerate(self.parents[1:], start=1):
            masks.append(masks[parent] | 1 << row)
        return tuple(masks)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row follows the one before it: ordinary causal attention suffices."""
        return all(parent == row - 1 for row, parent in enumerate(self.parents))

    @cached_property
    def parent_array(self) -> npt.NDArray[np.int64]:
        """`[num_nodes]` parent row of each node, without the root."""
        return np.array(self.parents[1:], dtype=np.int64)

    @cached_property
    def depth_array(self) -> npt.NDArray[np.int64]:
        """`depths` as `[num_rows]`."""
        return np.array(self.depths, dtype=np.int64)

    @cached_property
    def mask_array(self) -> npt.NDArray[np.int64]:
        """`ancestor_masks` as `[num_rows]`; bit 63 is the sign."""
        return np.array(self.ancestor_masks, dtype=np.uint64).view(np.int64)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.parents]
        for row, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(row)
        return tuple(tuple(rows) for rows in children)

    def children(self, row: int) -> tuple[int, ...]:
        """Rows whose parent is `row`, ascending."""
        return self._children[row]

    def path(self, row: int) -> Path:
        """Candidate ranks from the root to `row`: its entry in `medusa_choices`."""
        ranks: list[int] = []
        while row:
            ranks.append(self.ranks[row])
            row = self.parents[row]
        return tuple(reversed(ranks))

    @property
    def choices(self) -> list[list[int]]:
        """The tree as `medusa_choices`, in row order."""
        return [list(self.path(row)) for row in range(1, self.num_rows)]

    def prefix(self, num_nodes: int) -> TokenTree:
        """The tree of the first `num_nodes` nodes."""
        return _prefix(self, num_nodes)


@functools.lru_cache(maxsize=MAX_ROWS)
def _chain(num_nodes: int) -> TokenTree:
    return TokenTree(tuple(range(-1, num_nodes)), (-1, *(0 for _ in range(num_nodes))))


@functools.lru_cache(maxsize=4096)
def _prefix(tree: TokenTree, num_nodes: int) -> TokenTree:
    return TokenTree(tree.parents[: num_nodes + 1], tree.ranks[: num_nodes + 1])
