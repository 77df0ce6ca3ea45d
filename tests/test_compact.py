"""Moves of accepted rows: what lies where afterwards, over every path of small trees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.compact import compact, compaction_moves
from tvm_ops import KVCacheGroup
from tvm_ops.layouts import cache_shape, read_rows

BLOCK_SIZE = 4
# Physical blocks in no order, one list per request; no block belongs to two of them.
BLOCKS = np.array([[7, 2, 5, 11], [3, 9, 1, 8], [0, 4, 10, 6]], dtype=np.int32)


def slot(request: int, position: int) -> int:
    return int(BLOCKS[request, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def path(rows: tuple[int, ...]) -> AcceptedPath:
    return AcceptedPath(rows, tuple(range(len(rows) + 1)))


PATHS = [rows for n in range(5) for rows in itertools.combinations(range(1, 7), n)]


@pytest.mark.parametrize("root", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("rows", PATHS, ids=str)
def test_every_path_of_six_nodes(rows: tuple[int, ...], root: int) -> None:
    """Each slot holds its own number; moved one after the other, the path lies in a row."""
    source, destination = compaction_moves([path(rows)], [root], BLOCKS[:1], BLOCK_SIZE, {})
    assert source.dtype == destination.dtype == torch.int64
    cache = {slot(0, position): position for position in range(16)}
    before = dict(cache)
    for origin, target in zip(source.tolist(), destination.tolist(), strict=True):
        assert origin != target
        cache[target] = cache[origin]
    for depth, row in enumerate(rows, start=1):
        assert cache[slot(0, root + depth)] == root + row
    # What is committed, and what no path leads to, stays as it was.
    touched = {slot(0, root + depth) for depth in range(1, len(rows) + 1)}
    assert {s for s in cache if cache[s] != before[s]} <= touched
    assert len(source) == sum(row != depth for depth, row in enumerate(rows, start=1))


def test_each_request_moves_in_its_own_blocks() -> None:
    paths = [path((2, 3)), path(()), path((1, 4))]
    source, destination = compaction_moves(paths, [3, 5, 7], BLOCKS, BLOCK_SIZE, {})
    assert source.tolist() == [slot(0, 5), slot(0, 6), slot(2, 11)]
    assert destination.tolist() == [slot(0, 4), slot(0, 5), slot(2, 9)]


def test_a_root_and_a_table_are_needed_for_each_path() -> None:
    with pytest.raises(ValueError):
        compaction_moves([path((2,)), path((2,))], [3], BLOCKS, BLOCK_SIZE, {})


@pytest.mark.parametrize("rows", [(), (1, 2, 3), (2, 5), (4,)], ids=str)
def test_caches_are_moved_in_place(rows: tuple[int, ...]) -> None:
    """Across a border of two blocks that do not follow each other."""
    block_size, root = 32, 30
    blocks = np.array([[2, 0]], dtype=np.int32)
    slots = torch.tensor([*range(64, 96), *range(32)])  # of the positions
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(cache_shape(3, 2, block_size, 16), generator=generator) for _ in range(2)]
    before = [read_rows(cache, "vec", slots) for cache in caches]
    compact(KVCacheGroup(caches, "vec"), [path(rows)], [root], blocks, {})
    origin = list(range(64))
    for depth, row in enumerate(rows, start=1):
        origin[root + depth] = root + row
    for cache, old in zip(caches, before, strict=True):
        for now, was in zip(read_rows(cache, "vec", slots), old, strict=True):
            assert torch.equal(now, was[origin])
