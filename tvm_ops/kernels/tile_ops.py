"""Steps of CPU tree attention on one tile of keys, as pieces that are expanded into the kernel.

Rows r0 ... of the item are handled `tile.rows` at a time with their sums in registers. Buffers:
q and acc [row * head_dim], row_max [row], row_sum [row * LANES], scores [row in tile][key in tile]
and decay [row in tile] are float32. Keys and values come packed in float32 (keys [dim][token],
values [token][dim]) or straight from a cache in layout "vec", at the offsets `key_at` and
`value_at` of each unit of LANES tokens.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from tvm_ops.kernels.vector_math import (
    EXP2_EXACT,
    EXP2_HALF,
    LANES,
    add_weighted,
    exp2,
    high_bfloat16,
    low_bfloat16,
    seen_bits,
    tanh,
    to_float32,
)

KEY_TILE = 64  # keys handled at a time; items begin at multiples of it
UNITS = KEY_TILE // LANES


@dataclass(frozen=True)
class Tile:
    """Register blocks: `rows` query rows by `tokens` keys (scores) or `dims` dimensions (sums)."""

    rows: int
    tokens: int
    dims: int


def _halves(rows: int) -> tuple[int, int]:
    """Rows in two parts: TVM puts buffers of 1 KiB and more on the heap, not into registers."""
    return rows - rows // 2, rows // 2


@T.inline
def clear(sums, vectors):
    """Zero `vectors` accumulators of LANES floats."""
    for e in T.unroll(vectors):
        for i in T.vectorized(LANES):
            sums[e * LANES + i] = T.float32(0)


def unpack_op(amx: bool, dtype: str, d: int):
    """Piece that converts one tile of keys and values to packed float32."""

    @T.inline
    def unpack(cache, key_at, value_at, keys, values, count, block_size):
        for u in range((count + LANES - 1) // LANES):
            if amx:
                for pair in range(d // 2):
                    for i in T.vectorized(LANES):
                        keys[(2 * pair) * KEY_TILE + u * LANES + i] = low_bfloat16(
                            cache[key_at[u] + pair * LANES + i]
                        )
                    for i in T.vectorized(LANES):
                        keys[(2 * pair + 1) * KEY_TILE + u * LANES + i] = high_bfloat16(
                            cache[key_at[u] + pair * LANES + i]
                        )
                for c in range(d // LANES):
                    words: T.let[T.int64] = value_at[u] + c * (block_size * (LANES // 2))
                    for pair in T.unroll(LANES // 2):
                        for i in T.vectorized(LANES):
                            values[(u * LANES + 2 * pair) * d + c * LANES + i] = low_bfloat16(
                                cache[words + pair * LANES + i]
                            )
                        for i in T.vectorized(LANES):
                            values[(u * LANES + 2 * pair + 1) * d + c * LANES + i] = high_bfloat16(
                                cache[words + pair * LANES + i]
                            )
            else:
                for k in range(d):
                    for i in T.vectorized(LANES):
                        keys[k * KEY_TILE + u * LANES + i] = to_float32(
                            cache[key_at[u] + k * block_size + i], dtype
                        )
                for j in range(LANES):
                    for c in T.unroll(d // LANES):
                        for i in T.vectorized(LANES):
                            values[(u * LANES + j) * d + c * LANES + i] = to_float32(
                                cache[value_at[u] + j * d + c * LANES + i], dtype
                            )

    return unpack


def score_op(tile: Tile, dtype: str, d: int, packed: bool):
    """Piece that writes q . k of tile.rows rows and `count` keys, rounded up to tile.tokens."""
    block, block_units = tile.tokens, tile.tokens // LANES
    half, other = _halves(tile.rows)

    @T.inline
    def multiply(s, rows, q, row, k, key, u):
        for r in T.unroll(rows):
            for i in T.vectorized(LANES):
                s[r * block + u * LANES + i] = (
                    s[r * block + u * LANES + i] + q[(row + r) * d + k] * key[i]
                )

    @T.inline
    def store(s, rows, scores, row, n):
        for r in T.unroll(rows):
            for u in T.unroll(block_units):
                for i in T.vectorized(LANES):
                    scores[(row + r) * KEY_TILE + n * block + u * LANES + i] = s[
                        r * block + u * LANES + i
                    ]

    @T.inline
    def score(q, keys, cache, key_at, scores, r0, count, block_size):
        for n in range((count + block - 1) // block):
            s = T.alloc_buffer((half * block,), "float32")
            t = T.alloc_buffer((other * block,), "float32")
            clear(s, half * block_units)
            clear(t, other * block_units)
            for k in range(d):
                for u in T.unroll(block_units):
                    key = T.alloc_buffer((LANES,), "float32")
                    if packed:
                        for i in T.vectorized(LANES):
                            key[i] = keys[k * KEY_TILE + n * block + u * LANES + i]
                    else:
                        for i in T.vectorized(LANES):
                            key[i] = to_float32(
                                cache[key_at[n * block_units + u] + k * block_size + i], dtype
                            )
                    multiply(s, half, q, r0, k, key, u)
                    multiply(t, other, q, r0 + half, k, key, u)
            store(s, half, scores, 0, n)
            store(t, other, scores, half, n)

    return score


@T.inline
def cap_scores(scores, rows, cap):
    """Logit soft-cap: scores become cap * tanh(scores)."""
    for e in range(rows * UNITS):
        for i in T.vectorized(LANES):
            scores[e * LANES + i] = cap * tanh(scores[e * LANES + i])


@T.inline
def mask_scores(
    scores,
    rows,
    unit,
    end_unit,
    width,
    r0,
    first,
    tree,
    group,
    masks,
    starts,
    words,
    context,
    tree_rows,
):
    """Scores of keys that a row does not see become -inf, in units unit ... end_unit - 1.

    width: of a row of scores, whose first key is `first`. r0 counts from the tree's first row.
    """
    for r in range(rows):
        tree_row: T.let[T.int32] = T.min((r0 + r) // group, tree_rows - 1)
        for u in range(unit, end_unit):
            bits: T.let[T.int32] = seen_bits(
                masks, starts, tree, tree_row, words, first + u * LANES, context
            )
            for i in T.vectorized(LANES):
                scores[r * width + u * LANES + i] = T.Select(
                    T.bitwise_and(T.shift_right(bits, i), T.int32(1)) != T.int32(0),
                    scores[r * width + u * LANES + i],
                    T.float32(-float("inf")),
                )


def softmax_op(dtype: str):
    """Piece that turns scores into weights relative to the row's new maximum, and sums them."""
    coefficients = EXP2_EXACT if dtype == "float32" else EXP2_HALF

    @T.inline
    def softmax(scores, row_max, row_sum, decay, rows, r0):
        for r in range(rows):
            best = T.alloc_buffer((LANES,), "float32")
            for i in T.vectorized(LANES):
                best[i] = scores[r * KEY_TILE + i]
            for u in T.unroll(UNITS - 1):
                for i in T.vectorized(LANES):
                    best[i] = T.max(best[i], scores[r * KEY_TILE + (u + 1) * LANES + i])
            before: T.let[T.float32] = row_max[r0 + r]
            now: T.let[T.float32] = T.max(
                before,
                T.call_llvm_pure_intrin(
                    "float32", "llvm.vector.reduce.fmax", best[T.ramp(0, 1, LANES)]
                ),
            )
            factor: T.let[T.float32] = exp2(before - now)
            row_max[r0 + r] = now
            decay[r] = factor
            total = T.alloc_buffer((LANES,), "float32")
            for i in T.vectorized(LANES):
                total[i] = row_sum[(r0 + r) * LANES + i] * factor
            for u in T.unroll(UNITS):
                for i in T.vectorized(LANES):
                    scores[r * KEY_TILE + u * LANES + i] = exp2(
                        scores[r * KEY_TILE + u * LANES + i] - now, coefficients
                    )
                for i in T.vectorized(LANES):
                    total[i] = total[i] + scores[r * KEY_TILE + u * LANES + i]
            for i in T.vectorized(LANES):
                row_sum[(r0 + r) * LANES + i] = total[i]

    return softmax


def weigh_op(rows: int, dims: int, dtype: str, d: int, packed: bool, careful: bool):
    """Piece that adds the weighted values of dimensions first_dim ... first_dim + dims - 1 to acc.

    careful: a weight of 0 wins over an infinite or NaN value.
    """
    vectors = dims // LANES
    half, other = _halves(rows)

    @T.inline
    def multiply(o, num, scores, row, j, value, v):
        for r in T.unroll(num):
            for i in T.vectorized(LANES):
                o[r * dims + v * LANES + i] = add_weighted(
                    o[r * dims + v * LANES + i],
                    scores[(row + r) * KEY_TILE + j],
                    value[i],
                    careful,
                )

    @T.inline
    def add(o, num, acc, decay, row, score_row, first_dim):
        for r in T.unroll(num):
            for v in T.unroll(vectors):
                for i in T.vectorized(LANES):
                    # Tile sums added up: less rounding than one long sum.
                    acc[(row + r) * d + first_dim + v * LANES + i] = (
                        acc[(row + r) * d + first_dim + v * LANES + i] * decay[score_row + r]
                        + o[r * dims + v * LANES + i]
                    )

    @T.inline
    def weigh(scores, values, cache, value_at, decay, acc, r0, score_row, first_dim, count):
        o = T.alloc_buffer((half * dims,), "float32")
        p = T.alloc_buffer((other * dims,), "float32")
        clear(o, half * vectors)
        clear(p, other * vectors)
        for u in range((count + LANES - 1) // LANES):
            for j in range(T.min(count - u * LANES, LANES)):
                for v in T.unroll(vectors):
                    value = T.alloc_buffer((LANES,), "float32")
                    if packed:
                        for i in T.vectorized(LANES):
                            value[i] = values[(u * LANES + j) * d + first_dim + v * LANES + i]
                    else:
                        for i in T.vectorized(LANES):
                            value[i] = to_float32(
                                cache[value_at[u] + j * d + first_dim + v * LANES + i], dtype
                            )
                    multiply(o, half, scores, score_row, u * LANES + j, value, v)
                    multiply(p, other, scores, score_row + half, u * LANES + j, value, v)
        add(o, half, acc, decay, r0, score_row, first_dim)
        add(p, other, acc, decay, r0 + half, score_row + half, first_dim)

    return weigh
