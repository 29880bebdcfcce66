# mypy: disable-error-code="import-untyped, no-untyped-call"
"""The three ways in which scales enter the product.

blockscale   out = sum over blocks of s_k * d_k, with s_k = fp32(a_scale * b_scale) and d_k a matrix
             instruction started at zero. One accumulator counts in units of e_k instead, the scale of the
             latest block:
                 acc = acc * (e_{k-1} / e_k) + d_k          out = acc * e_last
             A second accumulator would not fit into the registers. Each division and multiplication rounds
             once, by 2^-24 of acc; with powers of two nothing is lost. Scales of one row may differ without
             limit, and may be zero, so e_k is not always s_k:
                 g_k = max |s_j|, j <= k
                 e_k = s_k, or f = max(2^-80 g_k, 2^-126) where |s_k| is below that and g_k > 0
             which adds at most 2^25 f to the result for each such block; nothing if its codes are zero, or
             if all scales of the row are. Under a scale that is not finite no result is.
ptpc         out = (acc * a_scale[row]) * b_scale[column], once at the end
mxfp8        the matrix instruction multiplies by 2^(a - 127) * 2^(b - 127) for every 32 k

A lane of fragment i of the rows and j of the columns (gemm_panels.py) holds one row, and 4 columns from
column(j, 4g) on. What lanes need of a block they read in LDS, in one word for each row and stage; mxfp8 has
words for the columns as well. DMA brings scales as they are in memory, a word per thread, together with a
block's panels: with mxfp8 that is all. With blockscale they are those of the block after it, and each thread
writes e_{k-1} / e_k of its row beside them one block later.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from mori_shmem.device.flydsl.bounded import bounded

from mori_gemm_ar.targets.rocm.gemm_device import (
    BLOCK,
    load_into_lds,
    load_word,
    load_words,
    multiply,
    shared_pointer,
)
from mori_gemm_ar.targets.rocm.tiles import Tile, TileShape, larger, smaller

SMALLEST = 2.0**-80  # of e_k / g_k: |acc| stays below 2^(25 + 80) times the number of blocks
SMALLEST_UNIT = 2.0**-126
WORD = 4


class Scaling:
    """What they have in common. `kinds` of words there are in LDS: 2 stages of each, one word per thread."""

    kinds = 0
    rescales = False  # whether `before` does anything

    def __init__(self, shape: TileShape, n: int) -> None:
        self.shape, self.n = shape, n

    @property
    def lds_bytes(self) -> int:
        """Of all words."""
        return self.kinds * 2 * self.shape.threads * WORD

    def open(self, at: Any, tile: Tile, args: Any, thread: Any, wave: Any, first: tuple[Any, Any]) -> None:
        """Prepare this thread's word, and reading those of the wave's rows and columns from `first` on."""
        self._at, self._tile, self._args = at, tile, args
        self._thread, self._wave, self._first = thread, wave, first
        self._r, self._g = thread % 16, thread % 64 // 16

    def begin(self) -> None:
        """Before everything: start the DMA of what `start` needs."""

    def start(self) -> list[Any]:
        """Before the first block is loaded; what `put` hands on from block to block."""
        return []

    def fetch(self, block: Any, stage: Any) -> None:
        """With the panels of `block` into their stage: start the DMA of scales."""

    def put(self, block: Any, stage: Any, state: list[Any]) -> list[Any]:
        """Make what the lanes will need in `block` of what this wave has fetched, and the next state."""
        return state

    def finish(self, stage: Any, state: list[Any]) -> None:
        """What is needed behind the last block. Read it behind a barrier."""

    def of_row(self, fragment: int, stage: Any) -> Any:
        """What the row's lane needs in a block."""
        return None

    def of_columns(self, fragment: int, stage: Any) -> Any:
        """What is needed for some columns in a block."""
        return None

    def before(self, acc: Any, of_row: Any) -> Any:
        """acc in the units of a block."""
        return acc

    def multiply(self, columns: Any, rows: Any, acc: Any, of_columns: Any, of_row: Any) -> Any:
        """acc with the block added."""
        return multiply(columns, rows, acc)

    def row_at_end(self, fragment: int, stage: Any) -> Any:
        """What the row's lane multiplies its sums with."""
        return None

    def columns_at_end(self, column0: Any) -> Any:
        """What eight columns are multiplied with behind that, or None."""
        return None

    def _word(self, word: Any, stage: Any, kind: int = 0) -> Any:
        """Its LDS address."""
        return self._at + ((kind * 2 + stage) * self.shape.threads + word) * WORD

    def _read(self, dtype: Any, word: Any, stage: Any, kind: int = 0) -> Any:
        return fx.generic_load(shared_pointer(dtype, self._word(word, stage, kind)))

    def _fetch(self, source: Any, offset: Any, stage: Any, kind: int = 0) -> None:
        """A word for each thread."""
        load_into_lds(source, offset, self._word(self._wave * 64, stage, kind), WORD)

    def _rows_of_a(self, block: Any, row_pitch: Any, block_pitch: Any) -> tuple[Any, Any]:
        """Where the words of the tile's rows for a block (the last one behind the end) begin, `row_pitch`
        words apart, and how many bytes they reach over."""
        first = fx.Int64(self._tile.row0) * fx.Int64(row_pitch) + self._last(block) * fx.Int64(block_pitch)
        rows = smaller(self._args.m - self._tile.row0, self.shape.rows)
        return self._args.a_scale + first * WORD, _nbytes(rows, row_pitch)

    def _last(self, block: Any) -> Any:
        return fx.Int64(smaller(block, self._args.k // BLOCK - 1))


def _nbytes(count: Any, pitch: Any) -> Any:
    """From the first of `count` words to the end of the last one; 0 for none."""
    return larger((count - 1) * pitch + 1, 0) * WORD


class Blockscale(Scaling):
    """Thread (half, row): a row of the tile, 128 of its columns. Kinds: ratios, scales of A, of B."""

    kinds, rescales = 3, True

    def open(self, at: Any, tile: Tile, args: Any, thread: Any, wave: Any, first: tuple[Any, Any]) -> None:
        super().open(at, tile, args, thread, wave, first)
        self._own_row = thread % self.shape.rows * WORD
        last = -(-self.n // BLOCK) - 1
        column_block = smaller(tile.col0 // BLOCK + wave * 64 // self.shape.rows, last)
        self._b = args.b_scale + fx.Int64(column_block) * fx.Int64(args.b_scale_pitch) * WORD
        self._words = first[1] // BLOCK * self.shape.rows + first[0] + self._r

    def begin(self) -> None:
        self._fetch_scales(fx.Int32(0), fx.Int32(0))

    def start(self) -> list[Any]:
        """e and g."""
        return self.put(fx.Int32(0), fx.Int32(0), [fx.Float32(0.0), fx.Float32(0.0)])

    def fetch(self, block: Any, stage: Any) -> None:
        self._fetch_scales(block + 1, 1 - stage)  # this wave has made ratios of what is there

    def _fetch_scales(self, block: Any, stage: Any) -> None:
        self._fetch(bounded(*self._rows_of_a(block, 1, self._args.a_scale_pitch)), self._own_row, stage, 1)
        self._fetch(bounded(self._b + self._last(block) * WORD, WORD), fx.Int32(0), stage, 2)

    def put(self, block: Any, stage: Any, state: list[Any]) -> list[Any]:
        e, g = state
        a, b = (self._read(fx.Float32, self._thread, stage, kind) for kind in (1, 2))
        s = a * b
        magnitude = fx.absf(s)
        g = fx.maxnumf(g, magnitude)
        floor = fx.maxnumf(g * fx.Float32(SMALLEST), fx.Float32(SMALLEST_UNIT))
        floor = (g > fx.Float32(0.0)).select(floor, fx.Float32(0.0))
        unit = (magnitude < floor).select(floor, s)  # NaN is not below anything
        ratio = e / (unit == fx.Float32(0.0)).select(fx.Float32(1.0), unit)
        self._write(stage, ratio)
        return [unit, g]

    def finish(self, stage: Any, state: list[Any]) -> None:
        self._write(stage, state[0])

    def _write(self, stage: Any, value: Any) -> None:
        fx.generic_store(shared_pointer(fx.Float32, self._word(self._thread, stage)), value)

    def of_row(self, fragment: int, stage: Any) -> Any:
        return self._read(fx.Float32, self._words + 16 * fragment, stage)

    def before(self, acc: Any, of_row: Any) -> Any:
        return acc * of_row

    def row_at_end(self, fragment: int, stage: Any) -> Any:
        return self.of_row(fragment, stage)


class Ptpc(Scaling):
    """Nothing in LDS: scales are read at the end."""

    def row_at_end(self, fragment: int, stage: Any) -> Any:
        rows = bounded(*self._rows_of_a(fx.Int32(0), 1, 0))
        return load_word(fx.Float32, rows, (self._first[0] + 16 * fragment + self._r) * WORD)

    def columns_at_end(self, column0: Any) -> Any:
        nbytes = (self.n - self._tile.col0) * WORD
        columns = bounded(self._args.b_scale + fx.Int64(self._tile.col0) * WORD, nbytes)
        halves = [load_words(fx.Float32, columns, (column0 + i) * WORD, 4) for i in (0, 4)]
        return halves[0].shuffle(halves[1], list(range(8)))


class Mxfp8(Scaling):
    """A thread for each row of the tile, then one for each 32 columns: four scales, for 128 k, in a word."""

    kinds = 1

    def open(self, at: Any, tile: Tile, args: Any, thread: Any, wave: Any, first: tuple[Any, Any]) -> None:
        super().open(at, tile, args, thread, wave, first)
        self._is_a = wave * 64 < self.shape.rows
        pitch = self._is_a.select(args.a_scale_pitch, args.b_scale_pitch)
        self._own = (thread - self._is_a.select(fx.Int32(0), fx.Int32(self.shape.rows))) * pitch * WORD

    def fetch(self, block: Any, stage: Any) -> None:
        a, a_bytes = self._rows_of_a(block, self._args.a_scale_pitch, 1)
        b, b_bytes = self._columns_of_b(block)
        source = bounded(self._is_a.select(a, b), self._is_a.select(a_bytes, b_bytes))
        self._fetch(source, self._own, stage)

    def _columns_of_b(self, block: Any) -> tuple[Any, Any]:
        first, pitch = self._tile.col0 // 32, self._args.b_scale_pitch
        count = smaller(-(-self.n // 32) - first, self.shape.cols // 32)
        address = fx.Int64(first) * fx.Int64(pitch) + self._last(block)
        return self._args.b_scale + address * WORD, _nbytes(count, pitch)

    def of_row(self, fragment: int, stage: Any) -> Any:
        return self._byte(self._first[0] + 16 * fragment + self._r, stage)

    def of_columns(self, fragment: int, stage: Any) -> Any:
        return self._byte(self.shape.rows + self._first[1] // 32 + fragment // 2, stage)

    def _byte(self, word: Any, stage: Any) -> Any:
        """This lane's 32 k of the block in the low byte; what is above it is not looked at."""
        return fx.Int32(fx.Uint32(self._read(fx.Int32, word, stage)) >> fx.Uint32(8 * self._g))

    def multiply(self, columns: Any, rows: Any, acc: Any, of_columns: Any, of_row: Any) -> Any:
        return multiply(columns, rows, acc, (of_columns, of_row))


SCALINGS: dict[str, type[Scaling]] = {"blockscale": Blockscale, "ptpc": Ptpc, "mxfp8": Mxfp8}
