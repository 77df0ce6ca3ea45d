"""Intel AMX: which tile register holds what, and the statements that move and multiply tiles.

A tile has up to 16 rows of 64 bytes. `tdpbf16ps` adds to a tile of float32 sums [row][column] the
product of a left tile [row][k] and a right tile [k / 2][column][2], both bfloat16. In this package
tiles are contiguous in memory, but for sums.

All functions here are called while TVMScript is parsed; those without result emit statements.
"""

from dataclasses import dataclass, replace

from tvm.script import tirx as T

TILE_ROWS = 16
TILE_COLUMNS = 16  # of sums and right tiles
TILE_DEPTH = 32  # bfloat16 in a row of a left tile
TILE_WORDS = TILE_ROWS * 16  # 32-bit words of a whole tile
_ROW_BYTES = 64


def tile_instruction(name, *arguments):
    """One AMX instruction, by LLVM's name. The only place to replace where there is no AMX."""
    return T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments)


@dataclass(frozen=True)
class Registers:
    """Numbers of the tile registers.

    left: by row tile. half_left and half_right are for a product over 16 instead of 32 values.
    """

    left: tuple[int, int]
    right: tuple[int, ...]
    half_left: tuple[int, ...] = ()
    half_right: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """Sums of row_tiles x columns tiles that are held in registers 0, 1, ..., row tiles first."""

    row_tiles: int
    columns: int
    registers: Registers

    def sum_register(self, row_tile, column):
        """Register of one tile of sums."""
        return row_tile * self.columns + column

    @property
    def row_range(self):
        """Its row tiles, counted from 0."""
        return range(self.row_tiles)

    @property
    def column_range(self):
        """Its columns, counted from 0."""
        return range(self.columns)

    def narrowed(self, columns):
        """The same with fewer columns."""
        return replace(self, columns=columns)


@dataclass(frozen=True)
class Blocks:
    """Register blocks for two row tiles and for one, all under one tile configuration."""

    pair: Block
    single: Block
    registers: Registers


def blocks_for(head_dim: int) -> Blocks:
    """As many sums as eight registers allow: each load then serves most products."""
    if head_dim % TILE_DEPTH == 0:
        registers = Registers(left=(4, 5), right=(6, 7))
        return Blocks(Block(2, 2, registers), Block(1, 4, registers), registers)
    # The last 16 dimensions are multiplied in tiles of half the depth: to fill them up with zeros
    # would cost a copy of the keys, or hide an infinite one.
    registers = Registers(left=(2, 3), right=(4,), half_left=(5, 6), half_right=(7,))
    return Blocks(Block(2, 1, registers), Block(1, 2, registers), registers)


def configure(blocks, config, rows, later_rows):
    """Load the tile configuration, which also zeroes all tiles.

    config: int32 buffer of 16 words. rows, later_rows: int32, of the first row tile and the second.
    """
    registers = blocks.registers
    row_bytes, num_rows = [_ROW_BYTES] * 8, [T.int32(TILE_ROWS)] * 8
    for row_tile, count in enumerate((rows, later_rows)):
        for column in blocks.pair.column_range:
            num_rows[blocks.pair.sum_register(row_tile, column)] = count
        for register in (registers.left, registers.half_left):
            if register:
                num_rows[register[row_tile]] = count
    for register in registers.half_left:
        row_bytes[register] = _ROW_BYTES // 2
    for register in registers.half_right:
        num_rows[register] = T.int32(TILE_ROWS // 2)
    words = [T.int32(0)] * 16
    words[0] = T.int32(1)  # palette; 16 bits of row bytes per tile from byte 16, rows from byte 48
    for i in range(4):
        words[4 + i] = T.int32(row_bytes[2 * i] | row_bytes[2 * i + 1] << 16)
    for i in range(8):
        words[12 + i // 4] += T.shift_left(num_rows[i], T.int32(8 * (i % 4)))
    for i, word in enumerate(words):
        T.buffer_store(config, word, [i])
    T.evaluate(tile_instruction("ldtilecfg", T.address_of(config[0])))


def release():
    """Leave AMX: a thread that does not is slower to switch, and clocks lower."""
    T.evaluate(tile_instruction("tilerelease"))


def clear_sums(block):
    """Zero the sums of a block."""
    for register in range(block.row_tiles * block.columns):
        T.evaluate(tile_instruction("tilezero", T.int8(register)))


def load_sums(block, buffer, index, row_width):
    """Load sums from float32 rows of row_width at index, columns side by side."""
    _move_sums("tileloadd64", block, buffer, index, row_width)


def store_sums(block, buffer, index, row_width):
    """Inverse of load_sums."""
    _move_sums("tilestored64", block, buffer, index, row_width)


def _move_sums(name, block, buffer, index, row_width):
    for row_tile in block.row_range:
        for column in block.column_range:
            at = index + (row_tile * TILE_ROWS * row_width + column * TILE_COLUMNS)
            register = T.int8(block.sum_register(row_tile, column))
            T.evaluate(
                tile_instruction(name, register, T.address_of(buffer[at]), T.int64(4 * row_width))
            )


def multiply(block, left, left_at, right, right_at, half=False):
    """Add the product of left and right tiles to the sums of a block.

    left_at, right_at: index of the first element of each row tile, and of each column's tile.
    """
    registers = block.registers
    lefts = registers.half_left if half else registers.left
    rights = registers.half_right if half else registers.right

    def load(register, buffer, index):
        address, stride = T.address_of(buffer[index]), T.int64(_ROW_BYTES)
        T.evaluate(tile_instruction("tileloadd64", T.int8(register), address, stride))

    for column in block.column_range:
        load(rights[column % len(rights)], right, right_at[column])
        for row_tile in block.row_range:
            if column == 0:
                load(lefts[row_tile], left, left_at[row_tile])
            T.evaluate(
                tile_instruction(
                    "tdpbf16ps",
                    T.int8(block.sum_register(row_tile, column)),
                    T.int8(lefts[row_tile]),
                    T.int8(rights[column % len(rights)]),
                )
            )
