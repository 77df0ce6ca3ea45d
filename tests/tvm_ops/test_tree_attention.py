"""tree_attention against the float64 reference; bounds are explained in tvm_ops.testing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tvm_ops import LAYOUTS, TreeBatch, tree_attention
from tvm_ops.layouts import read_rows, write_rows
from tvm_ops.load import attention_spec, loaded_artifacts
from tvm_ops.testing import AttentionCase, chain_masks, error_and_bound, make_case, tree_rows

RAGGED = {"lens": [1, 5, 64, 16, 2, 33], "contexts": [0, 100, 63, 1000, 64, 31]}


def check(case: AttentionCase) -> None:
    out = case.run(tree_attention)
    mine = tree_rows(case.batch, len(out))
    error, bound = error_and_bound(case, out)
    assert error <= bound  # false for NaN as well
    assert out[~mine].isnan().all(), "rows outside trees were written"
    spec = attention_spec(case.layout, case.query.dtype, case.query.shape[2])
    assert loaded_artifacts()[spec].exists(), "something else than the compiled kernel ran"


def test_every_variant_on_ragged_trees(variant, threads):
    # Lengths and contexts on both sides of tile (64), unit (16) and block (32) borders.
    layout, dtype, head_dim = variant
    check(make_case(layout=layout, dtype=dtype, head_dim=head_dim, **RAGGED))


@pytest.mark.parametrize("kv_heads, group", [(1, 1), (3, 3), (1, 8), (4, 1), (2, 7), (1, 71)])
def test_head_ratios(kv_heads, group, threads):
    # Row blocks of 4 that straddle tree rows; groups wider than an item's 64 rows.
    check(
        make_case(
            layout="vec", dtype=torch.float32, head_dim=16, kv_heads=kv_heads, group=group, **RAGGED
        )
    )


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("layout", ["vec", "vec16", "amx"])
def test_block_sizes(layout, block_size):
    # A tile of 64 keys spans several blocks, or part of one.
    if block_size % LAYOUTS[layout].block_multiple:
        pytest.skip("the layout does not have this block size")
    dtype, head_dim = {"amx": (torch.bfloat16, 64), "vec16": (torch.float32, 80)}.get(
        layout, (torch.float32, 16)
    )
    check(make_case(layout=layout, dtype=dtype, head_dim=head_dim, block_size=block_size, **RAGGED))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 15, 16, 17, 31, 32, 47, 63, 64])
def test_row_counts(rows, threads):
    check(
        make_case(
            layout="vec", dtype=torch.float32, head_dim=16, lens=[rows], contexts=[130], seed=rows
        )
    )


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 48, 63, 64, 65, 127, 511, 3000])
def test_context_lengths(context, threads):
    check(make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[9], contexts=[context]))


@pytest.mark.parametrize("rows", [65, 127, 128, 129, 200, 256])
def test_masks_of_several_words(rows, threads):
    # Every place of a 16-key unit relative to a mask word's border occurs over these contexts.
    lens, contexts = [rows, 3, 64, rows - 1], [rows % 16, 61, 7, 130]
    check(make_case(layout="vec", dtype=torch.float32, head_dim=16, lens=lens, contexts=contexts))


@pytest.mark.parametrize("window", [1, 2, 5, 16, 63, 64, 65, 200, 5000])
@pytest.mark.parametrize("layout, dtype", [("vec", torch.float32), ("amx", torch.bfloat16)])
def test_sliding_window(layout, dtype, window, threads):
    # Windows shorter than a tree's depth hide ancestors; others end inside a tile, or see all.
    lens, contexts = [1, 5, 64, 16, 100], [0, 100, 63, 1000, 200]
    case = make_case(layout=layout, dtype=dtype, head_dim=64, lens=lens, contexts=contexts)
    check(dataclasses.replace(case, sliding_window=window))
    chain = make_case(
        layout=layout,
        dtype=dtype,
        head_dim=64,
        lens=lens,
        contexts=contexts,
        masks=chain_masks(lens),
    )
    check(dataclasses.replace(chain, sliding_window=window))


def test_window_counts_positions_not_slots():
    # Written apart from our reference. Rows 1 and 2 are siblings at one position: a window of 2
    # shows each its parent, whatever lies between them in the cache.
    masks = torch.tensor([0b001, 0b011, 0b101]).view(1, 3, 1)
    case = make_case(
        layout="vec",
        dtype=torch.float32,
        head_dim=16,
        lens=[3],
        contexts=[4],
        kv_heads=1,
        group=1,
        masks=masks,
    )
    out = dataclasses.replace(case, sliding_window=2).run(tree_attention)
    slots = case.batch.block_table[0, 0].long() * 32 + torch.arange(7)
    keys, values = read_rows(case.kv_cache, "vec", slots)
    for row, seen in enumerate([[3, 4], [4, 5], [4, 6]]):
        weights = torch.softmax(keys[seen, 0] @ case.query[1 + row, 0] * case.scale, 0)
        torch.testing.assert_close(out[1 + row, 0], weights @ values[seen, 0])


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_softcap(cap, threads):
    # Logits of both parts of our tanh: near 0, and far beyond the cap.
    case = make_case(layout="vec", dtype=torch.float32, head_dim=64, **RAGGED)
    check(dataclasses.replace(case, softcap=cap, scale=1.0))
    check(dataclasses.replace(case, softcap=cap, sliding_window=33))


def test_chain_equals_causal_attention():
    # Written apart from our reference, so that both can't share a mistake about positions.
    case = make_case(
        layout="vec",
        dtype=torch.float32,
        head_dim=16,
        lens=[8],
        contexts=[24],
        kv_heads=1,
        group=1,
        masks=chain_masks([8]),
    )
    block = int(case.batch.block_table[0, 0])
    memory = case.kv_cache[block, 0].flatten()
    keys, values = memory[: 16 * 32].view(16, 32).T, memory[16 * 32 :].view(32, 16)
    seen = torch.ones(8, 32).tril(diagonal=24).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.query[1:9, 0], keys, values, attn_mask=seen
    )
    torch.testing.assert_close(case.run(tree_attention)[1:9, 0], expected)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout, dtype", [("vec", torch.float32), ("amx", torch.bfloat16)])
def test_unseen_row_has_no_influence(layout, dtype, poison, threads):
    # Row 2's own key and value are poisoned. Row 3 is its child, rows 0, 1 and 4 don't see it.
    masks = torch.zeros(1, 5, 1, dtype=torch.int64)
    masks[0, :, 0] = torch.tensor([0b00001, 0b00011, 0b00101, 0b01101, 0b10011])
    case = make_case(layout=layout, dtype=dtype, head_dim=64, lens=[5], contexts=[70], masks=masks)
    clean = case.run(tree_attention)
    slot = case.batch.block_table[0, 72 // 32].long().view(1) * 32 + 72 % 32
    keys, values = read_rows(case.kv_cache, layout, slot)
    write_rows(
        case.kv_cache, layout, slot, torch.full_like(keys, poison), torch.full_like(values, poison)
    )
    dirty = case.run(tree_attention)
    assert torch.equal(dirty[[1, 2, 5]], clean[[1, 2, 5]])
    assert dirty[[3, 4]].isnan().any(-1).all(), "bad data that a row does see was hidden"


def test_large_logits_do_not_overflow(threads):
    case = make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[7], contexts=[200])
    case = dataclasses.replace(case, scale=30.0)  # logits to about 800, exp overflows at 88
    out = case.run(tree_attention)
    error, bound = error_and_bound(case, out)
    # Logits of this size carry their own rounding, which our change to base 2 rounds once more.
    assert error <= 2 * bound


def test_reference_answers_when_asked_for_by_name(monkeypatch):
    case = make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[9], contexts=[70])
    case = dataclasses.replace(case, softcap=2.0, sliding_window=20)
    fast = case.run(tree_attention)
    monkeypatch.setattr("tvm_ops.attention.reference_requested", lambda: True)
    monkeypatch.setattr("tvm_ops.attention.kernel", lambda spec: pytest.fail("a kernel ran"))
    torch.testing.assert_close(case.run(tree_attention), fast, equal_nan=True)


def test_no_trees():
    case = make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[], contexts=[])
    assert case.run(tree_attention).isnan().all()


def test_batch_is_used_by_many_layers_and_head_counts():
    # A batch keeps its plan: caches of other head counts must not get the wrong one.
    first = make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[9], contexts=[80])
    other = make_case(
        layout="vec", dtype=torch.float32, head_dim=64, lens=[9], contexts=[80], kv_heads=1, group=5
    )
    other = dataclasses.replace(other, batch=first.batch)
    for case in (first, other, first):
        check(case)


def replaced(case: AttentionCase, **tensors) -> AttentionCase:
    batch = {
        name: tensors.pop(name, getattr(case.batch, name))
        for name in ("query_start", "query_len", "context_len", "ancestor_masks", "block_table")
    }
    return dataclasses.replace(case, batch=TreeBatch(**batch), **tensors)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "query dtype": (TypeError, "query is", lambda c: {"query": c.query.double()}),
    "out dtype": (TypeError, "out is", lambda c: {"out": c.out.half()}),
    "cache dtype": (TypeError, "holds", lambda c: {"kv_cache": c.kv_cache.double()}),
    "layout": (ValueError, "unknown KV-cache layout", lambda c: {"layout": "neon"}),
    "layout dtype": (TypeError, "holds", lambda c: {"layout": "amx"}),
    "head_dim": (ValueError, "for this cache", lambda c: {"query": c.query[..., :32]}),
    "query rank": (ValueError, "for this cache", lambda c: {"query": c.query.flatten(1)}),
    "query stride": (
        ValueError,
        "contiguous",
        lambda c: {"query": c.query.transpose(1, 2).contiguous().transpose(1, 2)},
    ),
    "query device": (ValueError, "cache on the CPU", lambda c: {"query": c.query.to("meta")}),
    "cache device": (ValueError, "CPU", lambda c: {"kv_cache": c.kv_cache.to("meta")}),
    "out shape": (ValueError, "but out is", lambda c: {"out": c.out[:-1]}),
    "heads": (ValueError, "divide", lambda c: {"query": c.query[:, :5], "out": c.out[:, :5]}),
    "cache stride": (ValueError, "contiguous", lambda c: {"kv_cache": c.kv_cache[:, :1]}),
    "softcap": (ValueError, "softcap must be positive", lambda c: {"softcap": 0.0}),
    "window": (ValueError, "sliding_window must be", lambda c: {"sliding_window": 0}),
    "no KV heads": (ValueError, "divide", lambda c: {"kv_cache": c.kv_cache[:, :0]}),
    "context overflow": (ValueError, "context_len", lambda c: {"context_len": int32(2**31 - 9)}),
    "scale": (ValueError, "finite", lambda c: {"scale": float("nan")}),
    "start": (ValueError, "reach query row", lambda c: {"query_start": int32(4)}),
    "negative start": (ValueError, "starts at", lambda c: {"query_start": int32(-1)}),
    "no rows": (ValueError, "1 to 256", lambda c: {"query_len": int32(0)}),
    "too many rows": (ValueError, "1 to 256", lambda c: {"query_len": int32(257)}),
    "negative context": (ValueError, "context_len -1", lambda c: {"context_len": int32(-1)}),
    "long context": (ValueError, "columns", lambda c: {"context_len": int32(4000)}),
    "table dtype": (
        TypeError,
        "block_table",
        lambda c: {"block_table": c.batch.block_table.long()},
    ),
    "table rank": (ValueError, "block_table", lambda c: {"block_table": c.batch.block_table[0]}),
    "table width": (ValueError, "columns", lambda c: {"block_table": c.batch.block_table[:, :1]}),
    "block high": (ValueError, "the cache has", lambda c: {"block_table": int32(0, 99, 0)[None]}),
    "block low": (ValueError, "the cache has", lambda c: {"block_table": int32(-1, 0, 0)[None]}),
    "mask shape": (
        ValueError,
        "ancestor_masks",
        lambda c: {"ancestor_masks": c.batch.ancestor_masks[..., 0]},
    ),
    "blind row": (
        ValueError,
        "does not see itself",
        lambda c: {"ancestor_masks": torch.zeros(1, 4, 1, dtype=torch.int64)},
    ),
}


@pytest.mark.parametrize("error, message, change", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(error, message, change):
    case = make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[4], contexts=[40])
    with pytest.raises(error, match=message):
        replaced(case, **change(case)).run(tree_attention)


@pytest.mark.parametrize("name", ["query", "cache"])
def test_memory_that_is_written_and_read_is_refused(name):
    case = make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[4], contexts=[40])
    tokens, heads, head_dim = case.query.shape
    memory = case.kv_cache.view(-1) if name == "cache" else torch.zeros(10_000)
    inner = memory[: case.query.numel()].view(tokens, heads, head_dim)
    query = inner if name == "query" else case.query
    for shift in (0, 1, case.query.numel() - 1):
        out = memory[shift:][: query.numel()].view_as(query)
        with pytest.raises(ValueError, match=f"out shares memory with .*{name}"):
            tree_attention(query, case.kv_cache, out, case.batch, **case.options)
    # One after the other, and either first, they are apart.
    if name == "query":
        apart = memory[query.numel() : 2 * query.numel()].view_as(query)
        tree_attention(query, case.kv_cache, apart, case.batch, **case.options)
        tree_attention(apart, case.kv_cache, query, case.batch, **case.options)


def test_overlapping_trees_are_refused():
    case = make_case(layout="vec", dtype=torch.float32, head_dim=64, lens=[4, 4], contexts=[0, 0])
    with pytest.raises(ValueError, match="inside another"):
        replaced(case, query_start=int32(1, 4))
