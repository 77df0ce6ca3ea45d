"""Cache layouts against vLLM's own write op, and against a layout written out by hand."""

from __future__ import annotations

import pytest
import torch

from tvm_ops import LAYOUTS, check_layout
from tvm_ops.layouts import cache_shape, check_cache, find_layout, read_rows, write_rows

# (vLLM isa, dtype, head_dim, block size): every kind that its CPU backend may choose on x86.
HOST_KINDS = [
    ("vec", torch.float32, 64, 32),
    ("vec", torch.bfloat16, 128, 32),
    ("vec", torch.bfloat16, 64, 128),
    ("vec", torch.float16, 96, 64),
    ("vec", torch.float32, 256, 256),
    ("vec16", torch.float32, 80, 32),
    ("vec16", torch.bfloat16, 112, 64),
    ("vec16", torch.float16, 64, 16),
    ("vec16", torch.bfloat16, 64, 48),
    ("amx", torch.bfloat16, 64, 32),
    ("amx", torch.bfloat16, 96, 64),
    ("amx", torch.bfloat16, 128, 128),
]


@pytest.fixture(scope="module")
def host():
    """vLLM's op, called as its CPU attention backend calls it, for one isa."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def writer(isa):
        def write(keys, values, cache, slots):
            num_blocks, heads, block_size, width = cache.shape
            view = cache.view(num_blocks, heads, 2 * block_size, width // 2)
            ops.cpu_attn_reshape_and_cache(keys, values, *view.chunk(2, dim=2), slots, isa)

        return write

    return writer


@pytest.mark.parametrize("isa, dtype, head_dim, block_size", HOST_KINDS)
def test_host_writes_what_we_read(host, isa, dtype, head_dim, block_size):
    check_layout(host(isa), isa, dtype, head_dim=head_dim, block_size=block_size)


def test_probe_refuses_another_layout(host):
    with pytest.raises(RuntimeError, match="does not write keys and values in layout 'amx'"):
        check_layout(host("vec"), "amx", torch.bfloat16, head_dim=64, block_size=32)


def test_probe_names_what_is_wrong():
    def only_keys(keys, values, cache, slots):
        write_rows(cache, "vec", slots, keys, torch.zeros_like(values))

    with pytest.raises(RuntimeError, match="does not write values in layout 'vec'"):
        check_layout(only_keys, "vec", torch.float32, head_dim=32, block_size=32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_where_the_module_says(layout):
    # By index arithmetic on the raw memory of one (block, head), apart from torch views.
    head_dim, block_size, kv_heads = 32, 64, 2
    cache = torch.arange(2 * kv_heads * block_size * 2 * head_dim, dtype=torch.float32)
    if LAYOUTS[layout].memory == "amx":
        cache = cache % 256  # exact in bfloat16
    cache = cache.view(cache_shape(2, kv_heads, block_size, head_dim)).to(LAYOUTS[layout].dtypes[0])
    slot = block_size + 37
    keys, values = read_rows(cache, layout, torch.tensor([slot]))
    offset, half = slot % block_size, block_size * head_dim
    for head in range(kv_heads):
        memory = cache[slot // block_size, head].flatten()
        for dim in range(head_dim):
            if layout == "strided":
                k = offset * 2 * head_dim + dim
                v = k + head_dim
            elif LAYOUTS[layout].memory == "vec":
                k = dim * block_size + offset
                v = half + offset * head_dim + dim
            else:
                k = ((offset // 16 * head_dim // 2 + dim // 2) * 16 + offset % 16) * 2 + dim % 2
                v = (dim // 16 * block_size // 2 + offset // 2) * 32 + dim % 16 * 2 + offset % 2
                v += half
            assert keys[0, head, dim] == memory[k]
            assert values[0, head, dim] == memory[v]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_touches_only_its_slots(layout):
    dtype = LAYOUTS[layout].dtypes[0]
    cache = torch.zeros(cache_shape(3, 2, 32, 32), dtype=dtype)
    slots = torch.tensor([5, 70, 31])
    rows = torch.ones(3, 2, 32, dtype=dtype)
    write_rows(cache, layout, slots, rows, 2 * rows)
    keys, values = read_rows(cache, layout, torch.arange(96))
    written = torch.zeros(96, dtype=torch.bool)
    written[slots] = True
    assert (keys[written] == 1).all() and (values[written] == 2).all()
    assert not keys[~written].any() and not values[~written].any()


@pytest.mark.parametrize(
    "layout, cache, error, message",
    [
        ("vec", torch.zeros(1, 1, 32, 64, dtype=torch.int8), TypeError, "holds"),
        ("amx", torch.zeros(1, 1, 32, 64, dtype=torch.half), TypeError, "holds"),
        ("amx", torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16), ValueError, "block size"),
        ("vec", torch.zeros(1, 1, 24, 64), ValueError, "block size"),
        ("vec", torch.zeros(1, 1, 32, 16), ValueError, "head_dim"),
        ("vec", torch.zeros(1, 32, 64), ValueError, "contiguous cache"),
        ("vec", torch.zeros(1, 32, 2, 64).transpose(1, 2), ValueError, "contiguous cache"),
        ("vec", torch.zeros(1, 1, 32, 64, device="meta"), ValueError, "on the CPU"),
    ],
)
def test_wrong_caches_are_refused(layout, cache, error, message):
    with pytest.raises(error, match=message):
        check_cache(cache, find_layout(layout))
