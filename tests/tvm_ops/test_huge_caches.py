"""Addresses beyond 32 bits: blocks and rows far out in large caches, and strides past 2^31."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tvm_ops import KVCacheGroup, TreeBatch, compact_kv, tree_attention
from tvm_ops.layouts import cache_shape, read_rows
from tvm_ops.testing import error_and_bound, make_case

BLOCK_SIZE = 32


def huge(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that is reserved but hardly ever touched."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:  # the machine forbids to reserve more than there is
        pytest.skip(f"no address space: {error}")


@pytest.mark.parametrize("layout, dtype", [("vec", torch.float32), ("amx", torch.bfloat16)])
def test_blocks_beyond_32_bits(layout, dtype):
    case = make_case(layout=layout, dtype=dtype, head_dim=64, lens=[9, 3], contexts=[100, 40])
    few, kv_heads = case.kv_cache.shape[:2]
    # Elements and bytes both pass 2^32.
    num_blocks = (1 << 32) // (kv_heads * BLOCK_SIZE * 128) + 2 * few
    cache = huge(*cache_shape(num_blocks, kv_heads, BLOCK_SIZE, 64), dtype=dtype)
    assert cache.numel() > 1 << 32
    cache[-few:] = case.kv_cache
    table = case.batch.block_table + (num_blocks - few)
    batch = TreeBatch(
        case.batch.query_start,
        case.batch.query_len,
        case.batch.context_len,
        case.batch.ancestor_masks,
        table.to(torch.int32),
    )
    out = dataclasses.replace(case, kv_cache=cache, batch=batch).run(tree_attention)
    error, bound = error_and_bound(case, out)
    assert error <= bound

    moved = num_blocks * BLOCK_SIZE - 1 - torch.arange(4)
    kept = read_rows(cache[-few:], layout, torch.arange(few * BLOCK_SIZE).flip(0)[:4])
    cache[0] = 0
    compact_kv(KVCacheGroup([cache], layout), moved, torch.arange(4))
    for ours, theirs in zip(read_rows(cache[:1], layout, torch.arange(4)), kept, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_rows_beyond_32_bits():
    case = make_case(layout="vec", dtype=torch.bfloat16, head_dim=64, lens=[2], contexts=[40])
    tokens, heads, head_dim = case.query.shape
    stride = (1 << 30) + 64  # the last row is past 2^31 elements and 2^32 bytes
    memory = huge((tokens - 1) * stride + heads * head_dim, dtype=torch.bfloat16)
    apart = huge((tokens - 1) * stride + heads * head_dim, dtype=torch.bfloat16)
    layout = (tokens, heads, head_dim), (stride, head_dim, 1)
    query, out = memory.as_strided(*layout), apart.as_strided(*layout)
    query.copy_(case.query)
    out.fill_(torch.nan)
    tree_attention(query, case.kv_cache, out, case.batch, **case.options)
    error, bound = error_and_bound(case, out.contiguous())
    assert error <= bound
