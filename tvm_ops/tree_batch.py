"""The trees of one batch, checked once, and their division into work items."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import tvm_ffi
from torch import Tensor

MAX_TREE_ROWS = 256
WORD_BITS = 64  # of an ancestor mask
MAX_POSITIONS = 1 << 30  # of a sequence: the kernels count in int32
# Shared with kernels/, which can't be imported without TVM; a test compares them.
ITEM_ROWS = 64
KEY_TILE = 64
_SHARES_PER_THREAD = 3  # how finely keys are split when there are too few items
_PARALLEL_MERGE = 1 << 16  # partial sums (floats) from which merging them pays a parallel loop


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """T trees whose rows are queries of one forward pass; built once a step, used by every layer.

    A tree's rows are consecutive rows of the query tensor. Row j's own key and value are at
    position context_len + j of its sequence, and must be written before attention runs. All
    tensors are on the CPU and must not change while the batch is in use: derived data is kept.
    One batch must not be used by two threads at once.

    query_start: int32 [T], first row of each tree.
    query_len: int32 [T], rows of each tree, root included, 1 to 256.
    context_len: int32 [T], committed tokens before the root row, at least 0.
    ancestor_masks: int64 [T, R, W], contiguous, R at least the largest query_len, W = ceil(R / 64)
        words a row: bit j % 64 of [t, r, j // 64] set if row r of tree t sees row j. Each row sees
        itself. Entries and bits at or beyond query_len are ignored.
    block_table: int32 [T, max_blocks], last dimension contiguous, any row stride: the cache blocks
        of each tree's sequence, in order. Entries beyond its last token are ignored.

    Raises TypeError for a wrong dtype, ValueError for anything else that is wrong.
    """

    query_start: Tensor
    query_len: Tensor
    context_len: Tensor
    ancestor_masks: Tensor
    block_table: Tensor
    _lengths: tuple[list[int], list[int], list[int]] = field(init=False, repr=False)
    _cache: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        num_trees = len(self.query_start) if self.query_start.dim() == 1 else -1
        rows = self.ancestor_masks.shape[1] if self.ancestor_masks.dim() == 3 else -1
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "query_start": (torch.int32, (num_trees,)),
            "query_len": (torch.int32, (num_trees,)),
            "context_len": (torch.int32, (num_trees,)),
            "ancestor_masks": (torch.int64, (num_trees, rows, -(-rows // WORD_BITS))),
        }
        for name, (dtype, shape) in shapes.items():
            _check_tensor(name, getattr(self, name), dtype, shape)
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} must be contiguous")
        table = self.block_table
        width = table.shape[1] if table.dim() == 2 else -1
        _check_tensor("block_table", table, torch.int32, (num_trees, width))
        if width > 1 and table.stride(1) != 1:
            raise ValueError(f"block_table's last dimension must be contiguous: {table.stride()}")
        starts, lens = self.query_start.tolist(), self.query_len.tolist()
        contexts = self.context_len.tolist()
        object.__setattr__(self, "_lengths", (starts, lens, contexts))
        end = 0
        for t in sorted(range(num_trees), key=starts.__getitem__):
            if not 1 <= lens[t] <= MAX_TREE_ROWS:
                raise ValueError(f"tree {t} has {lens[t]} rows, expected 1 to {MAX_TREE_ROWS}")
            if lens[t] > rows:
                raise ValueError(f"tree {t} has {lens[t]} rows, ancestor_masks has {rows}")
            if not 0 <= contexts[t] <= MAX_POSITIONS:
                raise ValueError(
                    f"tree {t} has context_len {contexts[t]}, expected 0 to {MAX_POSITIONS}"
                )
            if starts[t] < end:
                raise ValueError(
                    f"tree {t} starts at query row {starts[t]}, which is negative or inside another"
                )
            end = starts[t] + lens[t]
        row = np.arange(rows)
        own = self.ancestor_masks.numpy()[:, row, row // WORD_BITS] >> row % WORD_BITS
        blind = (own & 1 == 0) & (row < self.query_len.numpy()[:, None])
        if blind.any():
            t, r = np.argwhere(blind)[0].tolist()
            raise ValueError(f"row {r} of tree {t} does not see itself: bit {r} of its mask is 0")
        self._cache["query_end"] = end

    def __len__(self) -> int:
        return len(self._lengths[0])

    @property
    def query_end(self) -> int:
        """One more than the last query row of any tree; 0 without trees."""
        return int(self._cache["query_end"])

    def check_blocks(self, num_blocks: int, block_size: int) -> None:
        """Raise ValueError unless every used block_table entry is a block of the cache."""
        key = ("blocks", num_blocks, block_size)
        if key in self._cache or not len(self):
            return
        used = -(-(self.context_len.numpy() + self.query_len.numpy()) // block_size)
        width = self.block_table.shape[1]
        if int(used.max()) > width:
            t = int(used.argmax())
            raise ValueError(
                f"tree {t} needs {int(used[t])} blocks of {block_size} tokens (context "
                f"{int(self.context_len[t])} + {int(self.query_len[t])} rows), block_table has "
                f"{width} columns"
            )
        table = self.block_table.numpy()
        wrong = (np.arange(width) < used[:, None]) & ((table < 0) | (table >= num_blocks))
        if wrong.any():
            t, b = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"block_table[{t}, {b}] is {int(table[t, b])}, the cache has {num_blocks} blocks"
            )
        self._cache[key] = True

    def plan(
        self, kv_heads: int, group: int, head_dim: int, threads: int, window: int | None = None
    ) -> WorkPlan:
        """Work items for these head counts, made once per batch and argument values.

        window: a row sees the last `window` positions up to its own, or all if None.
        """
        key = ("plan", kv_heads, group, head_dim, threads, window)
        if key not in self._cache:
            self._cache[key] = _make_plan(self, kv_heads, group, head_dim, threads, window)
        found: WorkPlan = self._cache[key]
        return found

    def visible(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Masks like ancestor_masks, bits beyond query_len cleared, and row starts int32 [T, R].

        A row's position is context_len plus its depth, its number of ancestors. Within `window`
        positions up to its own, it sees committed tokens from its row start on, and masked rows.
        """
        key = ("visible", window)
        if key not in self._cache:
            self._cache[key] = _visible(self, window)
        masks, starts = self._cache[key]
        return masks, starts


@dataclass(frozen=True, eq=False)
class WorkPlan:
    """What the kernel's parallel loops run over, costly items first.

    items: int32 [N, 8]: tree, KV head, first row, rows, first key, one past the last key, partial
        result's index or -1, largest row start of the tree. Rows count tree row x head of the
        group.
    merges: int32 [M, 8]: tree, KV head, first row, rows, first partial result, how many, unused.
    arguments: the kernel's last arguments, tensors converted once for tvm-ffi: items, merges, the
        batch's six, the scratch of split items, float32 [P, 64, head_dim] and [P, 64, 2], and
        whether to merge in parallel.
    """

    items: Tensor
    merges: Tensor
    arguments: tuple[Any, ...]


def _bits(masks: Tensor, rows: int) -> Tensor:
    """bool [T, R, rows]: masks [T, R, W] unpacked."""
    row = torch.arange(rows)
    return (masks[:, :, row // WORD_BITS] >> row % WORD_BITS) & 1 == 1


def _visible(batch: TreeBatch, window: int | None) -> tuple[Tensor, Tensor]:
    masks = batch.ancestor_masks
    rows, words = masks.shape[1:]
    count = batch.query_len[:, None]
    if window is None:
        firsts = WORD_BITS * np.arange(words, dtype=np.int64)
        inside = np.clip(count.numpy() - firsts, 0, WORD_BITS)
        full = np.where(inside == WORD_BITS, -1, (np.int64(1) << inside % WORD_BITS) - 1)
        starts = torch.zeros(masks.shape[:2], dtype=torch.int32)
        return torch.from_numpy(masks.numpy() & full[:, None]), starts
    seen = _bits(masks, rows) & (torch.arange(rows) < count)[:, None]
    depth = seen.sum(-1) - 1
    seen &= depth[:, None] > depth[:, :, None] - window
    padded = torch.nn.functional.pad(seen, (0, words * WORD_BITS - rows))
    weights = torch.tensor([1 << bit for bit in range(WORD_BITS - 1)] + [-(1 << 63)])
    starts = (batch.context_len[:, None] + depth - window + 1).clamp(min=0)
    # Entries of no row must not narrow what others see.
    starts = starts.where(torch.arange(rows) < count, 0)
    packed = (padded.view(*masks.shape, WORD_BITS) * weights).sum(-1)
    return packed, starts.minimum(batch.context_len[:, None]).int()


def _make_plan(
    batch: TreeBatch, kv_heads: int, group: int, head_dim: int, threads: int, window: int | None
) -> WorkPlan:
    masks, starts = batch.visible(window)
    chunks = []  # (cost, tree, first row, rows, first key) for one KV head
    _, lens, contexts = batch._lengths
    last_start = starts.amax(1).tolist() if window is not None else [0] * len(lens)
    for t, (length, context) in enumerate(zip(lens, contexts, strict=True)):
        keys = context + length
        begin = int(starts[t, :length].min()) // KEY_TILE * KEY_TILE if window is not None else 0
        for first in range(0, length * group, ITEM_ROWS):
            rows = min(ITEM_ROWS, length * group - first)
            chunks.append((-(-(keys - begin) // KEY_TILE) * (8 + rows), t, first, rows, begin))
    chunks.sort(reverse=True)
    total = kv_heads * sum(chunk[0] for chunk in chunks)
    share = max(1, -(-total // (_SHARES_PER_THREAD * threads)))
    items, merges, partials = [], [], 0
    for cost, t, first, rows, begin in chunks:
        keys = contexts[t] + lens[t]
        tiles = -(-(keys - begin) // KEY_TILE)
        splits = 1 if threads == 1 else min(tiles, -(-cost // share))
        per_split = -(-tiles // splits) * KEY_TILE
        splits = -(-(keys - begin) // per_split)
        for s in range(splits):
            start = begin + s * per_split
            where = partials + s if splits > 1 else -1
            end = min(keys, start + per_split)
            items.append([t, 0, first, rows, start, end, where, last_start[t]])
        if splits > 1:
            merges.append([t, 0, first, rows, partials, splits, 0, 0])
            partials += splits
    item_table = _for_all_heads(items, kv_heads, 6, partials)
    merge_table = _for_all_heads(merges, kv_heads, 4, partials)
    tensors = (
        item_table,
        merge_table,
        batch.query_start,
        batch.query_len,
        batch.context_len,
        masks,
        starts,
        batch.block_table,
        torch.empty(partials * kv_heads, ITEM_ROWS, head_dim),
        torch.empty(partials * kv_heads, ITEM_ROWS, 2),
    )
    merge_work = sum(merge[3] * merge[5] for merge in merges) * kv_heads * head_dim
    parallel_merge = int(threads > 1 and merge_work >= _PARALLEL_MERGE)
    arguments = (*map(tvm_ffi.from_dlpack, tensors), parallel_merge)
    return WorkPlan(item_table, merge_table, arguments)


def _for_all_heads(rows: list[list[int]], kv_heads: int, column: int, partials: int) -> Tensor:
    """Rows of one head repeated for each; `column`, if not negative, counts on per head."""
    if not rows:  # NumPy gives empty arrays other strides
        return torch.empty(0, 8, dtype=torch.int32)
    table = np.array(rows, np.int32).repeat(kv_heads, 0)
    head = np.tile(np.arange(kv_heads, dtype=np.int32), len(rows))
    table[:, 1] = head
    table[:, column] += np.where(table[:, column] >= 0, head * partials, 0)
    return torch.from_numpy(table)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
