"""Pieces of gpu_mma_attention.py: its tiles, and what a warp does with fragments of them."""

from dataclasses import dataclass

from tvm.script import tirx as T

from tvm_ops.kernels.gpu_words import word_to_float32

SHORT_NAMES = {"float16": "f16", "bfloat16": "bf16"}  # of element types, in PTX
_ALL_LANES = 0xFFFFFFFF
_NO_SEGMENTS = 0x1F  # shfl.sync's operand c
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # all set: infinity or NaN


@dataclass(frozen=True)
class MmaTile:
    """Warps of a block, row_warps runs of 16 rows by dim_warps parts of head_dim; keys a tile."""

    row_warps: int
    dim_warps: int
    keys: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 16 * self.row_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.dim_warps


def mma_tile(head_dim: int) -> MmaTile | None:
    """The tile that keeps a block within 48 KiB of shared memory and a thread in its registers.

    None if no tile does.
    """
    if head_dim <= 128 and head_dim % 16 == 0:
        return MmaTile(4, 1, 64)
    # Two warps share the rows' sums; both compute the logits, as memory is the limit.
    return MmaTile(2, 2, 32) if head_dim <= 256 and head_dim % 32 == 0 else None


def multiply_op(dtype: str):
    """Piece that adds the product of fragments a[j:] and b[k:] to the sums from i on."""
    short = SHORT_NAMES[dtype]
    mma = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"]

    @T.inline
    def multiply(sums, i, a, j, b, k):
        mma(
            sums[i],
            sums[i + 1],
            sums[i + 2],
            sums[i + 3],
            a[j],
            a[j + 1],
            a[j + 2],
            a[j + 3],
            b[k],
            b[k + 1],
            sums[i],
            sums[i + 1],
            sums[i + 2],
            sums[i + 3],
        )

    return multiply


@T.inline
def over_quad(values, h, moved, merge):
    """Merge values[h] of the four lanes of a quad, which share rows g and g + 8; all get it."""
    for m in T.unroll(2):
        T.ptx.shfl_sync.bfly.b32(
            moved[0],
            T.reinterpret("uint32", values[h]),
            T.cast(m + 1, "uint32"),
            T.uint32(_NO_SEGMENTS),
            T.uint32(_ALL_LANES),
        )
        values[h] = merge(values[h], T.reinterpret("float32", moved[0]))


def is_special_op(dtype: str):
    """Piece that sets found[0] if one of the elements of `word` is infinite or NaN."""
    exponent = _EXPONENTS[dtype]

    @T.inline
    def is_special(word, found):
        for e in T.unroll(2):
            half: T.let[T.uint32] = word >> T.cast(e * 16, "uint32")
            if T.bitwise_and(half, T.uint32(exponent)) == T.uint32(exponent):
                found[0] = 1

    return is_special


def weigh_carefully_op(dtype: str, keys: int, own: int, pitch: int):
    """Piece that adds the weighted values to acc key by key, without tensor cores.

    0 * NaN would poison rows that do not see the key, so a weight of 0 skips it. s and acc are
    fragments of weights and of `own` dimensions' sums; shared[base:] the values, rows of `pitch`
    words; weight and moved are scratch of two elements.
    """

    @T.inline
    def weigh_carefully(s, acc, shared, base, lane, weight, moved):
        for j in range(keys):
            for h in T.unroll(2):
                weight[h] = T.float32(0)
                for n in T.unroll(keys // 8):
                    for e in T.unroll(2):
                        weight[h] = T.Select(
                            j == n * 8 + lane % 4 * 2 + e, s[n * 4 + h * 2 + e], weight[h]
                        )
                T.ptx.shfl_sync.idx.b32(
                    moved[h],
                    T.reinterpret("uint32", weight[h]),
                    T.cast(lane // 4 * 4 + j % 8 // 2, "uint32"),
                    T.uint32(_NO_SEGMENTS),
                    T.uint32(_ALL_LANES),
                )
                weight[h] = T.reinterpret("float32", moved[h])
            for i in T.unroll(own // 8):
                value_word: T.let[T.uint32] = shared[base + j * pitch + i * 4 + lane % 4]
                for h in T.unroll(2):
                    if weight[h] != T.float32(0):
                        for e in T.unroll(2):
                            acc[i * 4 + h * 2 + e] = acc[i * 4 + h * 2 + e] + weight[
                                h
                            ] * word_to_float32(value_word, e, dtype)

    return weigh_carefully
