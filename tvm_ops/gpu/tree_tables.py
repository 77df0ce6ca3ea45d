"""The trees of a batch as tables in a GPU's memory, at addresses that stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tvm_ops.tree_batch import MAX_TREE_ROWS, TreeBatch

_FIELDS = 8  # of a tree: first row, rows, context, smallest and largest row start, unused


class TreeTables:
    """What the kernels read of a TreeBatch, for any number of batches one after the other.

    Memory is allocated once. `update` copies a batch into it, on the current stream and without
    waiting for the GPU; kernels launched on that stream afterwards, or captured in a CUDA graph
    before, see the new batch. Not safe for two threads at once.

    batch: what was copied last, or None. num_trees, num_rows, num_keys: trees that a launch covers,
    rows of the largest, keys of the longest sequence; with a fixed grid, the most there can be.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        num_blocks: int,
        block_size: int,
        max_trees: int,
        max_rows: int = 64,
        max_blocks: int,
        windows: Sequence[int | None] = (None,),
        fixed_grid: bool = False,
    ) -> None:
        """Allocate tables for batches of at most max_trees trees of max_rows rows.

        num_blocks, block_size: of the caches that attention will read.
        max_blocks: columns of the block table.
        windows: every sliding_window that attention will be called with.
        fixed_grid: launches do not depend on the batch, as CUDA graphs need: attention always
            takes the time slots of max_trees trees, missing ones empty.

        Raises ValueError for sizes below 1 or above what the kernels count.
        """
        for name, value in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("max_trees", max_trees),
            ("max_rows", max_rows),
            ("max_blocks", max_blocks),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_rows > MAX_TREE_ROWS:
            raise ValueError(f"max_rows must be at most {MAX_TREE_ROWS}, got {max_rows}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_trees, self.max_rows, self.max_blocks = max_trees, max_rows, max_blocks
        self.windows = tuple(dict.fromkeys(windows))
        self.fixed_grid = fixed_grid
        self.mask_words = 2 * -(-max_rows // 64)
        per_window = [
            max_trees * _FIELDS,
            max_trees * max_rows * self.mask_words,
            max_trees * max_rows,
        ]
        sizes = [*per_window * len(self.windows), max_trees * max_blocks]
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.device = self._memory.device
        *tables, self.block_table = torch.split(self._memory, sizes)
        self._tables = {w: tables[3 * i : 3 * i + 3] for i, w in enumerate(self.windows)}
        self._sizes = sizes[:-1]
        self._scratch = torch.empty(1, dtype=torch.float32, device=self.device)
        self.batch: TreeBatch | None = None
        self.num_trees = self.num_rows = self.num_keys = 0
        if fixed_grid:
            self.num_trees, self.num_rows = max_trees, max_rows
            self.num_keys = max_blocks * block_size

    def update(self, batch: TreeBatch) -> None:
        """Copy `batch` into the tables.

        Raises ValueError if it exceeds them, or names a block that the caches don't have.
        """
        trees, width = len(batch), batch.block_table.shape[1]
        rows = int(batch.query_len.max()) if trees else 0
        for what, found, limit in (
            ("trees", trees, self.max_trees),
            ("rows in a tree", rows, self.max_rows),
            ("columns in block_table", width, self.max_blocks),
        ):
            if found > limit:
                raise ValueError(f"{found} {what}, these tables hold at most {limit}")
        batch.check_blocks(self.num_blocks, self.block_size)
        # Blocks of absent trees are never looked up: the copy leaves out what may be megabytes.
        sizes = [*self._sizes, trees * self.max_blocks]
        # Pinned memory from torch's allocator is not reused before the copy out of it is done.
        host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        *parts, table = torch.split(host, sizes)
        table.view(trees, self.max_blocks)[:, :width] = batch.block_table
        for i, window in enumerate(self.windows):
            masks, starts = batch.visible(window)
            records, bits, first_visible = parts[3 * i : 3 * i + 3]
            if trees:
                starts = starts[:, :rows]  # 0 beyond a tree's rows
                lowest = starts.where(torch.arange(rows) < batch.query_len[:, None], 1 << 30)
                records.view(self.max_trees, _FIELDS)[:trees, :5] = torch.stack(
                    [
                        batch.query_start,
                        batch.query_len,
                        batch.context_len,
                        lowest.amin(1),
                        starts.amax(1),
                    ],
                    dim=1,
                )
                words = masks[:, :rows].contiguous().view(torch.int32)
                space = bits.view(self.max_trees, self.max_rows, self.mask_words)
                words = words[:, :, : self.mask_words]
                space[:trees, :rows, : words.shape[2]] = words
                first_visible.view(self.max_trees, self.max_rows)[:trees, :rows] = starts
        self._memory[: len(host)].copy_(host, non_blocking=True)
        self.batch = batch
        if not self.fixed_grid:
            self.num_trees, self.num_rows = trees, rows
            self.num_keys = int((batch.context_len + batch.query_len).max()) if trees else 0

    def scratch(self, floats: int) -> Tensor:
        """Memory for partial results, float32, at least `floats`; kept, so that it stays put."""
        if floats > len(self._scratch):
            self._scratch = torch.empty(floats, dtype=torch.float32, device=self.device)
        return self._scratch

    def tables(self, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """int32: trees [max_trees, 8], masks [max_trees, max_rows, mask_words], row starts, flat.

        Raises ValueError for a window that was not named at construction.
        """
        if window not in self._tables:
            raise ValueError(
                f"sliding_window {window} was not among the windows of these tables: {self.windows}"
            )
        trees, masks, starts = self._tables[window]
        return trees, masks, starts
