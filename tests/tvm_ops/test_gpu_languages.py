"""The GPU kernels of all languages but CUDA against the references, called by their manifests.

OpenCL runs on PoCL, WGSL on any Vulkan device (lavapipe is one without a GPU), and Metal's text,
for which Linux has no compiler, as C++. Bounds are explained in tvm_ops.testing.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tvm_ops.gpu_call import Engine, ExportedKernels, build_kernels
from tvm_ops import TreeBatch
from tvm_ops.layouts import cache_shape, read_rows, write_rows
from tvm_ops.reference import compact_kv_reference, tree_attention_reference
from tvm_ops.testing import AttentionCase, chain_masks, error_and_bound, make_case, tree_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_DIMS = [64, 80, 128, 256]
RAGGED = {"lens": [1, 5, 64, 16, 2, 33], "contexts": [0, 100, 63, 200, 31, 1]}
MANY_SPLITS = 40  # more than there are tiles: some splits of a tree are empty


def make_engine(language: str, directory) -> Engine:
    if language == "metal":
        from tests.tvm_ops.metal import MetalEmulation

        return MetalEmulation(directory)
    package = {"opencl": "pyopencl", "webgpu": "wgpu"}[language]
    pytest.importorskip(package, reason=f"running {language} needs {package}")
    try:
        if language == "opencl":
            from tests.tvm_ops.opencl import OpenClEngine

            return OpenClEngine()
        from tests.tvm_ops.webgpu import WebGpuEngine

        return WebGpuEngine()
    except LookupError as error:
        pytest.skip(f"running {language} needs a device: {error}")


@pytest.fixture(scope="module", params=["opencl", "webgpu", "metal"])
def kernels(request, tmp_path_factory) -> ExportedKernels:
    """Kernels of all dtypes and head_dims, built for a language, and what runs it."""
    engine = make_engine(request.param, tmp_path_factory.mktemp("engine"))
    directory = tmp_path_factory.mktemp(request.param)
    build_kernels(request.param, list(DTYPES), HEAD_DIMS, directory)
    return ExportedKernels(directory, engine)


def case_of(**options) -> AttentionCase:
    defaults = {"layout": "strided", "dtype": torch.float32, "head_dim": 64}
    return make_case(**{**defaults, **options})


def restrided(cache: torch.Tensor, order: str) -> torch.Tensor:
    """A copy of a cache, tokens before heads (NHD) or heads first (HND), or with gaps."""
    if order == "NHD":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "gaps":
        blocks, heads, size, width = cache.shape
        wide = torch.full((blocks, heads + 1, size, width + 6), torch.nan, dtype=cache.dtype)
        part = wide[:, 1:, :, 2 : 2 + width]
        part.copy_(cache)
        return part
    return cache.clone()


def check(kernels: ExportedKernels, case: AttentionCase, splits: int = 1, empty: int = 0) -> None:
    cache = case.kv_cache.clone()
    out = kernels.attention(case, splits, empty)
    mine = tree_rows(case.batch, len(out))
    assert out[~mine].isnan().all(), "rows outside trees were written"
    assert torch.equal(cache.view(torch.uint8), case.kv_cache.contiguous().view(torch.uint8))
    if mine.any():
        error, bound = error_and_bound(case, out)
        assert error <= bound  # false for NaN as well


@pytest.mark.parametrize("splits", [1, 2, 5, MANY_SPLITS])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_variant_on_ragged_trees(kernels, dtype, head_dim, splits):
    check(kernels, case_of(dtype=dtype, head_dim=head_dim, **RAGGED), splits, empty=2)


@pytest.mark.parametrize("kv_heads, group", [(1, 1), (3, 3), (1, 8), (4, 1), (2, 7), (1, 71)])
def test_head_ratios(kernels, kv_heads, group):
    # Blocks of 16 rows that straddle tree rows, and part of one tree row.
    for splits in (1, 3):
        check(kernels, case_of(kv_heads=kv_heads, group=group, **RAGGED), splits)


@pytest.mark.parametrize("order", ["HND", "NHD", "gaps"])
@pytest.mark.parametrize("block_size", [1, 16, 32, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_block_sizes_and_strides(kernels, block_size, order, dtype):
    case = case_of(dtype=dtype, head_dim=80, block_size=block_size, **RAGGED)
    check(kernels, dataclasses.replace(case, kv_cache=restrided(case.kv_cache, order)), 2)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 200, 256])
def test_row_counts(kernels, rows):
    # Masks of one word and several; other trees of the batch are shorter than the table's rows.
    lens, contexts = [rows, 3, max(1, rows - 1)], [rows % 16, 61, 40]
    check(kernels, case_of(lens=lens, contexts=contexts, seed=rows, group=1), 1 + rows % 3)


@pytest.mark.parametrize("context", [0, 1, 30, 31, 32, 33, 63, 64, 65, 200])
def test_context_lengths(kernels, context):
    for splits in (1, 2):
        check(kernels, case_of(lens=[9], contexts=[context]), splits)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 31, 32, 33, 65, 200, 5000])
def test_sliding_window(kernels, window):
    # Windows shorter than a tree's depth hide ancestors; others end inside a tile, or see all.
    lens, contexts = [1, 5, 64, 16, 100], [0, 100, 63, 300, 200]
    for masks in (None, chain_masks(lens)):
        case = case_of(lens=lens, contexts=contexts, masks=masks, group=2)
        for splits in (1, 3):
            check(kernels, dataclasses.replace(case, sliding_window=window), splits, empty=1)


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_softcap(kernels, cap):
    case = case_of(**RAGGED)
    check(kernels, dataclasses.replace(case, softcap=cap, scale=1.0))
    check(kernels, dataclasses.replace(case, softcap=cap, sliding_window=33), 2)


@pytest.mark.parametrize("splits", [1, 3])
def test_large_logits_do_not_overflow(kernels, splits):
    # To about 800, exp overflows at 88: weights are finite only with the right maximum. Logits of
    # this size carry a rounding of their own, to 1e-4, which the usual bound does not know.
    case = dataclasses.replace(case_of(lens=[7], contexts=[200]), scale=30.0)
    out, exact = kernels.attention(case, splits), torch.empty_like(case.out)
    tree_attention_reference(
        case.query, case.kv_cache, exact, case.batch, **case.options, compute_dtype=torch.float64
    )
    torch.testing.assert_close(out[1:8], exact[1:8], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_random_mixtures(kernels, seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    trees = pick(1, 3, 6)
    case = case_of(
        dtype=pick(*DTYPES.values()),
        head_dim=pick(64, 80, 128),
        lens=[pick(1, 2, 7, 24, 40, 64) for _ in range(trees)],
        contexts=[pick(0, 1, 31, 33, 90, 257) for _ in range(trees)],
        kv_heads=pick(1, 2, 3),
        group=pick(1, 3, 8),
        block_size=pick(16, 32, 48),
        seed=seed,
    )
    case = dataclasses.replace(
        case,
        kv_cache=restrided(case.kv_cache, pick("HND", "NHD", "gaps")),
        softcap=pick(None, 20.0),
        sliding_window=pick(None, 3, 40),
    )
    check(kernels, case, pick(1, 2, 5, MANY_SPLITS), pick(0, 2))


def test_no_trees(kernels):
    for splits in (1, 2):
        check(kernels, case_of(lens=[], contexts=[]), splits, empty=3)


def poisoned(case: AttentionCase, position: int, key: float | None, value: float | None) -> None:
    """Overwrite one token of the first tree: all of its key and value, or what is not None."""
    size = case.kv_cache.shape[2]
    slot = case.batch.block_table[0, position // size].long().view(1) * size + position % size
    keys, values = read_rows(case.kv_cache, case.layout, slot)
    keys = keys if key is None else torch.full_like(keys, key)
    values = values if value is None else torch.full_like(values, value)
    write_rows(case.kv_cache, case.layout, slot, keys, values)


FORK = torch.tensor([0b00001, 0b00011, 0b00101, 0b01101, 0b10011]).view(1, 5, 1)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_unseen_row_has_no_influence(kernels, dtype, poison, splits):
    # Row 2's own key and value are poisoned. Row 3 is its child, rows 0, 1 and 4 don't see it.
    case = case_of(dtype=dtype, lens=[5], contexts=[70], masks=FORK)
    clean = kernels.attention(case, splits)
    poisoned(case, 72, poison, poison)
    dirty = kernels.attention(case, splits)
    assert torch.equal(dirty[[1, 2, 5]], clean[[1, 2, 5]])
    assert dirty[[3, 4]].isnan().any(-1).all(), "bad data that a row does see was hidden"


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_seen_nan_key_is_not_hidden(kernels, softcap):
    case = dataclasses.replace(case_of(lens=[5], contexts=[70], masks=FORK), softcap=softcap)
    poisoned(case, 72, torch.nan, None)
    out = kernels.attention(case)
    assert not out[[1, 2, 5]].isnan().any()
    assert out[[3, 4]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_infinite_values_reach_the_output(kernels, dtype):
    case = case_of(dtype=dtype, lens=[5], contexts=[70], masks=FORK)
    for splits, value in ((1, torch.inf), (2, -torch.inf)):
        poisoned(case, 72, None, value)
        out = kernels.attention(case, splits)
        assert (out[[3, 4]] == value).all()
        assert out[[1, 2, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_passes_unchanged(kernels, dtype):
    # A row that sees one key returns its value: all bit patterns, among them subnormals.
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    trees, kv_heads = 32, 32
    case = case_of(dtype=dtype, lens=[1] * trees, contexts=[0] * trees, kv_heads=kv_heads, group=1)
    values = patterns.view(trees, kv_heads, 64)
    slots = case.batch.block_table[:, 0].long() * case.kv_cache.shape[2]
    write_rows(case.kv_cache, case.layout, slots, torch.zeros_like(values), values)
    for splits in (1, 2):
        out = kernels.attention(case, splits)[case.batch.query_start.long()]
        assert torch.equal(out.isnan(), values.isnan())
        assert torch.equal(out.nan_to_num(7.0), values.nan_to_num(7.0))


def test_rounding_is_to_nearest_even(kernels):
    # Two keys with equal logits: the output is the mean of their values, often a tie.
    batch_masks = chain_masks([2])
    for dtype in (torch.float16, torch.bfloat16):
        case = case_of(dtype=dtype, lens=[2], contexts=[0], masks=batch_masks, kv_heads=1, group=1)
        case.query.zero_()
        slots = case.batch.block_table[0, :1].long() * case.kv_cache.shape[2] + torch.arange(2)
        low = (torch.arange(64, dtype=torch.int16) * 37).view(dtype)
        high = (torch.arange(64, dtype=torch.int16) * 37 + 1).view(dtype)
        values = torch.stack([low, high])[:, None]
        write_rows(case.kv_cache, case.layout, slots, torch.zeros_like(values), values)
        out = kernels.attention(case)[int(case.batch.query_start[0]) + 1, 0]
        assert torch.equal(out, ((low.float() + high.float()) / 2).to(dtype))


def test_several_layers_share_a_batch(kernels):
    first = case_of(lens=[9, 4], contexts=[80, 3])
    other = case_of(lens=[9, 4], contexts=[80, 3], kv_heads=1, group=5)
    check(kernels, first)
    check(kernels, dataclasses.replace(other, batch=TreeBatch(*batch_tensors(first.batch))))


def batch_tensors(batch: TreeBatch) -> tuple[torch.Tensor, ...]:
    return (
        batch.query_start,
        batch.query_len,
        batch.context_len,
        batch.ancestor_masks,
        batch.block_table,
    )


@pytest.mark.parametrize("order", ["HND", "NHD", "gaps"])
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_moves_are_sequential(kernels, dtype, head_dim, order):
    # Many moves among few slots: sources that were targets before, and the reverse.
    generator = torch.Generator().manual_seed(head_dim)
    kv_heads, block_size, num_blocks = 3, 16, 3
    shape = cache_shape(num_blocks, kv_heads, block_size, head_dim)
    cache = restrided(torch.randn(shape, generator=generator).to(dtype), order)
    source, target = torch.randint(num_blocks * block_size, (2, 60), generator=generator)
    expected = cache.clone()
    compact_kv_reference([expected], "strided", source, target)
    kernels.compact(cache, source.tolist(), target.tolist())
    assert torch.equal(cache, expected)


def test_accepted_path_and_idle_moves(kernels):
    # A chain that overlaps itself; a source of -1 makes no move, as CUDA graphs need.
    cache = torch.randn(cache_shape(4, 2, 16, 64))
    expected = cache.clone()
    source, target = [31, 33, 34, 35, 40], [30, 31, 32, 33, 34]
    compact_kv_reference([expected], "strided", torch.tensor(source), torch.tensor(target))
    kernels.compact(cache, [-1, *source, -1], [5, *target, 0])
    assert torch.equal(cache, expected)
    kernels.compact(cache, [], [])
    assert torch.equal(cache, expected)
