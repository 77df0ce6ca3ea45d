"""The compiled CUDA kernels on a GPU: parity, CUDA graphs, compaction.

The same kernels' source runs without a GPU in tests/tvm_ops/test_gpu_kernels.py, case by case; this
shows that what nvcc makes of it does the same.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tvm_ops import KVCacheGroup, TreeTables, compact_kv, tree_attention, warm_up
from tvm_ops.reference import compact_kv_reference
from tvm_ops.testing import AttentionCase, error_and_bound, make_case, tree_rows

RAGGED = {"lens": [1, 5, 64, 16, 2, 33], "contexts": [0, 100, 63, 3000, 64, 31]}
VARIANTS = [
    (torch.bfloat16, 64),
    (torch.float16, 64),
    (torch.float32, 64),
    (torch.bfloat16, 96),
    (torch.bfloat16, 128),
    (torch.bfloat16, 256),
]


def on_gpu(case: AttentionCase) -> AttentionCase:
    moved = {name: getattr(case, name).cuda() for name in ("query", "kv_cache", "out")}
    return dataclasses.replace(case, **moved)


def tables_for(case: AttentionCase, *, fixed_grid: bool = False) -> TreeTables:
    tables = TreeTables(
        "cuda",
        num_blocks=case.kv_cache.shape[0],
        block_size=case.kv_cache.shape[2],
        max_trees=len(case.batch) + 2,
        max_rows=case.batch.ancestor_masks.shape[1],
        max_blocks=case.batch.block_table.shape[1],
        windows=(case.sliding_window,),
        fixed_grid=fixed_grid,
    )
    tables.update(case.batch)
    return tables


def require_close(case: AttentionCase, out: torch.Tensor) -> None:
    out = out.cpu()
    error, bound = error_and_bound(case, out)
    assert error <= bound
    assert out[~tree_rows(case.batch, len(out))].isnan().all()


@pytest.mark.parametrize("dtype, head_dim", VARIANTS)
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 50}, {"softcap": 5.0}], ids=["plain", "window", "softcap"]
)
def test_parity(dtype, head_dim, order, options):
    case = make_case(layout="strided", dtype=dtype, head_dim=head_dim, **RAGGED)
    case = dataclasses.replace(case, **options)
    moved = on_gpu(case)
    cache = moved.kv_cache
    if order == "NHD":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    out = moved.out.clone()
    tree_attention(moved.query, cache, out, tables_for(case), **case.options)
    require_close(case, out)


@pytest.mark.parametrize("rows, context", [(1, 0), (16, 8192), (64, 32000), (200, 100)])
def test_long_contexts_and_many_rows(rows, context):
    case = make_case(
        layout="strided", dtype=torch.bfloat16, head_dim=128, lens=[rows], contexts=[context]
    )
    moved = on_gpu(case)
    out = moved.out.clone()
    tree_attention(moved.query, moved.kv_cache, out, tables_for(case), **case.options)
    require_close(case, out)


def test_a_captured_graph_follows_the_tables():
    first = make_case(layout="strided", dtype=torch.bfloat16, head_dim=64, **RAGGED)
    moved = on_gpu(first)
    tables = tables_for(first, fixed_grid=True)
    out = moved.out.clone()

    def run() -> None:
        tree_attention(moved.query, moved.kv_cache, out, tables, **first.options)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    # Other trees and contexts, in the same memory.
    other = make_case(
        layout="strided",
        dtype=torch.bfloat16,
        head_dim=64,
        lens=[5, 1, 16, 64, 33, 2],
        contexts=[96, 4, 111, 2952, 33, 62],
        seed=1,
    )
    assert other.out.shape == first.out.shape
    assert other.kv_cache.shape == first.kv_cache.shape, "choose lengths of as many blocks"
    moved.query.copy_(other.query)
    moved.kv_cache.copy_(other.kv_cache)
    out.copy_(other.out)
    tables.update(other.batch)
    graph.replay()
    require_close(other, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compaction(dtype):
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(40, 3, 16, 256, generator=generator).to(dtype) for _ in range(5)]
    moved = [c.cuda().transpose(1, 2).contiguous().transpose(1, 2) for c in caches]
    group = KVCacheGroup(moved, "strided")
    source, target = torch.randint(640, (2, 30), generator=generator)
    compact_kv(group, source, target)
    compact_kv_reference(caches, "strided", source, target)
    for cache, expected in zip(moved, caches, strict=True):
        assert torch.equal(cache.cpu(), expected)


def test_warm_up_loads_without_a_first_call():
    warm_up("strided", torch.bfloat16, 64)
