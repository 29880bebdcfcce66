# mypy: disable-error-code="import-untyped"
"""Where the tiles of a GEMM go, in which order, and what is said when one is there.

One GEMM kernel serves every mode. It knows nothing of ranks, windows or queues; it asks a Wire, an object
that exists while the kernel is traced and whose methods emit device code:

    wire.begin(args)             once per workgroup, by all its threads: read what the wire needs
    tile = wire.order(index)     the tile of workgroup `index` (tiles.py)
    ... the product ...
    wire.address(tile)           where the tile's first row begins (column 0 of the matrix); the rows below it
                                 follow at n * 2 bytes. Uniform over the workgroup
    ... stores, with sc0 sc1 if wire.writethrough: 16 bytes per lane, 64 consecutive bytes of a row per four
        lanes; rows from tile.rows on and columns from n on are left out ...
    wire.tile_done(tile)         by all threads, once each has issued its own stores; nobody has waited for
                                 them yet, nobody has met the others. Called for empty tiles as well

So a wire that signals does, in tile_done: wait for this wave's stores, barrier, one thread counts and
signals. `args.shared` is an LDS address of 64 bytes for its own use there.
A method with control flow in it is decorated with @flyc.jit. What `begin` keeps on the object is the trace's,
and is overwritten by the next one. Two wires with equal `name` and equal n and shape must emit equal code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from mori_gemm_ar.targets.rocm.tiles import Slices, Tile, TileShape, larger, smaller, tile_at


@dataclass(frozen=True)
class Arguments:
    """What the kernel hands to its wire."""

    m: Any  # fx.Int32, rows of A
    where: Any  # fx.Int64, the wire's own: an address, or that of a table of 64-bit words in device memory
    shared: Any  # fx.Int32, address of 64 bytes of LDS that are the wire's
    n: int
    shape: TileShape


class Wire(ABC):
    """See the module."""

    name: str  # becomes part of the kernel's name
    writethrough: bool  # stores go through to memory (sc0 sc1), or may stay in this XCD's L2

    @abstractmethod
    def begin(self, args: Arguments) -> None:
        """Once per workgroup, before anything else."""

    @abstractmethod
    def order(self, index: Any) -> Tile:
        """The tile of workgroup `index`."""

    @abstractmethod
    def address(self, tile: Tile) -> Any:
        """fx.Int64: where the first row of the tile begins."""

    @abstractmethod
    def tile_done(self, tile: Tile) -> None:
        """All of this thread's stores of the tile have been issued."""


GROUP_BANDS = 8  # of tiles that run together: A and B panels of 8 x 3.5 tiles fit into an XCD's L2


class ToOutput(Wire):
    """gemm-only: all rows into one [m, n] matrix at `where`; nobody is told, the kernel's end is enough."""

    name, writethrough = "output", False

    def begin(self, args: Arguments) -> None:
        """Nothing is read."""
        self._args = args

    def order(self, index: Any) -> Tile:
        """One slice, its own."""
        return tile_at(index, one_slice(self._args.m, self._args.shape), self._args.shape, self._args.n)

    def address(self, tile: Tile) -> Any:
        """Row by row."""
        return self._args.where + fx.Int64(tile.row0) * (self._args.n * 2)

    def tile_done(self, tile: Tile) -> None:
        """Nobody waits."""


def one_slice(m: Any, shape: TileShape) -> Slices:
    """All m rows as one rank's slice, in chunks of up to 8 bands. On the host and in kernels."""
    bands = larger((m + (shape.rows - 1)) // shape.rows, 1)
    powers_of_two = bands & (0 - bands)  # the largest of them that divides the bands
    return Slices(m, 0, 1, m, bands, shape.rows, smaller(powers_of_two, GROUP_BANDS))
