"""Which tile a workgroup computes: remote slices first, chunk by chunk, each chunk spread over the XCDs.

Workgroup i of a launch computes tile `tile_at(i)`:
  1. The remote slices come first, the rank's own slice last. Chunk 0 of every remote slice, then chunk 1 of
     every one: each peer hangs on a link of its own, and all links want work from the beginning. The first
     owner is rank + 1, so no two ranks begin with the same destination.
  2. Within a chunk, workgroups of one XCD (i mod 8) get neighbouring tiles, column after column: they read
     the same panels of A and B through the same L2, and an XCD keeps its columns from chunk to chunk.
Every number here is an int on the host and may be a 32-bit DSL value in a kernel: only + - * // % & >> are
used, on values from 0 to 2^31 - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_XCDS = 8

Int = Any  # int on the host, fx.Int32 in a kernel


@dataclass(frozen=True)
class TileShape:
    """What one workgroup of 8 waves computes, and how its waves share it."""

    rows: int
    cols: int
    waves_down: int  # waves next to each other along M; the others lie along N

    WAVES = 8

    @property
    def threads(self) -> int:
        """Of a workgroup."""
        return 64 * self.WAVES

    @property
    def wave_rows(self) -> int:
        """Rows of C that one wave computes."""
        return self.rows // self.waves_down

    @property
    def wave_cols(self) -> int:
        """Columns of C that one wave computes."""
        return self.cols * self.waves_down // self.WAVES

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True)
class Slices:
    """How the rows of C are cut: into a slice for each owner, chunks of a slice, bands of a chunk.

    A band is what tiles are cut from: at most a tile's rows, and never over the end of a slice.
    """

    m: Int
    rank: Int  # whose slice comes last
    num_ranks: Int
    slice_rows: Int
    bands: Int  # of a slice
    band_rows: Int
    bands_per_chunk: Int  # divides `bands`

    def num_tiles(self, column_tiles: int) -> Int:
        """Workgroups of a launch."""
        return self.num_ranks * self.bands * column_tiles


@dataclass(frozen=True)
class Tile:
    """One workgroup's piece of C."""

    row0: Int  # first row, counted in the whole matrix
    rows: Int  # that exist: fewer at the end of a slice, 0 behind it
    col0: Int
    owner: Int  # whose slice it is in
    chunk: Int  # of that slice
    band: Int  # of that slice


def tile_at(index: Int, slices: Slices, shape: TileShape, n: int) -> Tile:
    """The tile of workgroup `index`. Each tile of the matrix belongs to exactly one workgroup."""
    column_tiles = -(-n // shape.cols)
    per_chunk = slices.bands_per_chunk * column_tiles
    group, place = index // per_chunk, index % per_chunk
    chunks, others = slices.bands // slices.bands_per_chunk, larger(slices.num_ranks - 1, 1)
    remote_groups = (slices.num_ranks - 1) * chunks
    own = negative(remote_groups - 1 - group)
    chunk = (1 - own) * (group // others) + own * (group - remote_groups)
    owner = (slices.rank + (1 - own) * (group % others + 1)) % slices.num_ranks

    place = spread(place, index - place, per_chunk)
    column, band = place // slices.bands_per_chunk, chunk * slices.bands_per_chunk
    band = band + place % slices.bands_per_chunk
    row0 = owner * slices.slice_rows + band * slices.band_rows
    end = smaller(slices.m, (owner + 1) * slices.slice_rows)
    rows = larger(smaller(slices.band_rows, end - row0), 0)
    return Tile(row0, rows, column * shape.cols, owner, chunk, band)


def spread(i: Int, start: Int, count: Int) -> Int:
    """A permutation of 0..count-1 that gives the workgroups of each XCD neighbouring values.

    i is counted from workgroup `start` on, so workgroup i runs on XCD (start + i) mod 8. The first
    count mod 8 XCDs from that of `start` on have one workgroup more.
    """
    first, xcd = start % NUM_XCDS, (start + i) % NUM_XCDS
    each, more = count // NUM_XCDS, count % NUM_XCDS
    longer = larger(smaller(xcd, first + more) - first, 0)  # lower XCDs among those with one more ...
    longer = longer + larger(smaller(xcd, first + more - NUM_XCDS), 0)  # ... also where these wrap around
    return xcd * each + longer + i // NUM_XCDS


def negative(x: Int) -> Int:
    """1 below zero, else 0."""
    return (x >> 31) & 1


def smaller(x: Int, y: Int) -> Int:
    """min(x, y) by arithmetic alone."""
    return y + (x - y) * negative(x - y)


def larger(x: Int, y: Int) -> Int:
    """max(x, y) by arithmetic alone."""
    return x - (x - y) * negative(x - y)
