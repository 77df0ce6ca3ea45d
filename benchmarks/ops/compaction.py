"""compact_kv beside memcpy of the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from ops.machine import Machine, Pieces
from ops.results import ParityError
from ops.shapes import CompactionShape
from ops.timing import Record, Repeats, compare, time_pair
from tvm_ops import KVCacheGroup, compact_kv
from tvm_ops.layouts import cache_shape
from tvm_ops.reference import compact_kv_reference

BLOCK_SIZE = 128  # vLLM's default on CPUs
# An accepted path of a small tree: rows of the tree, root first, and where they belong.
FIRST_SLOT = 37
PATH = (2, 5, 9, 13)
STEP_MODEL = (30, 3, 64)  # layers, KV heads, head_dim of SmolLM2-135M, whose step --step-ms is


def measure_compaction(
    shape: CompactionShape,
    threads: Sequence[int],
    machine: Machine,
    step_ms: float,
    repeats: Repeats,
) -> Iterator[Record]:
    """One record for each number of threads; raises ParityError before any number.

    same_pieces: the pieces that are contiguous in the layout, at the very addresses; pieces of 2
    or 4 bytes are a load and a store, without a call. same_pieces_called: each piece a call of
    libc's memcpy. row_pieces: as many bytes, as if each token's key and value were contiguous.
    """
    caches = _caches(shape)
    source, target = _slots(shape)
    _check(shape, source, target)
    group = KVCacheGroup(caches, shape.layout)
    itemsize = caches[0].element_size()
    head_bytes = 2 * BLOCK_SIZE * shape.head_dim * itemsize
    bases = [
        cache.data_ptr() + head * head_bytes for cache in caches for head in range(shape.kv_heads)
    ]
    moves = list(zip(source.tolist(), target.tolist(), strict=True))
    same = [piece for move in moves for piece in _layout_pieces(shape, itemsize, *move)]
    rows = [piece for move in moves for piece in _row_pieces(shape, itemsize, *move)]
    size = len(bases) * sum(piece.bytes for piece in same)
    assert size == len(bases) * sum(piece.bytes for piece in rows)
    rivals = {
        "same_pieces": machine.copier(bases, same, call=False),
        "same_pieces_called": machine.copier(bases, same, call=True),
        "row_pieces": machine.copier(bases, rows, call=False),
    }
    _check_copier(caches, group, source, target, rivals["same_pieces"])
    embedded = (shape.layers, shape.kv_heads, shape.head_dim) == STEP_MODEL
    for count in threads:
        torch.set_num_threads(count)
        compared = {
            name: compare(*time_pair(lambda: compact_kv(group, source, target), rival, repeats))
            for name, rival in rivals.items()
        }
        seconds = 1e-6 * float(compared["same_pieces"]["ours_us"])  # type: ignore[arg-type]
        yield {
            **asdict(shape),
            "threads": count,
            "bytes": size,
            "ours_us": compared["same_pieces"]["ours_us"],
            "gbps": round(size / seconds / 1e9, 3),
            "fraction_of_step": round(1e3 * seconds / step_ms, 6) if embedded else None,
            "rivals": compared,
        }


def _caches(shape: CompactionShape, layers: int | None = None) -> list[Tensor]:
    size = cache_shape(shape.batch, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    dtype = getattr(torch, shape.dtype)
    pattern = torch.arange(torch.Size(size).numel(), dtype=torch.int32).remainder_(251).to(dtype)
    return [pattern.clone().view(size) for _ in range(layers or shape.layers)]


def _slots(shape: CompactionShape) -> tuple[Tensor, Tensor]:
    """Moves within one block of each request; blocks of requests in no order."""
    blocks = torch.randperm(shape.batch, generator=torch.Generator().manual_seed(0))
    start = blocks[:, None] * BLOCK_SIZE + FIRST_SLOT
    source = start + torch.tensor(PATH[: shape.moves])
    target = start + 1 + torch.arange(shape.moves)
    return source.flatten(), target.flatten()


def _check(shape: CompactionShape, source: Tensor, target: Tensor) -> None:
    """Two layers by compact_kv and by its plain twin: equal to the last bit."""
    caches = _caches(shape, layers=2)
    expected = [cache.clone() for cache in caches]
    compact_kv_reference(expected, shape.layout, source, target)
    compact_kv(KVCacheGroup(caches, shape.layout), source, target)
    if not all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True)):
        raise ParityError(f"{shape}: compact_kv differs from its reference")


def _check_copier(
    caches: list[Tensor], group: KVCacheGroup, source: Tensor, target: Tensor, copier: object
) -> None:
    """memcpy must move what we move, or the comparison means nothing."""
    before = [caches[i].clone() for i in (0, -1)]
    copier()  # type: ignore[operator]
    copied = [caches[i].clone() for i in (0, -1)]
    for index, cache in zip((0, -1), before, strict=True):
        caches[index].copy_(cache)
    compact_kv(group, source, target)
    if not all(torch.equal(caches[i], c) for i, c in zip((0, -1), copied, strict=True)):
        raise ParityError("memcpy of the same pieces differs from compact_kv")


def _halves(shape: CompactionShape, itemsize: int, slot: int) -> tuple[int, int, int]:
    """Byte offsets of the block's keys and values of the first head, and the place in the block."""
    half = BLOCK_SIZE * shape.head_dim * itemsize
    block, offset = divmod(slot, BLOCK_SIZE)
    keys = block * shape.kv_heads * 2 * half
    return keys, keys + half, offset


def _layout_pieces(
    shape: CompactionShape, itemsize: int, source: int, target: int
) -> tuple[Pieces, Pieces]:
    """Key and value of one move, in the contiguous pieces that the layout has."""
    (sk, sv, s), (tk, tv, t) = (_halves(shape, itemsize, slot) for slot in (source, target))
    dims = shape.head_dim
    if shape.layout == "vec":
        row = dims * itemsize
        return (
            Pieces(
                sk + s * itemsize, tk + t * itemsize, 1, 0, dims, BLOCK_SIZE * itemsize, itemsize
            ),
            Pieces(sv + s * row, tv + t * row, 1, 0, 1, 0, row),
        )
    # Keys: pairs of dims, those of 16 tokens side by side. Values: pairs of tokens, 16 dims.
    key = [base + p // 16 * 16 * dims * 2 + p % 16 * 4 for base, p in ((sk, s), (tk, t))]
    value = [base + p // 2 * 64 + p % 2 * 2 for base, p in ((sv, s), (tv, t))]
    return (
        Pieces(*key, 1, 0, dims // 2, 64, 4),
        Pieces(*value, dims // 16, BLOCK_SIZE * 32, 16, 4, 2),
    )


def _row_pieces(
    shape: CompactionShape, itemsize: int, source: int, target: int
) -> tuple[Pieces, Pieces]:
    """The same bytes as if keys and values were both [token][head_dim]."""
    (sk, sv, s), (tk, tv, t) = (_halves(shape, itemsize, slot) for slot in (source, target))
    row = shape.head_dim * itemsize
    return (
        Pieces(sk + s * row, tk + t * row, 1, 0, 1, 0, row),
        Pieces(sv + s * row, tv + t * row, 1, 0, 1, 0, row),
    )
