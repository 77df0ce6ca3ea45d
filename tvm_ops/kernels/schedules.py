"""Register blocks per kind of CPU."""

from tvm_ops.kernels.tile_ops import Tile
from tvm_ops.kernels.tree_attention import Schedule

# 32 registers of 16 floats.
_AVX512 = Schedule(
    main=Tile(rows=8, tokens=32, dims=32),
    few=Tile(rows=4, tokens=64, dims=64),
    one=Tile(rows=1, tokens=64, dims=64),
    unpack_rows=16,
)
# 16 registers of 8 floats, or 32 of 4.
_NARROW = Schedule(
    main=Tile(rows=4, tokens=16, dims=16),
    few=Tile(rows=2, tokens=32, dims=32),
    one=Tile(rows=1, tokens=64, dims=64),
    unpack_rows=16,
)


def schedule_for(mcpu: str) -> Schedule:
    """The schedule for an LLVM CPU name."""
    return _AVX512 if mcpu == "x86-64-v4" else _NARROW
