"""The AMX kernel: run here with tile instructions emulated, compiled for real, run where it can.

Emulated kernels are called by tree_attention in place of this machine's own, so that all but the
instructions themselves is what serves.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tvm_ops.test_targets import disassembly
from tvm_ops import tree_attention
from tvm_ops.artifact import PACKAGE, KernelSpec, artifact_path
from tvm_ops.layouts import read_rows, write_rows
from tvm_ops.load import attention_spec, ensure_compiled, kernel
from tvm_ops.targets import TARGETS, cpu_flags, host_target
from tvm_ops.testing import AttentionCase, chain_masks, error_and_bound, make_case, tree_rows

# Two even numbers of 32-dimension steps, and one that ends with half a step. AMX_TEST_HEAD_DIMS
# tests others, which take their time to compile.
HEAD_DIMS = [int(d) for d in os.environ.get("AMX_TEST_HEAD_DIMS", "64 80 128").split()]
SMALL = HEAD_DIMS[0]
RAGGED = {"lens": [1, 5, 64, 16, 2, 33], "contexts": [0, 100, 63, 500, 64, 31]}
LDTILECFG, TILERELEASE, TDPBF16PS = 0, 1, 5

needs_avx512 = pytest.mark.skipif(
    not TARGETS["x86-64-v4"].flags <= cpu_flags(),
    reason="the rest of the AMX kernel is AVX-512 code",
)


@pytest.fixture(scope="module")
def emulation(tmp_path_factory) -> Path:
    """The emulation's library, and beside it a kernel per head_dim that calls it."""
    directory = tmp_path_factory.mktemp("amx")
    library = directory / "emulation.so"
    source = Path(__file__).with_name("amx_emulation.c")
    options = ["-std=gnu11", "-O3", "-march=x86-64-v4", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["gcc", *options, str(source), "-o", str(library)], check=True)
    command = [sys.executable, "-m", "tests.tvm_ops.emulated_amx", str(library), str(directory)]
    children = [
        subprocess.Popen([*command, str(d)], cwd=PACKAGE.parent, stderr=subprocess.PIPE, text=True)
        for d in HEAD_DIMS
    ]
    for child in children:
        _, messages = child.communicate()
        assert child.returncode == 0, messages
    return library


@pytest.fixture
def emulated(emulation, monkeypatch) -> ctypes.CDLL:
    """Has tree_attention run emulated kernels; the emulation itself."""
    import tvm_ffi

    launcher_user = KernelSpec("compact_kv", "amx", "uint16")
    kernel(launcher_user)  # any kernel of ours binds the launcher
    spec_kernels: dict[KernelSpec, Callable[..., None]] = {}

    def emulated_kernel(spec: KernelSpec) -> Callable[..., None]:
        if spec not in spec_kernels:
            assert (spec.op, spec.memory, spec.dtype) == ("tree_attention", "amx", "bfloat16")
            module = tvm_ffi.load_module(str(emulation.with_name(f"{spec.head_dim}.so")))
            spec_kernels[spec] = module["tree_attention"]
        return spec_kernels[spec]

    monkeypatch.setattr("tvm_ops.attention.kernel", emulated_kernel)
    library = ctypes.CDLL(str(emulation))
    for function in (library.emulated_configured, library.emulated_count):
        function.restype = ctypes.c_long
    return library


def amx_case(head_dim: int = SMALL, **changes) -> AttentionCase:
    return make_case(layout="amx", dtype=torch.bfloat16, head_dim=head_dim, **changes)


def check(case: AttentionCase, emulated: ctypes.CDLL | None) -> torch.Tensor:
    if emulated is not None:
        emulated.emulated_count(TDPBF16PS)
    out = case.run(tree_attention)
    error, bound = error_and_bound(case, out)
    assert error <= bound  # false for NaN as well
    assert out[~tree_rows(case.batch, len(out))].isnan().all(), "rows outside trees were written"
    if emulated is not None:
        assert emulated.emulated_count(TDPBF16PS) > 0, "something else than the AMX kernel ran"
        assert emulated.emulated_configured() == 0, "a thread kept its tiles"
    return out


@needs_avx512
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_ragged_trees(head_dim, threads, emulated):
    # Two threads split keys at multiples of 64, half of what the kernel handles at a time.
    check(amx_case(head_dim, **RAGGED), emulated)


@needs_avx512
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_row_count(head_dim, emulated):
    # Of one tree each, then heads of a group; every height of the last row tile.
    lens = list(range(1, 65))
    contexts = [37 * n % 150 for n in lens]
    check(amx_case(head_dim, lens=lens, contexts=contexts, kv_heads=1, group=1), emulated)


@needs_avx512
@pytest.mark.parametrize("kv_heads, group", [(2, 1), (1, 3), (2, 4), (1, 8), (1, 71)])
def test_head_ratios(kv_heads, group, threads, emulated):
    check(amx_case(kv_heads=kv_heads, group=group, **RAGGED), emulated)


@needs_avx512
@pytest.mark.parametrize("block_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_block_sizes(head_dim, block_size, emulated):
    check(amx_case(head_dim, block_size=block_size, group=1, **RAGGED), emulated)


@needs_avx512
@pytest.mark.parametrize("context", [0, 1, 31, 33, 127, 128, 129, 500])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_context_lengths(head_dim, rows, context, emulated):
    check(amx_case(head_dim, lens=[rows], contexts=[context]), emulated)


@needs_avx512
@pytest.mark.parametrize("rows", [65, 127, 128, 200, 256])
def test_masks_of_several_words(rows, threads, emulated):
    lens, contexts = [rows, 3, 64, rows - 1], [rows % 16, 61, 7, 130]
    check(amx_case(lens=lens, contexts=contexts, kv_heads=1), emulated)


@needs_avx512
@pytest.mark.parametrize("window", [1, 5, 63, 65, 200, 5000])
def test_sliding_window(window, threads, emulated):
    sizes = {"lens": [1, 5, 64, 16, 100], "contexts": [0, 100, 63, 500, 200], "kv_heads": 1}
    for masks in (None, chain_masks(sizes["lens"])):
        case = amx_case(masks=masks, **sizes)
        check(dataclasses.replace(case, sliding_window=window), emulated)


@needs_avx512
@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_softcap(cap, emulated):
    case = amx_case(kv_heads=1, **RAGGED)
    check(dataclasses.replace(case, softcap=cap, scale=1.0), emulated)
    check(dataclasses.replace(case, softcap=cap, sliding_window=33), emulated)


@needs_avx512
def test_a_rising_maximum_rescales_sums(threads, emulated):
    # Every 20 keys the logits go up: what was summed before counts less and less.
    case = amx_case(lens=[20, 40], contexts=[500, 300], kv_heads=1, group=1)
    for t, context in enumerate(case.batch.context_len.tolist()):
        position = torch.arange(context)
        slots = case.batch.block_table[t, position // 32].long() * 32 + position % 32
        keys, values = read_rows(case.kv_cache, "amx", slots)
        start = int(case.batch.query_start[t])
        keys += (position / 200).view(-1, 1, 1) * case.query[start : start + 1]
        write_rows(case.kv_cache, "amx", slots, keys.bfloat16(), values)
    check(case, emulated)


@needs_avx512
@pytest.mark.parametrize("scale", [-0.125, 0.0])
def test_scales_that_are_not_positive(scale, emulated):
    check(dataclasses.replace(amx_case(kv_heads=1, **RAGGED), scale=scale), emulated)


@needs_avx512
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("context", [70, 126, 500])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unseen_row_has_no_influence(head_dim, context, poison, threads, emulated):
    # Row 2's own key and value are poisoned. Row 3 is its child, rows 0, 1 and 4 don't see it.
    masks = torch.zeros(1, 5, 1, dtype=torch.int64)
    masks[0, :, 0] = torch.tensor([0b00001, 0b00011, 0b00101, 0b01101, 0b10011])
    case = amx_case(head_dim, lens=[5], contexts=[context], masks=masks, group=4)
    clean = case.run(tree_attention)
    position = context + 2
    slot = case.batch.block_table[0, position // 32].long().view(1) * 32 + position % 32
    keys, values = read_rows(case.kv_cache, "amx", slot)
    write_rows(
        case.kv_cache, "amx", slot, torch.full_like(keys, poison), torch.full_like(values, poison)
    )
    dirty = case.run(tree_attention)
    assert torch.equal(dirty[[1, 2, 5]], clean[[1, 2, 5]])
    assert dirty[[3, 4]].isnan().any(-1).all(), "bad data that a row does see was hidden"


@needs_avx512
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_token_before_the_window_has_no_influence(poison, threads, emulated):
    case = dataclasses.replace(amx_case(lens=[6], contexts=[400]), sliding_window=150)
    clean = case.run(tree_attention)
    slot = case.batch.block_table[0, 245 // 32].long().view(1) * 32 + 245 % 32
    keys, values = (torch.full_like(x, poison) for x in read_rows(case.kv_cache, "amx", slot))
    write_rows(case.kv_cache, "amx", slot, keys, values)
    dirty = case.run(tree_attention)
    assert torch.equal(dirty[1:7], clean[1:7]) and clean[1:7].isfinite().all()


@needs_avx512
def test_infinite_values_that_all_rows_see(emulated):
    # As in the reference: infinite, with the value's sign, in that dimension alone.
    case = amx_case(lens=[6], contexts=[300], kv_heads=1, group=1)
    slots = case.batch.block_table[0, :1].long() * 32 + 7
    keys, values = read_rows(case.kv_cache, "amx", slots)
    values[0, 0, 3], values[0, 0, 5] = torch.inf, -torch.inf
    write_rows(case.kv_cache, "amx", slots, keys, values)
    out = case.run(tree_attention)[1:7, 0]
    assert (out[:, 3] == torch.inf).all() and (out[:, 5] == -torch.inf).all()
    assert out.isfinite().sum() == out.numel() - 2 * len(out)


@needs_avx512
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_infinite_keys_as_in_the_reference(head_dim, emulated):
    # Minus infinity in logits hides a key, in the last dimensions as well, where a product that was
    # filled up with 0 * infinity would be NaN.
    case = amx_case(head_dim, lens=[4], contexts=[200], kv_heads=1, group=1)
    case.query.abs_()
    dims = 0, head_dim // 2, head_dim - 16, head_dim - 1
    for dim, position in zip(dims, (3, 40, 150, 199), strict=True):
        slot = case.batch.block_table[0, position // 32].long().view(1) * 32 + position % 32
        keys, values = read_rows(case.kv_cache, "amx", slot)
        keys[0, 0, dim] = -torch.inf
        write_rows(case.kv_cache, "amx", slot, keys, values)
    check(case, emulated)


@needs_avx512
@pytest.mark.skipif(64 not in HEAD_DIMS, reason="counts tiles of head_dim 64")
@pytest.mark.parametrize(
    "keys, products",
    [
        # Keys are counted in tiles of 16, rounded up to 64, by 2 of dimensions in scores, and in
        # tiles of 32 by 4 of dimensions in sums.
        (256, 16 * 2 + 8 * 4),
        (255, 16 * 2 + 8 * 4),
        (130, 12 * 2 + 5 * 4),
        (33, 4 * 2 + 2 * 4),
    ],
)
@pytest.mark.parametrize("threads", [1], indirect=True)  # two would split the keys
def test_no_tile_is_multiplied_in_vain(keys, products, threads, emulated):
    # Nor is a tile left to vectors because of what unwritten slots hold.
    case = amx_case(64, lens=[1], contexts=[keys - 1], kv_heads=1, group=1)
    for counter in (LDTILECFG, TILERELEASE, TDPBF16PS):
        emulated.emulated_count(counter)
    case.run(tree_attention)
    assert emulated.emulated_count(TDPBF16PS) == products
    assert emulated.emulated_count(LDTILECFG) == emulated.emulated_count(TILERELEASE) == 1


@pytest.mark.skipif(host_target().machine != "x86_64", reason="links for x86-64")
def test_the_real_kernel_is_made_of_tile_instructions(tmp_path):
    spec = attention_spec("amx", torch.bfloat16, 16)
    command = [sys.executable, "-m", "tvm_ops.compile", "--target", "sapphirerapids", "--out"]
    done = subprocess.run(
        [*command, str(tmp_path), str(spec)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    code = disassembly(tmp_path / f"{spec.stem}.so")
    for name in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert re.search(rf"\t{name}\b", code), f"no {name}"
    assert "%zmm" in code
    # Of Sapphire Rapids' instructions, what /proc/cpuinfo was not asked for.
    assert not re.search(r"\t(vdpbf16ps|vcvtne2?ps2|vcvtph2psx|vp(compress|expand)[bw])", code)


@pytest.mark.skipif(
    "amx_bf16" not in cpu_flags(), reason="this processor has no AMX (amx_bf16 in /proc/cpuinfo)"
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_on_real_tiles(head_dim, threads):
    if host_target().name != "sapphirerapids":
        pytest.skip("Linux does not let this process use AMX")
    spec = attention_spec("amx", torch.bfloat16, head_dim)
    ensure_compiled([spec])
    assert re.search(r"\ttdpbf16ps\b", disassembly(artifact_path(spec)))
    check(amx_case(head_dim, **RAGGED), None)
    check(dataclasses.replace(amx_case(head_dim, **RAGGED), softcap=5.0, sliding_window=33), None)
    check(amx_case(head_dim, lens=list(range(1, 65)), contexts=[70] * 64, group=1), None)
