"""compact_kv moves bits, so results equal the reference exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from tvm_ops import KVCacheGroup, compact_kv
from tvm_ops.layouts import cache_shape
from tvm_ops.reference import compact_kv_reference


def make_caches(layout, dtype, layers=2, kv_heads=2, block_size=32, head_dim=32, num_blocks=3):
    generator = torch.Generator().manual_seed(0)
    shape = cache_shape(num_blocks, kv_heads, block_size, head_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(layers)]


def check(layout, caches, src, dst) -> None:
    src, dst = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    expected = [cache.clone() for cache in caches]
    compact_kv_reference(expected, layout, src, dst)
    compact_kv(KVCacheGroup(caches, layout), src, dst)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache, other)


def test_every_accepted_path_of_a_small_tree(cache_kind):
    # All ascending paths through 5 nodes, at a place where they cross a block border: these are
    # the moves of an accepted path, whose sources may be later destinations.
    for length in range(1, 6):
        for path in itertools.combinations(range(1, 6), length):
            base = 29
            src = [base + node for node in path]
            check(
                cache_kind[0], make_caches(*cache_kind), src, [base + 1 + i for i in range(length)]
            )


def test_moves_are_sequential(cache_kind):
    # A slot read after it was written carries the new row: 5 -> 6 -> 7 copies row 5 twice.
    check(cache_kind[0], make_caches(*cache_kind), [5, 6, 70, 7, 3], [6, 7, 5, 70, 3])


@pytest.mark.parametrize(
    "layout, kv_heads, block_size, head_dim, layers",
    [("vec", 1, 16, 80, 1), ("vec", 5, 64, 16, 3), ("vec16", 3, 48, 112, 2), ("amx", 3, 64, 96, 4)],
)
def test_shapes(layout, kv_heads, block_size, head_dim, layers, threads):
    dtype = torch.bfloat16
    caches = make_caches(layout, dtype, layers, kv_heads, block_size, head_dim)
    generator = torch.Generator().manual_seed(1)
    src, dst = torch.randint(3 * block_size, (2, 40), generator=generator).tolist()
    check(layout, caches, src, dst)


def test_layers_that_share_a_cache_count_once():
    # Sequential moves applied twice give another result than applied once.
    (cache,) = make_caches("vec", torch.float32, layers=1)
    expected = cache.clone()
    src, dst = torch.tensor([0, 1]), torch.tensor([1, 0])
    compact_kv_reference([expected], "vec", src + 3, dst + 4)
    compact_kv(KVCacheGroup([cache, cache], "vec"), src + 3, dst + 4)
    assert torch.equal(cache, expected)
    assert len(KVCacheGroup([cache, cache], "vec").caches) == 1


def test_no_moves():
    caches = make_caches("vec", torch.float32)
    before = [cache.clone() for cache in caches]
    empty = torch.empty(0, dtype=torch.int64)
    compact_kv(KVCacheGroup(caches, "vec"), empty, empty)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    "src, dst, error, message",
    [
        (slots(1).int(), slots(1), TypeError, "src_slots must be torch.int64"),
        (slots(1), slots(1).float(), TypeError, "dst_slots must be torch.int64"),
        (slots(1, 2), slots(1), ValueError, "2 source slots but 1"),
        (slots(1)[None], slots(1), ValueError, "vector"),
        (slots(1, 2, 3, 4)[::2], slots(1, 2), ValueError, "contiguous"),
        (slots(96), slots(1), ValueError, "src_slots spans"),
        (slots(1), slots(-1), ValueError, "dst_slots spans"),
        (slots(1).to("meta"), slots(1), ValueError, "on the CPU"),
    ],
)
def test_wrong_slots_are_refused(src, dst, error, message):
    caches = KVCacheGroup(make_caches("vec", torch.float32), "vec")
    with pytest.raises(error, match=message):
        compact_kv(caches, src, dst)


def test_wrong_groups_are_refused():
    a, b = make_caches("vec", torch.float32)
    with pytest.raises(ValueError, match="at least one"):
        KVCacheGroup([], "vec")
    with pytest.raises(ValueError, match="layer 1 has shape"):
        KVCacheGroup([a, b[:2]], "vec")
    with pytest.raises(TypeError, match="layer 1 is"):
        KVCacheGroup([a, b.half()], "vec")
    with pytest.raises(TypeError, match="holds"):
        KVCacheGroup([a, b], "amx")
    with pytest.raises(ValueError, match="divisible by 32"):
        KVCacheGroup(make_caches("vec", torch.bfloat16, block_size=48), "amx")
