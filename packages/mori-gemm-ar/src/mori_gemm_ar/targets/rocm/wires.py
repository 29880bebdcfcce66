"""Where the partial sums of the fused modes go, tile by tile (wire.py has the interface).

ToQueues  fused-sdma. Tiles are stored in C, past all caches. In tile_done, for a tile of a peer's slice:
            1. each wave waits for its own stores: they are in memory then
            2. the workgroup meets, so all of the tile is
            3. one thread adds 1 to the counter of (owner, chunk)
            4. who brings it to the number of the chunk's tiles posts the chunk: a copy to the owner's landing
               slot, and behind it 1 is added to `arrived` there
          A counter is never reset, so that a replayed launch works like the first: `then`, noted when the
          call began, is where it stood, and the chunk is complete tiles_per_chunk above. Whatever M the calls
          before had. Two chunks may be posted to one queue at the same time: a put takes its place in the
          ring by an atomic addition and its turn at the doorbell in that order, so there is no lock.
ToPeers   fused-lsa. Tiles are stored straight into the owner's landing slot, past all caches: the kernel's
          end may write back what is at home here, but need not write back what is not. `meet` tells the
          owners.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev

from mori_gemm_ar.options import MAX_PARTS
from mori_gemm_ar.targets.rocm.regions import WORD_BYTES
from mori_gemm_ar.targets.rocm.tiles import Slices, Tile, tile_at
from mori_gemm_ar.targets.rocm.wire import Arguments, Wire

# The 64-bit words at `where`, in this order.
WORDS = (
    *("base", "stride", "rank", "num_ranks", "slice_rows", "bands", "band_rows", "bands_per_chunk"),
    *("c", "landing", "queues", "arrived", "tiles", "then"),
)


class _Sliced(Wire):
    """A wire of slices: its table says how rows are cut and where windows lie."""

    writethrough = True

    def begin(self, args: Arguments) -> None:
        """Read the table."""
        words = (
            fx.generic_load(dev.pointer(fx.Int64, args.where + i * WORD_BYTES, 8)) for i in range(len(WORDS))
        )
        self._args, table = args, dict(zip(WORDS, words, strict=True))
        for name in WORDS[2:8]:
            table[name] = fx.Int32(table[name])
        self._table: dict[str, Any] = table
        self._window = dev.window(table["base"], table["stride"], table["rank"])
        cut = (table[name] for name in WORDS[3:8])
        self._slices = Slices(args.m, table["rank"], *cut)

    def order(self, index: Any) -> Tile:
        """Remote slices first."""
        return tile_at(index, self._slices, self._args.shape, self._args.n)

    def _landing(self, owner: Any, row: Any) -> Any:
        """A row of the whole matrix in the owner's slot for me."""
        row_of_slice = fx.Int64(row - owner * self._slices.slice_rows)
        slot = dev.peer_address(self._window, owner, self._table["landing"])
        return slot + row_of_slice * (self._args.n * 2)


class ToPeers(_Sliced):
    """fused-lsa."""

    name = "peers"

    def address(self, tile: Tile) -> Any:
        """In the landing slot."""
        return self._landing(tile.owner, tile.row0)

    def tile_done(self, tile: Tile) -> None:
        """In the owner's memory when this wave ends; `meet` tells it, after this kernel."""
        dev.wait_stores()


class ToQueues(_Sliced):
    """fused-sdma."""

    name = "queues"

    def address(self, tile: Tile) -> Any:
        """In C."""
        return self._c(tile.row0)

    def _c(self, row: Any) -> Any:
        return dev.my_address(self._window, self._table["c"]) + fx.Int64(row) * (self._args.n * 2)

    @flyc.jit
    def tile_done(self, tile):
        """See the module."""
        dev.wait_stores()
        fx.barrier()
        if (fx.thread_idx.x == 0) & (tile.owner != self._slices.rank):
            counter = self._table["tiles"] + fx.Int64(tile.owner * MAX_PARTS + tile.chunk) * WORD_BYTES
            before = dev.add_agent(counter, 1) - dev.load_agent(counter + self._table["then"])
            column_tiles = -(-self._args.n // self._args.shape.cols)
            if before == fx.Int64(self._slices.bands_per_chunk * column_tiles - 1):
                self._post(tile)

    def _post(self, tile):
        """The whole chunk to its owner."""
        cut = self._slices
        chunk_rows, slice_start = cut.bands_per_chunk * cut.band_rows, tile.owner * cut.slice_rows
        first = slice_start + tile.chunk * chunk_rows
        stop = fx.min(first + chunk_rows, slice_start + cut.slice_rows, self._args.m)
        nbytes = fx.Int64(fx.max(stop - first, 0)) * (self._args.n * 2)
        queue = dev.open_queue(dev.queue_address(self._table["queues"], fx.Int64(tile.owner)))
        arrived = dev.peer_address(self._window, tile.owner, self._table["arrived"])
        dev.put(queue, self._landing(tile.owner, first), self._c(first), nbytes, signal=(arrived, 1))
