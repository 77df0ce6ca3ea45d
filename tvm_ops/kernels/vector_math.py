"""Expressions that vectorise: element conversion, exp2 and masks, free of libm calls."""

from tvm.script import tirx as T

LANES = 16  # tokens or head dimensions per vector: one AVX-512 register of float32
STORAGE_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
INFINITY_BITS = 0x7F800000  # float32 magnitudes from here on are infinity and NaN
# Chebyshev interpolation of 2**f on [-1/2, 1/2], lowest power first. Relative error 3e-9 before
# float32 rounding; 3.5e-6 is enough beside elements of 11 or 8 significant bits.
EXP2_EXACT = (
    1.0,
    0.6931472067,
    0.2402265092,
    0.05550327227,
    0.009618056678,
    0.001340042818,
    0.0001546144472,
)
EXP2_HALF = (1.0, 0.6931210452, 0.2402234904, 0.05592197584, 0.009666368515)
# tanh(x) = x + x * z * P(z) with z = x*x, |x| < TANH_SMALL; relative error 5e-8.
TANH_COEFFICIENTS = (-0.33333321, 0.13332439, -0.05381596, 0.02086331, -0.00592793)
TANH_SMALL = 0.65
LOWEST = -1.0e30  # running maximum before any key: finite, so LOWEST - LOWEST is not NaN


def to_float32(value, dtype):
    """Element of a buffer of STORAGE_DTYPES[dtype] as float32."""
    if dtype == "bfloat16":
        return T.reinterpret("float32", T.shift_left(T.cast(value, "uint32"), T.uint32(16)))
    return value if dtype == "float32" else T.cast(value, "float32")


def from_float32(value, dtype):
    """float32 rounded to nearest even, as an element of a buffer of STORAGE_DTYPES[dtype]."""
    if dtype == "float32":
        return value
    if dtype == "float16":
        return T.cast(value, "float16")
    bits = T.reinterpret("uint32", value)
    odd = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(1))
    rounded = T.shift_right(bits + T.uint32(0x7FFF) + odd, T.uint32(16))
    # Rounding may carry a NaN's mantissa into infinity.
    return T.cast(T.Select(value == value, rounded, T.uint32(0x7FC0)), "uint16")


def low_bfloat16(word):
    """Low half of a uint32 word that packs two bfloat16 values, as float32."""
    return T.reinterpret("float32", T.shift_left(word, T.uint32(16)))


def high_bfloat16(word):
    """High half of a uint32 word that packs two bfloat16 values, as float32."""
    return T.reinterpret("float32", T.bitwise_and(word, T.uint32(0xFFFF0000)))


def magnitude(value):
    """Bits of |value|, ordered as the values are; immune to algebra that assumes finite numbers."""
    return T.bitwise_and(T.reinterpret("uint32", value), T.uint32(0x7FFFFFFF))


def exp2(x, coefficients=EXP2_EXACT):
    """2**x for x <= 0; exactly 0 below -126, -inf included.

    The integer part goes into the exponent bits, the fraction through a polynomial.
    """
    clamped = T.max(T.float32(-126.0), x)  # in this order NaN stays NaN
    whole = T.nearbyint(clamped)
    poly = polynomial(clamped - whole, coefficients)
    exponent = T.shift_left(T.cast(whole, "int32"), T.int32(23))
    power = T.reinterpret("float32", T.reinterpret("int32", poly) + exponent)
    return T.Select(x < T.float32(-126.0), T.float32(0.0), power)


def polynomial(x, coefficients):
    """Sum of coefficients[k] * x**k, by Horner's rule."""
    total = T.float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + T.float32(coefficient)
    return total


def tanh(x):
    """tanh(x), relative error about 2e-7: a polynomial near 0, where 1 - 2**y would cancel."""
    square = x * x
    small = x + x * square * polynomial(square, TANH_COEFFICIENTS)
    size = T.reinterpret("float32", magnitude(x))
    power = exp2(size * T.float32(-2.8853900817779268))  # e**(-2 |x|)
    large = (T.float32(1) - power) / (T.float32(1) + power)
    sign = T.bitwise_and(T.reinterpret("uint32", x), T.uint32(0x80000000))
    signed = T.reinterpret("float32", T.bitwise_or(T.reinterpret("uint32", large), sign))
    return T.Select(size < T.float32(TANH_SMALL), small, signed)


def seen_bits(masks, starts, tree, row, words, position, context):
    """int32 whose bit i says whether the row sees key position + i, for i below 16.

    masks, starts: buffers [tree, row, word] and [tree, row] as TreeBatch.plan gives them.
    """
    node = position - context
    word, shift = T.shift_right(node, T.int32(6)), T.cast(T.bitwise_and(node, T.int32(63)), "int64")

    def mask_word(index, wanted):
        there = T.And(wanted, index < words)
        found = T.if_then_else(there, masks[tree, row, T.max(index, 0)], T.int64(0))
        return T.cast(found, "uint64")

    low = T.shift_right(mask_word(word, node >= 0), T.cast(shift, "uint64"))
    # Shifted in two steps: a shift by 64 is undefined.
    high = T.shift_left(
        T.shift_left(mask_word(word + 1, node >= 0), T.uint64(1)),
        T.cast(T.int64(63) - shift, "uint64"),
    )
    committed = T.cast(T.min(T.max(-node, 0), LANES), "uint64")
    all_committed = T.shift_left(T.uint64(1), committed) - T.uint64(1)
    first_word = T.shift_left(mask_word(T.int32(0), node < 0), committed)
    bits = T.bitwise_or(T.bitwise_or(low, high), T.bitwise_or(all_committed, first_word))
    hidden = T.cast(T.min(T.max(starts[tree, row] - position, 0), LANES), "uint64")
    shown = T.shift_left(T.shift_right(bits, hidden), hidden)
    return T.cast(T.bitwise_and(shown, T.uint64(0xFFFF)), "int32")


def add_weighted(total, weight, value, masked):
    """total + weight * value; if masked, a weight of 0 wins over an infinite or NaN value."""
    added = total + weight * value
    return T.Select(weight == T.float32(0), total, added) if masked else added
