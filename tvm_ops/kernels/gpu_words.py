"""Expressions of the GPU kernels that any GPU language can hold.

Elements travel as uint32 words of two 16-bit elements (low half first) or one float32: no target
needs a 16-bit type, and loads are never narrower than 32 bits.
"""

from tvm.script import tirx as T

from tvm_ops.kernels.vector_math import TANH_COEFFICIENTS, TANH_SMALL, magnitude, polynomial

LOWEST = -1.0e30  # running maximum before any key: finite, so LOWEST - LOWEST is not NaN
HIDDEN = -3.0e38  # logit of a key that is not seen: 2**(HIDDEN - LOWEST) is 0
TREE_FIELDS = 8  # of a row of the table of trees; the first five are used, see TREE_*
TREE_START, TREE_ROWS, TREE_CONTEXT, TREE_FIRST, TREE_LAST = range(5)


def elements_per_word(dtype):
    """How many elements of `dtype` a uint32 holds."""
    return 1 if dtype == "float32" else 2


def word_to_float32(word, half, dtype):
    """Element `half` (0 or 1) of a uint32 word as float32."""
    if dtype == "float32":
        return T.reinterpret("float32", word)
    bits = word >> T.cast(half * 16, "uint32")  # half may be an unrolled loop's variable
    if dtype == "bfloat16":
        return T.reinterpret("float32", bits << T.uint32(16))
    magnitude = T.bitwise_and(bits, T.uint32(0x7FFF))
    sign = T.bitwise_and(bits, T.uint32(0x8000)) << T.uint32(16)
    shifted = magnitude << T.uint32(13)
    # Some GPUs flush float32 subnormals to 0, so float16's are made beside 0.5, whose last place is
    # theirs. Not by a factor of 2**-24: TVM writes 7 digits of a constant, which is too few.
    placed = T.reinterpret("float32", magnitude + T.uint32(0x3F000000))
    tiny = T.reinterpret("uint32", placed - T.float32(0.5))
    finite = T.Select(magnitude < T.uint32(0x400), tiny, shifted + T.uint32(112 << 23))
    special = T.bitwise_or(shifted, T.uint32(0x7F800000))
    bits = T.Select(magnitude < T.uint32(0x7C00), finite, special)
    return T.reinterpret("float32", T.bitwise_or(bits, sign))


def float32_to_bits(value, dtype):
    """float32 rounded to nearest even, as the 16 low bits of a uint32 (or all 32)."""
    bits = T.reinterpret("uint32", value)
    if dtype == "float32":
        return bits
    if dtype == "bfloat16":
        odd = T.bitwise_and(bits >> T.uint32(16), T.uint32(1))
        rounded = (bits + T.uint32(0x7FFF) + odd) >> T.uint32(16)
        is_nan = T.bitwise_and(bits, T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000)
        return T.Select(is_nan, T.uint32(0x7FC0), rounded)
    magnitude = T.bitwise_and(bits, T.uint32(0x7FFFFFFF))
    sign = T.bitwise_and(bits >> T.uint32(16), T.uint32(0x8000))
    rebased = magnitude - T.uint32(112 << 23)
    odd = T.bitwise_and(rebased >> T.uint32(13), T.uint32(1))
    normal = (rebased + T.uint32(0xFFF) + odd) >> T.uint32(13)
    # Beside 0.5 the last place of float32 is the last place of a float16 subnormal.
    placed = T.reinterpret("float32", magnitude) + T.float32(0.5)
    tiny = T.reinterpret("uint32", placed) - T.uint32(0x3F000000)
    finite = T.Select(magnitude < T.uint32(0x38800000), tiny, normal)
    finite = T.Select(magnitude < T.uint32(0x477FF000), finite, T.uint32(0x7C00))
    result = T.Select(magnitude > T.uint32(0x7F800000), T.uint32(0x7E00), finite)
    return T.bitwise_or(result, sign)


def word_of(values, word, dtype):
    """The uint32 word that packs the float32 elements of `values` from word * (1 or 2) on."""
    if dtype == "float32":
        return float32_to_bits(values[word], dtype)
    high = float32_to_bits(values[2 * word + 1], dtype) << T.uint32(16)
    return T.bitwise_or(float32_to_bits(values[2 * word], dtype), high)


def cap_logit(logit, softcap):
    """softcap * tanh(logit), or `logit` if softcap is 0: scale carries the division.

    As vector_math.tanh. The languages' own may be (e**2x - 1) / (e**2x + 1), which cancels near 0.
    """
    square = logit * logit
    small = logit + logit * square * polynomial(square, TANH_COEFFICIENTS)
    size = T.reinterpret("float32", magnitude(logit))
    power = T.exp2(size * T.float32(-2.8853900817779268))  # e**(-2 |x|)
    large = T.reinterpret("uint32", (T.float32(1) - power) / (T.float32(1) + power))
    sign = T.bitwise_and(T.reinterpret("uint32", logit), T.uint32(0x80000000))
    signed = T.reinterpret("float32", T.bitwise_or(large, sign))
    capped = softcap * T.Select(size < T.float32(TANH_SMALL), small, signed)
    return T.Select(softcap > T.float32(0), capped, logit)


def sees(masks, first_visible, tree, row, position, context, mask_rows, mask_words):
    """Whether a row sees the key at `position`; never reads beyond the row's mask."""
    node = position - context
    word = T.min(T.max(node, 0) >> 5, mask_words - 1)
    bits = masks[(tree * mask_rows + row) * mask_words + word]
    bit = T.bitwise_and(bits >> T.bitwise_and(node, 31), 1)
    in_tree = T.And(node < mask_words * 32, bit == 1)
    committed = position >= first_visible[tree * mask_rows + row]
    return T.Select(node < 0, committed, in_tree)


def split_tiles(trees, tree, key_tile, splits):
    """(first key, tiles, tiles per split) of a tree's visible keys.

    Tiles begin at multiples of key_tile; a tree without rows has none.
    """
    base = tree * TREE_FIELDS
    keys = trees[base + TREE_CONTEXT] + trees[base + TREE_ROWS]
    first = trees[base + TREE_FIRST] // key_tile * key_tile
    there = trees[base + TREE_ROWS] > 0
    tiles = T.Select(there, (keys - first + (key_tile - 1)) // key_tile, 0)
    return first, tiles, T.truncdiv(tiles + splits - 1, splits)
