# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
"""The three ways in which scales enter the product.

blockscale   out = sum over blocks of s_k * d_k, with s_k = fp32(a_scale * b_scale) and d_k a matrix
             instruction started at zero. One accumulator counts in units of e_k instead, the scale of the
             latest block:
                 acc = acc * (e_{k-1} / e_k) + d_k          out = acc * e_last
             A second accumulator would not fit into the registers. Each division and multiplication rounds
             once, by 2^-24 of acc; with powers of two nothing is lost. Scales of one row may differ without
             limit, and may be zero, so e_k is not always s_k:
                 g_k = max |s_j|, j <= k        e_k = s_k, or 2^-80 g_k where |s_k| is below that
             which adds at most 2^-55 g_k to the result for each such block; nothing if its codes are zero,
             or if all scales of the row are. A scale that is not finite makes the row's columns under it NaN.
             Products of scales below 2^-126 have fewer bits.
ptpc         out = (acc * a_scale[row]) * b_scale[column], once at the end
mxfp8        the matrix instruction multiplies by 2^(a - 127) * 2^(b - 127) for every 32 k

blockscale and mxfp8 pass scales through LDS, one word per slot and stage: a thread loads the word of its
slot two blocks ahead, and writes what the waves will read one block ahead.

A lane of fragment i of the rows and j of the columns (gemm_panels.py) holds one row, and 4 columns from
column(j, 4g) on.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from mori_gemm_ar.targets.rocm.gemm_device import (
    BLOCK,
    buffer,
    global_pointer,
    load_word,
    multiply,
    shared_pointer,
)
from mori_gemm_ar.targets.rocm.tiles import Tile, TileShape, larger, smaller

SMALLEST = 2.0**-80  # of e_k / g_k: |acc| stays below 2^(25 + 80) times the number of blocks
WORD = 4


class Scaling:
    """What they have in common: slots in LDS, of which a kind may have none."""

    has_slots = False

    def __init__(self, shape: TileShape, n: int, blocks: int) -> None:
        self.shape, self.n, self.blocks = shape, n, blocks
        self.num_slots = shape.threads if self.has_slots else 0  # one each, so that no thread is left out

    def open(self, at: Any, tile: Tile, args: Any, thread: Any, first: tuple[Any, Any]) -> None:
        """Prepare this thread's slot, and reading those of the wave's rows and columns from `first` on."""
        self._at, self._tile, self._args, self._thread, self._first = at, tile, args, thread, first
        self._r, self._g = thread % 16, thread % 64 // 16

    def load(self, block: Any) -> list[Any]:
        """What memory holds for this thread's slot, for the last block if there is none such."""
        return []

    def start(self) -> list[Any]:
        """What `put` hands on from block to block."""
        return []

    def put(self, stage: Any, state: list[Any], loaded: list[Any]) -> list[Any]:
        """What was loaded into the slot, for a stage; the next state."""
        return state

    def finish(self, stage: Any, state: list[Any]) -> None:
        """What is needed behind the last block into the slot. Read it behind a barrier."""

    def of_row(self, fragment: int, stage: Any) -> Any:
        """What the row's lane needs in a block."""
        return None

    def of_columns(self, fragment: int, stage: Any) -> Any:
        """What is needed for some columns in a block."""
        return None

    def step(self, acc: Any, columns: Any, rows: Any, of_columns: Any, of_row: Any) -> Any:
        """acc with one block added."""
        return multiply(columns, rows, acc)

    def row_at_end(self, fragment: int, stage: Any) -> Any:
        """What the row's lane multiplies its sums with."""
        return None

    def columns_at_end(self, column0: Any) -> Any:
        """What eight columns are multiplied with behind that, or None."""
        return None

    def _slot_address(self, slot: Any, stage: Any) -> Any:
        return self._at + (stage * self.num_slots + slot) * WORD

    def _read(self, kind: Any, slot: Any, stage: Any) -> Any:
        return fx.generic_load(shared_pointer(kind, self._slot_address(slot, stage)))

    def _write(self, kind: Any, stage: Any, value: Any) -> None:
        fx.generic_store(shared_pointer(kind, self._slot_address(self._thread, stage)), value)

    def _row_of(self, row: Any) -> Any:
        """A row of the tile in the whole matrix, the last one for those behind it."""
        return smaller(self._tile.row0 + row, self._args.m - 1)

    def _a_word(self, block: Any) -> tuple[Any, Any]:
        """Scales of A for a block (the last one behind the end) as a buffer, and this thread's offset in it."""
        rows = larger(smaller(self._args.m - self._tile.row0, self.shape.rows), 0)
        first = fx.Int64(self._tile.row0) + self._block(block) * fx.Int64(self._args.a_scale_pitch)
        return buffer(self._args.a_scale + first * WORD, fx.Int64(rows * WORD)), self._a

    def _b_word(self, block: Any, width: int) -> tuple[Any, Any]:
        """The same of B, one scale for `width` columns."""
        pitch, first = self._args.b_scale_pitch, self._tile.col0 // width
        last = smaller(-(-self.n // width) - first, self.shape.cols // width) - 1
        address = self._args.b_scale + (fx.Int64(first) * fx.Int64(pitch) + self._block(block)) * WORD
        return buffer(address, fx.Int64((last * pitch + 1) * WORD)), self._b

    def _block(self, block: Any) -> Any:
        return fx.Int64(smaller(block, fx.Int32(self.blocks - 1)))


class Blockscale(Scaling):
    """Slot (half, row): a row of the tile, and 128 of its columns."""

    has_slots = True

    def open(self, at: Any, tile: Tile, args: Any, thread: Any, first: tuple[Any, Any]) -> None:
        super().open(at, tile, args, thread, first)
        self._a = thread % self.shape.rows * WORD
        self._b = thread // self.shape.rows * args.b_scale_pitch * WORD
        self._slots = first[1] // BLOCK * self.shape.rows + first[0] + self._r

    def load(self, block: Any) -> list[Any]:
        return [
            load_word(fx.Float32, *self._a_word(block)),
            load_word(fx.Float32, *self._b_word(block, BLOCK)),
        ]

    def start(self) -> list[Any]:
        """e, g, and a zero that turns NaN with the first scale that is not finite."""
        return [fx.Float32(0.0), fx.Float32(0.0), fx.Float32(0.0)]

    def put(self, stage: Any, state: list[Any], loaded: list[Any]) -> list[Any]:
        e, g, poison = state
        s = loaded[0] * loaded[1]
        magnitude = fx.absf(s)
        g = fx.maxnumf(g, magnitude)
        floor = g * fx.Float32(SMALLEST)
        unit = (magnitude >= floor).select(s, floor)
        ratio = e / (unit == fx.Float32(0.0)).select(fx.Float32(1.0), unit)
        self._write(fx.Float32, stage, ratio)
        return [unit, g, poison + (s - s)]

    def finish(self, stage: Any, state: list[Any]) -> None:
        self._write(fx.Float32, stage, state[0] + state[2])

    def of_row(self, fragment: int, stage: Any) -> Any:
        return self._read(fx.Float32, self._slots + 16 * fragment, stage)

    def step(self, acc: Any, columns: Any, rows: Any, of_columns: Any, of_row: Any) -> Any:
        return multiply(columns, rows, acc * of_row)

    def row_at_end(self, fragment: int, stage: Any) -> Any:
        return self.of_row(fragment, stage)


class Ptpc(Scaling):
    """No slots: scales are read at the end."""

    def row_at_end(self, fragment: int, stage: Any) -> Any:
        row = self._row_of(self._first[0] + 16 * fragment + self._r)
        return fx.generic_load(global_pointer(fx.Float32, self._args.a_scale + fx.Int64(row) * WORD))

    def columns_at_end(self, column0: Any) -> Any:
        column = smaller(self._tile.col0 + column0, fx.Int32(self.n - 8))
        scales = global_pointer(fx.Float32, self._args.b_scale + fx.Int64(column) * WORD)
        return fx.generic_load(scales, count=4).shuffle(fx.generic_load(scales + 4, count=4), list(range(8)))


class Mxfp8(Scaling):
    """A slot for each row of the tile, then one for each 32 columns: four scales, for 128 k, in a word."""

    has_slots = True

    def open(self, at: Any, tile: Tile, args: Any, thread: Any, first: tuple[Any, Any]) -> None:
        super().open(at, tile, args, thread, first)
        self._a = thread * WORD  # past the rows that there are for the others, so that they load 0
        self._b = (thread - self.shape.rows) * args.b_scale_pitch * WORD

    def load(self, block: Any) -> list[Any]:
        words = [load_word(fx.Int32, *self._a_word(block)), load_word(fx.Int32, *self._b_word(block, 32))]
        return [words[0] | words[1]]

    def put(self, stage: Any, state: list[Any], loaded: list[Any]) -> list[Any]:
        self._write(fx.Int32, stage, loaded[0])
        return state

    def of_row(self, fragment: int, stage: Any) -> Any:
        return self._byte(self._first[0] + 16 * fragment + self._r, stage)

    def of_columns(self, fragment: int, stage: Any) -> Any:
        return self._byte(self.shape.rows + self._first[1] // 32 + fragment // 2, stage)

    def _byte(self, slot: Any, stage: Any) -> Any:
        """This lane's 32 k of the block in the low byte; what is above it is not looked at."""
        return fx.Int32(fx.Uint32(self._read(fx.Int32, slot, stage)) >> fx.Uint32(8 * self._g))

    def step(self, acc: Any, columns: Any, rows: Any, of_columns: Any, of_row: Any) -> Any:
        return multiply(columns, rows, acc, (of_columns, of_row))


SCALINGS: dict[str, type[Scaling]] = {"blockscale": Blockscale, "ptpc": Ptpc, "mxfp8": Mxfp8}
