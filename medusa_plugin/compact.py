"""Compaction: turn accepted paths into moves of KV rows.

Tree row r of a request was written to the slot of position `root_position + r`; the j-th accepted
row belongs at position `root_position + j`. Paths ascend, so j <= r: a destination never lies
after its source, and moving in path order never overwrites a row that is still needed.

NaN and infinity do not stay behind in rows that were rejected: kernels multiply what lies beyond
the end of a sequence by a weight of zero, which only for finite values is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from medusa_plugin.accept import AcceptedPath
from tvm_ops import KVCacheGroup, compact_kv

IntArray = npt.NDArray[np.integer]


def compaction_moves(
    paths: Sequence[AcceptedPath],
    root_positions: Sequence[int],
    block_table: IntArray,
    block_size: int,
    damaged: Mapping[int, Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the KV rows to move, in an order that is safe to execute one after the other.

    Args:
        paths: accepted path per request.
        root_positions: position of the root token per request.
        block_table: `[num_reqs, max_blocks]` physical block of each logical block.
        block_size: tokens per block.
        damaged: request -> tree rows that are not finite. Those beyond the accepted path become
            copies of the root, which is, unless the path failed and the request ends.

    Returns:
        Source and destination slots, int64 `[num_moves]` on the CPU; rows already in place are
        left out.
    """
    source: list[int] = []
    destination: list[int] = []
    for request, (path, root) in enumerate(zip(paths, root_positions, strict=True)):
        blocks = block_table[request]
        for depth, row in enumerate(path.rows, start=1):
            if row != depth:
                source.append(_slot(blocks, root + row, block_size))
                destination.append(_slot(blocks, root + depth, block_size))
        for row in damaged.get(request, ()):
            if row > len(path.rows) and not path.failed:
                source.append(_slot(blocks, root, block_size))
                destination.append(_slot(blocks, root + row, block_size))
    return torch.tensor(source, dtype=torch.int64), torch.tensor(destination, dtype=torch.int64)


def _slot(blocks: IntArray, position: int, block_size: int) -> int:
    return int(blocks[position // block_size]) * block_size + position % block_size


def compact(
    caches: KVCacheGroup,
    paths: Sequence[AcceptedPath],
    root_positions: Sequence[int],
    block_table: IntArray,
    damaged: Mapping[int, Sequence[int]],
) -> None:
    """Move the KV rows of all accepted paths in place, in every layer of `caches`.

    Args: see `compaction_moves`.
    """
    if not damaged and not any(path.rows for path in paths):
        return
    source, destination = compaction_moves(
        paths, root_positions, block_table, caches.block_size, damaged
    )
    if source.numel():
        compact_kv(caches, source, destination)
