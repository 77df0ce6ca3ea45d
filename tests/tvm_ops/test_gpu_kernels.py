"""The CUDA kernels against the references: their source, run on the CPU (emulated_cuda.py)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tvm_ops.emulated_cuda import EmulatedDriver, emulated_program
from tvm_ops import KVCacheGroup, TreeBatch, TreeTables, compact_kv, tree_attention
from tvm_ops.artifact import KernelSpec
from tvm_ops.gpu import attention, compaction
from tvm_ops.gpu.launch import LoadedProgram
from tvm_ops.reference import compact_kv_reference
from tvm_ops.testing import AttentionCase, chain_masks, error_and_bound, make_case, tree_rows

RAGGED = {"lens": [1, 5, 64, 16, 2, 33], "contexts": [0, 100, 63, 300, 64, 31]}
BFLOAT16 = {"dtype": torch.bfloat16, "head_dim": 64}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Emulator:
    """Takes the place of cuda_program; keeps the programs it built."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.programs: dict[KernelSpec, tuple[LoadedProgram, EmulatedDriver]] = {}

    def program(self, spec: KernelSpec, device: torch.device) -> LoadedProgram:
        if spec not in self.programs:
            folder = self.directory / spec.stem
            folder.mkdir()
            self.programs[spec] = emulated_program(spec, folder)
        return self.programs[spec][0]

    def launches(self) -> list[str]:
        """Names of the kernels launched since the last call."""
        names = []
        for _, driver in self.programs.values():
            names += driver.launches[driver.reported :]
            driver.reported = len(driver.launches)
        return names


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def gpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setattr(attention, "cuda_program", emulator.program)
    monkeypatch.setattr(compaction, "cuda_program", emulator.program)
    monkeypatch.setattr(attention, "num_processors", lambda device: 1)
    emulator.launches()
    yield emulator


def tables_for(case: AttentionCase, *, spare: int = 0, fixed_grid: bool = False) -> TreeTables:
    """Tables that hold the case's batch, larger by `spare` in every respect."""
    batch = case.batch
    tables = TreeTables(
        "cpu",
        num_blocks=case.kv_cache.shape[0],
        block_size=case.kv_cache.shape[2],
        max_trees=len(batch) + spare,
        max_rows=batch.ancestor_masks.shape[1] + spare,
        max_blocks=batch.block_table.shape[1] + spare,
        windows=(case.sliding_window,),
        fixed_grid=fixed_grid,
    )
    tables.update(batch)
    return tables


def check(case: AttentionCase, gpu: Emulator, tables: TreeTables | None = None) -> list[str]:
    """Compare with the reference; names of the kernels that ran."""
    tables = tables or tables_for(case)
    out = case.out.clone()
    tree_attention(case.query, case.kv_cache, out, tables, **case.options)
    mine = tree_rows(case.batch, len(out))
    error, bound = error_and_bound(case, out)
    assert error <= bound  # false for NaN as well
    assert out[~mine].isnan().all(), "rows outside trees were written"
    names = gpu.launches()
    assert "tree_attention" in names, "something else than the kernel ran"
    return names


def case_of(**changes: object) -> AttentionCase:
    return make_case(**{"layout": "strided", **BFLOAT16, **RAGGED, **changes})


@pytest.mark.parametrize(
    "dtype, head_dim",
    [*itertools.product(DTYPES, [64]), *itertools.product([torch.bfloat16], [80, 96, 128, 256])],
)
def test_every_variant_on_ragged_trees(dtype, head_dim, gpu):
    # 64: one split; 80, 96: steps of 16 that are no power of two; 256: two warps share a row.
    check(case_of(dtype=dtype, head_dim=head_dim), gpu)


def test_a_head_dim_without_tensor_core_tile_runs_on_plain_threads(gpu):
    case = case_of(head_dim=144, lens=[5], contexts=[40])
    check(case, gpu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("processors", [1, 60, 300])
def test_splits_over_the_context(dtype, processors, gpu, monkeypatch):
    # Sequences with fewer tiles than splits, down to none, beside one with many.
    monkeypatch.setattr(attention, "num_processors", lambda device: processors)
    case = case_of(dtype=dtype, lens=[3, 1, 40], contexts=[700, 0, 65])
    assert ("combine" in check(case, gpu)) == (processors > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fixed_grid_with_empty_trees(dtype, gpu, monkeypatch):
    monkeypatch.setattr(attention, "num_processors", lambda device: 300)
    case = case_of(dtype=dtype)
    tables = tables_for(case, spare=3, fixed_grid=True)
    assert "combine" in check(case, gpu, tables)
    # The same tables, fewer and smaller trees: nothing of the old batch is left.
    scratch = tables.scratch(1).data_ptr()
    rows = case.batch.ancestor_masks[1:4, :16] & 0xFFFF
    fewer = TreeBatch(
        case.batch.query_start[1:4],
        torch.tensor([5, 16, 16], dtype=torch.int32),
        torch.tensor([100, 63, 300], dtype=torch.int32),
        rows.contiguous(),
        case.batch.block_table[1:4],
    )
    tables.update(fewer)
    check(dataclasses.replace(case, batch=fewer), gpu, tables)
    assert tables.scratch(1).data_ptr() == scratch, "a captured graph would use freed memory"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads, group", [(1, 1), (3, 3), (1, 8), (4, 1), (2, 7), (1, 71)])
def test_head_ratios(dtype, kv_heads, group, gpu):
    check(case_of(dtype=dtype, kv_heads=kv_heads, group=group), gpu)


@pytest.mark.parametrize("block_size", [1, 16, 24, 48, 256])
def test_block_sizes(block_size, gpu):
    check(case_of(block_size=block_size), gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 47, 63, 64, 65, 129, 256])
def test_row_counts_and_mask_words(dtype, rows, gpu):
    check(case_of(dtype=dtype, lens=[rows, 3], contexts=[130, 31], seed=rows), gpu)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 511])
def test_context_lengths(context, gpu):
    check(case_of(lens=[9], contexts=[context]), gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 5, 31, 64, 65, 200, 5000])
@pytest.mark.parametrize("shape", ["trees", "chains"])
def test_sliding_window(dtype, window, shape, gpu, monkeypatch):
    monkeypatch.setattr(attention, "num_processors", lambda device: 30)
    lens, contexts = [1, 5, 64, 100], [0, 100, 63, 400]
    masks = chain_masks(lens) if shape == "chains" else None
    case = case_of(dtype=dtype, lens=lens, contexts=contexts, masks=masks)
    check(dataclasses.replace(case, sliding_window=window), gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_softcap(dtype, cap, gpu):
    case = case_of(dtype=dtype)
    large = dataclasses.replace(case, query=case.query * 20)
    for chosen in (case, large):
        check(dataclasses.replace(chosen, softcap=cap), gpu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_a_row_does_not_see_has_no_influence(dtype, value, gpu):
    # Row 1 of 3 holds a special value; row 2 is its sibling, row 0 their parent.
    masks = torch.tensor([0b001, 0b011, 0b101]).view(1, 3, 1)
    case = case_of(dtype=dtype, lens=[3], contexts=[70], masks=masks)
    out = case.out.clone()
    tables = tables_for(case)
    tree_attention(case.query, case.kv_cache, out, tables, **case.options)
    block = int(case.batch.block_table[0, 71 // 32])
    case.kv_cache[block, :, 71 % 32] = value
    again = case.out.clone()
    tree_attention(case.query, case.kv_cache, again, tables, **case.options)
    assert torch.equal(out[[1, 3]].float(), again[[1, 3]].float()) or (
        (out[[1, 3]] - again[[1, 3]]).abs().max() <= 2**-6
    )
    assert not again[2].isfinite().all(), "the row that sees the value must show it"


@pytest.mark.parametrize("order", ["NHD", "HND", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_of_the_cache(order, dtype, gpu):
    case = case_of(dtype=dtype)
    cache = case.kv_cache
    if order == "NHD":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    elif order == "padded":
        wide = torch.full((*cache.shape[:3], cache.shape[3] + 8), torch.nan, dtype=dtype)
        wide[..., : cache.shape[3]] = cache
        cache = wide[..., : cache.shape[3]]
    assert (order == "HND") == cache.is_contiguous()
    check(dataclasses.replace(case, kv_cache=cache), gpu)


def test_no_trees_launch_nothing(gpu):
    case = case_of(lens=[], contexts=[])
    tree_attention(
        case.query, case.kv_cache, case.out.clone(), tables_for(case, spare=1), **case.options
    )
    assert gpu.launches() == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_compaction_moves_in_order(dtype, order, gpu):
    generator = torch.Generator().manual_seed(3)
    shape = (6, 2, 8, 160)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    if order == "NHD":
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    expected = [cache.clone() for cache in caches]
    group = KVCacheGroup(caches, "strided")
    for _ in range(20):
        count = int(torch.randint(0, 9, (1,), generator=generator))
        source, target = torch.randint(48, (2, count), generator=generator)
        source, target = source.contiguous(), target.contiguous()
        compact_kv(group, source, target)
        compact_kv_reference(expected, "strided", source, target)
        for cache, wanted in zip(caches, expected, strict=True):
            assert torch.equal(cache, wanted)
    assert gpu.launches().count("compact_kv") > 10


def test_compaction_skips_moves_without_source(gpu):
    cache = torch.randn(4, 2, 8, 32)
    group = KVCacheGroup([cache], "strided")
    expected = cache.clone()
    source, target = torch.tensor([9, -1, 20]), torch.tensor([3, 4, 9])
    compact_kv_reference([expected], "strided", source[[0, 2]], target[[0, 2]])
    compaction.gpu_compact_kv(group.spec, cache, group.addresses, source, target)
    assert torch.equal(cache, expected)
