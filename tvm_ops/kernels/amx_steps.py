"""Steps of AMX tree attention on up to KEYS keys, as pieces that are expanded into the kernel.

Buffers: q [row tile][step of 32 dims] and weights [row tile][step of 32 keys] are left tiles of
bfloat16; scores [row in block * KEYS], acc [row * head_dim], row_max and row_sum [row * LANES] are
float32. `steps` counts steps of 32 keys, `chunk` 16 dimensions of the values; r0 is a block's first
row in the item, `rows` how many it has.
"""

from tvm.script import tirx as T

from tvm_ops.kernels import amx_tiles
from tvm_ops.kernels.amx_tiles import TILE_DEPTH, TILE_ROWS, TILE_WORDS
from tvm_ops.kernels.tile_ops import clear
from tvm_ops.kernels.vector_math import (
    EXP2_HALF,
    LANES,
    add_weighted,
    exp2,
    high_bfloat16,
    low_bfloat16,
    magnitude,
    to_float32,
)

KEYS = 128  # handled at a time: the more, the less often maxima and sums are read and written
STEPS = KEYS // TILE_DEPTH
UNITS = KEYS // LANES
STEP_UNITS = TILE_DEPTH // LANES
LEFT_TILE = TILE_ROWS * TILE_DEPTH  # bfloat16 of a left tile


def loop(count):
    """Unrolled where the number of turns is known."""
    return T.unroll(count) if isinstance(count, int) else T.serial(count)


def left_index(row, step, steps, place):
    """Index of place 0 ... 31 of a step of a row in left tiles, of which each row has `steps`."""
    tile = row // TILE_ROWS * steps + step
    return tile * LEFT_TILE + row % TILE_ROWS * TILE_DEPTH + place


def rounded_bits(weight):
    """Bits of a float32 weight rounded to bfloat16; exact halves go up, which no one will notice.

    A NaN stays one: its low bits are 0, whether it came from bfloat16 or from infinity.
    """
    bits = T.reinterpret("uint32", weight) + T.uint32(0x8000)
    return T.bitwise_and(bits, T.uint32(0xFFFF0000))


def score_op(d: int):
    """Piece that writes the scores of row tiles row_tile ... and the keys at key_at.

    Whole blocks are written, which may be keys of the next step.
    """
    query_steps = -(-d // TILE_DEPTH)

    def multiply_step(block, q, cache, key_at, row_tile, n, k, half):
        amx_tiles.multiply(
            block,
            q,
            [left_index((row_tile + m) * TILE_ROWS, k, query_steps, 0) for m in block.row_range],
            cache,
            [key_at[n * block.columns + c] + k * TILE_WORDS for c in block.column_range],
            half,
        )

    @T.inline
    def score(block, q, cache, key_at, scores, row_tile, steps):
        for n in loop((steps * STEP_UNITS + block.columns - 1) // block.columns):
            amx_tiles.clear_sums(block)
            for k in T.unroll(d // TILE_DEPTH):
                multiply_step(block, q, cache, key_at, row_tile, n, k, False)
            if d % TILE_DEPTH > 0:
                multiply_step(block, q, cache, key_at, row_tile, n, d // TILE_DEPTH, True)
            amx_tiles.store_sums(block, scores, n * (block.columns * LANES), KEYS)

    return score


def soften_op(d: int):
    """Piece that turns scores * factor into weights relative to each row's new maximum.

    The row's sums are rescaled to it.
    """
    chunks = d // LANES

    @T.inline
    def soften(
        scores,
        factor,
        tile_max,
        decay,
        row_max,
        row_sum,
        acc,
        weights,
        row_tiles,
        r0,
        rows,
        steps,
    ):
        for r in range(rows):
            best = T.alloc_buffer((LANES,), "float32")
            for i in T.vectorized(LANES):
                best[i] = scores[r * KEYS + i] * factor
            for u in loop(steps * STEP_UNITS - 1):
                for i in T.vectorized(LANES):
                    best[i] = T.max(best[i], scores[r * KEYS + (u + 1) * LANES + i] * factor)
            tile_max[r] = T.call_llvm_pure_intrin(
                "float32", "llvm.vector.reduce.fmax", best[T.ramp(0, 1, LANES)]
            )
        for m in T.unroll(row_tiles):
            for i in T.vectorized(LANES):
                decay[m * LANES + i] = exp2(
                    row_max[r0 + m * LANES + i]
                    - T.max(row_max[r0 + m * LANES + i], tile_max[m * LANES + i])
                )
            for i in T.vectorized(LANES):
                row_max[r0 + m * LANES + i] = T.max(
                    row_max[r0 + m * LANES + i], tile_max[m * LANES + i]
                )
        for r in range(rows):
            now: T.let[T.float32] = row_max[r0 + r]
            shrink: T.let[T.float32] = decay[r]
            total = T.alloc_buffer((LANES,), "float32")
            for i in T.vectorized(LANES):
                total[i] = row_sum[(r0 + r) * LANES + i] * shrink
            for u in loop(steps * STEP_UNITS):
                bits = T.alloc_buffer((LANES,), "uint32")
                for i in T.vectorized(LANES):
                    bits[i] = rounded_bits(
                        exp2(scores[r * KEYS + u * LANES + i] * factor - now, EXP2_HALF)
                    )
                for i in T.vectorized(LANES):
                    total[i] = total[i] + T.reinterpret("float32", bits[i])
                at: T.let[T.int32] = left_index(r, u // STEP_UNITS, STEPS, u % STEP_UNITS * LANES)
                for i in T.vectorized(LANES):
                    weights[at + i] = T.cast(T.shift_right(bits[i], T.uint32(16)), "uint16")
            for i in T.vectorized(LANES):
                row_sum[(r0 + r) * LANES + i] = total[i]
            # Rare after the first keys: few rows then meet a new maximum.
            if shrink != T.float32(1):
                for c in range(chunks):
                    for i in T.vectorized(LANES):
                        acc[(r0 + r) * d + c * LANES + i] = (
                            acc[(r0 + r) * d + c * LANES + i] * shrink
                        )

    return soften


def weigh_op(d: int):
    """Piece that adds the weighted values at value_at, chunks chunk_words apart, to acc."""
    chunks = d // LANES

    @T.inline
    def weigh(block, weights, values, value_at, chunk_words, acc, row_tile, chunk, steps):
        amx_tiles.load_sums(block, acc, row_tile * TILE_ROWS * d + chunk * LANES, d)
        for s in loop(steps):
            amx_tiles.multiply(
                block,
                weights,
                [left_index(m * TILE_ROWS, s, STEPS, 0) for m in block.row_range],
                values,
                [value_at[s] + (chunk + c) * chunk_words for c in block.column_range],
            )
        amx_tiles.store_sums(block, acc, row_tile * TILE_ROWS * d + chunk * LANES, d)

    @T.inline
    def weigh_all(block, weights, values, value_at, chunk_words, acc, row_tile, steps):
        for n in range(chunks // block.columns):
            weigh(
                block,
                weights,
                values,
                value_at,
                chunk_words,
                acc,
                row_tile,
                n * block.columns,
                steps,
            )
        if chunks % block.columns > 0:
            weigh(
                block.narrowed(chunks % block.columns),
                weights,
                values,
                value_at,
                chunk_words,
                acc,
                row_tile,
                chunks - chunks % block.columns,
                steps,
            )

    return weigh_all


def weigh_carefully_op(d: int):
    """Piece that does the same on vectors: a weight of 0 wins over an infinite or NaN value.

    It adds up as tdpbf16ps does, low halves and high halves apart, for equal bits.
    """
    chunks = d // LANES

    @T.inline
    def weigh_carefully(weights, staged, acc, r0, rows, steps):
        for r in range(rows):
            for c in range(chunks):
                for s in range(steps):
                    low = T.alloc_buffer((LANES,), "float32")
                    high = T.alloc_buffer((LANES,), "float32")
                    clear(low, 1)
                    clear(high, 1)
                    for pair in range(TILE_DEPTH // 2):
                        at: T.let[T.int32] = left_index(r, s, STEPS, 2 * pair)
                        first: T.let[T.float32] = to_float32(weights[at], "bfloat16")
                        second: T.let[T.float32] = to_float32(weights[at + 1], "bfloat16")
                        words: T.let[T.int32] = (c * STEPS + s) * TILE_WORDS + pair * LANES
                        for i in T.vectorized(LANES):
                            low[i] = add_weighted(
                                low[i], first, low_bfloat16(staged[words + i]), True
                            )
                        for i in T.vectorized(LANES):
                            high[i] = add_weighted(
                                high[i], second, high_bfloat16(staged[words + i]), True
                            )
                    for i in T.vectorized(LANES):
                        acc[(r0 + r) * d + c * LANES + i] = acc[(r0 + r) * d + c * LANES + i] + (
                            low[i] + high[i]
                        )

    return weigh_carefully


def stage_op(d: int):
    """Piece that copies `steps` steps of values, zeros from token `count` on, to `staged`.

    staged: [chunk][step] right tiles. largest[0] becomes the largest magnitude, as bits.
    """
    chunks = d // LANES

    @T.inline
    def stage(cache, value_at, chunk_words, staged, largest, count, steps):
        for i in T.vectorized(LANES):
            largest[i] = T.uint32(0)
        for s in range(steps):
            for pair in range(TILE_DEPTH // 2):
                written: T.let[T.int32] = count - s * TILE_DEPTH - 2 * pair
                keep: T.let[T.uint32] = T.Select(
                    written > 1,
                    T.uint32(0xFFFFFFFF),
                    T.Select(written > 0, T.uint32(0xFFFF), T.uint32(0)),
                )
                for c in range(chunks):
                    words = T.alloc_buffer((LANES,), "uint32")
                    for i in T.vectorized(LANES):
                        words[i] = T.bitwise_and(
                            cache[value_at[s] + c * chunk_words + pair * LANES + i], keep
                        )
                    for i in T.vectorized(LANES):
                        largest[i] = T.max(
                            largest[i],
                            T.max(
                                magnitude(low_bfloat16(words[i])),
                                magnitude(high_bfloat16(words[i])),
                            ),
                        )
                    for i in T.vectorized(LANES):
                        staged[(c * STEPS + s) * TILE_WORDS + pair * LANES + i] = words[i]
        for i in range(LANES - 1):
            largest[0] = T.max(largest[0], largest[i + 1])

    return stage
