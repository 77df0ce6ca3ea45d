"""tree_attention on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tvm_ops.artifact import KernelSpec
from tvm_ops.gpu.launch import stride_in_words
from tvm_ops.gpu.load import cuda_program
from tvm_ops.gpu.tree_tables import TreeTables

_BLOCKS_PER_PROCESSOR = 2  # that keep a multiprocessor busy
_MIN_TILES = 2  # of a split: less does not pay for combining
_MAX_SPLITS = 64
_MAX_GRID_Y = 65535


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def choose_splits(blocks: int, tiles: int, processors: int) -> int:
    """Parts that the keys of each tree are cut into, so that the grid fills the processors.

    blocks: of the grid without splits. tiles: of the longest sequence.
    """
    wanted = -(-_BLOCKS_PER_PROCESSOR * processors // blocks)
    return max(1, min(wanted, tiles // _MIN_TILES, _MAX_SPLITS))


def gpu_tree_attention(
    spec: KernelSpec,
    query: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    tables: TreeTables,
    *,
    scale: float,
    softcap: float,
    sliding_window: int | None,
) -> None:
    """Launch the kernels of `spec`; arguments as in tvm_ops.tree_attention, checked by it.

    scale, softcap: as the kernels take them, base-2 logits; no softcap: 0.

    Raises ValueError for strides or alignments that the kernels can't read, and for tables of other
    caches or on another device; RuntimeError as cuda_program does.
    """
    num_blocks, kv_heads, block_size, width = kv_cache.shape
    if tables.device != kv_cache.device:
        raise ValueError(f"the tables are on {tables.device}, the cache on {kv_cache.device}")
    if (num_blocks, block_size) != (tables.num_blocks, tables.block_size):
        raise ValueError(
            f"the tables are for caches of {tables.num_blocks} blocks of {tables.block_size} "
            f"tokens, this one has {num_blocks} of {block_size}"
        )
    trees, masks, starts = tables.tables(sliding_window)
    if not tables.num_trees:
        return
    loaded = cuda_program(spec, kv_cache.device)
    group = query.shape[1] // kv_heads
    program = loaded.program
    row_tiles = -(-tables.num_rows * group // program.rows)
    grid_y = tables.num_trees * kv_heads
    if grid_y > _MAX_GRID_Y:
        raise ValueError(
            f"{tables.num_trees} trees x {kv_heads} KV heads exceed a grid's {_MAX_GRID_Y} rows"
        )
    tiles = -(-tables.num_keys // program.keys)
    splits = choose_splits(row_tiles * grid_y, tiles, num_processors(kv_cache.device))
    scratch = tables.scratch(
        grid_y * row_tiles * splits * program.rows * (width // 2 + 2) if splits > 1 else 1
    )
    values: dict[str, Any] = {
        "query": query.data_ptr(),
        "cache": kv_cache.data_ptr(),
        "out": out.data_ptr(),
        "trees": trees.data_ptr(),
        "masks": masks.data_ptr(),
        "first_visible": starts.data_ptr(),
        "table": tables.block_table.data_ptr(),
        "partial": scratch.data_ptr(),
        "query_row_stride": stride_in_words(query, 0, "query"),
        "query_head_stride": stride_in_words(query, 1, "query"),
        "out_row_stride": stride_in_words(out, 0, "out"),
        "out_head_stride": stride_in_words(out, 1, "out"),
        "block_stride": stride_in_words(kv_cache, 0, "kv_cache", 16),
        "head_stride": stride_in_words(kv_cache, 1, "kv_cache", 16),
        "token_stride": stride_in_words(kv_cache, 2, "kv_cache", 16),
        "table_stride": tables.max_blocks,
        "num_trees": tables.num_trees,
        "kv_heads": kv_heads,
        "group": group,
        "block_size": block_size,
        "mask_rows": tables.max_rows,
        "mask_words": tables.mask_words,
        "row_tiles": row_tiles,
        "splits": splits,
        "scale": scale,
        "softcap": softcap,
    }
    loaded.kernels["tree_attention"]((row_tiles * splits, grid_y), values)
    if splits > 1:
        combine_tiles = row_tiles * (program.rows // program.combine_rows)
        loaded.kernels["combine"]((combine_tiles, grid_y), values)
