"""Expressions that vectorise: element conversion, exp2 and masks, free of libm calls."""

from tvm.script import tirx as T

LANES = 16  # tokens or head dimensions per vector: one AVX-512 register of float32
STORAGE_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
INFINITY_BITS = 0x7F800000  # float32 magnitudes from here on are infinity and NaN
# Chebyshev interpolation of 2**f on [-1/2, 1/2], lowest power first.
EXP2_COEFFICIENTS = (
    1.0,
    0.6931472067,
    0.2402265092,
    0.05550327227,
    0.009618056678,
    0.001340042818,
    0.0001546144472,
)
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


def exp2(x):
    """2**x for x <= 0, relative error about 1e-7; exactly 0 below -126, -inf included.

    The integer part goes into the exponent bits, the fraction through a polynomial.
    """
    clamped = T.max(T.float32(-126.0), x)  # in this order NaN stays NaN
    whole = T.nearbyint(clamped)
    fraction = clamped - whole
    poly = T.float32(EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        poly = poly * fraction + T.float32(coefficient)
    exponent = T.shift_left(T.cast(whole, "int32"), T.int32(23))
    power = T.reinterpret("float32", T.reinterpret("int32", poly) + exponent)
    return T.Select(x < T.float32(-126.0), T.float32(0.0), power)


def sees(mask, node, num_rows):
    """Whether a row sees a key: node is the key's tree row, negative in the committed context."""
    bit = T.shift_right(mask, T.cast(T.bitwise_and(node, T.int32(63)), "int64"))
    in_tree = T.And(node < num_rows, T.bitwise_and(bit, T.int64(1)) != T.int64(0))
    return T.Or(node < 0, in_tree)


def add_weighted(total, weight, value, masked):
    """total + weight * value; if masked, a weight of 0 wins over an infinite or NaN value."""
    added = total + weight * value
    return T.Select(weight == T.float32(0), total, added) if masked else added
