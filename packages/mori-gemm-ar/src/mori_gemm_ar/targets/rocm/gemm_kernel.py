# mypy: disable-error-code="import-untyped, no-untyped-call, untyped-decorator"
"""C = A * B^T for fp8 operands with scales, bf16 out: the device code. gemm.py makes its arguments.

A workgroup of 8 waves computes one tile. Waves 0-3, the first group, have its upper rows, waves 4-7 its lower
rows; a wave of each shares a SIMD. A block of 128 k takes four phases, a barrier behind each:

    La   fragments and scales of the columns and of half of the wave's rows into registers; the sums of these
         rows are rescaled
    Ma   their matrix instructions, and nothing else
    Lb   the other half of the rows
    Mb   their matrix instructions

The second group is one phase behind: on every SIMD one wave multiplies while the other loads. Panels lie in
LDS in two stages, and phases 4k .. 4k+3 are the first group's for block k, 4k+1 .. 4k+4 the second's:

    phase           0    1    2    3    4    5    6    7    8
    first group     L0a  M0a  L0b  M0b  L1a  M1a  L1b  M1b  L2a
    second group         L0a  M0a  L0b  M0b  L1a  M1a  L1b  M1b

  (1) A wave starts its share of the DMA of block k+1 in its phase La of block k, so in phase 4k or later.
      Both groups have loaded block k-1 out of that stage by then: the second in phase 4k-1, and each wave has
      the data in its registers before the barrier behind a load phase.
  (2) It waits for that share at the end of its phase Lb, in phase 4k+3 or before. Both groups load block k+1
      from phase 4k+4 on, behind the barrier. The DMA has three phases to arrive.
  (3) Scales that a wave writes for block k+1 in its phase La of block k are read from phase 4k+4 on.

Then each lane rounds its sums to bf16, once, and stores them where the Wire says.
"""

import functools
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from mori_shmem.device.flydsl.bounded import bounded, store16_bounded

from mori_gemm_ar.targets.rocm.gemm_device import BLOCK, NOWHERE, in_agprs, meet, set_priority, wait_for_dma
from mori_gemm_ar.targets.rocm.gemm_panels import Panel
from mori_gemm_ar.targets.rocm.gemm_scales import SCALINGS
from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.tiles import TileShape, larger
from mori_gemm_ar.targets.rocm.wire import Arguments, Wire

WIRE_BYTES = 64

# Sums that are rescaled have to be in the 128 registers that all instructions can use, which 32 sums fill
# alone. Left to itself the compiler moves some in and out between matrix instructions: 82 wait states per
# block. With 3 of 16 sums moved before the matrix instructions it is 28; with 2, 48; with 4, 27 and 20 more
# moves. Eight, or results moved as well: spills.
FULL, HALF, IN_AGPRS = 32, 16, 3


@fx.struct
class Product:
    """The arguments: one rank's operands, and its wire's.

    a_pitch, b_pitch   bytes between rows
    a_scale_pitch      words between blocks of k (blockscale), or between rows (mxfp8)
    b_scale_pitch      words between blocks of columns; blocks of k follow each other
    where              the wire's own
    """

    a: fx.Int64
    b: fx.Int64
    a_scale: fx.Int64
    b_scale: fx.Int64
    where: fx.Int64
    m: fx.Int32
    k: fx.Int32
    a_pitch: fx.Int32
    b_pitch: fx.Int32
    a_scale_pitch: fx.Int32
    b_scale_pitch: fx.Int32


class Workgroup:
    """One workgroup's tile while the kernel is traced."""

    def __init__(self, quant: str, n: int, shape: TileShape, wire: Wire) -> None:
        self.n, self.shape, self.wire = n, shape, wire
        self.scaling = SCALINGS[quant](shape, n)
        self.down, self.across = shape.wave_rows // 16, shape.wave_cols // 16

    def open(self, args: Any, lds: list[Any]) -> None:
        """Which tile it is, and where everything lies. lds: a, b, scales, the wire's own."""
        shape, thread, self.num_blocks = self.shape, fx.thread_idx.x, args.k // BLOCK
        self.lane = thread % 64
        wave = fx.Int32(fx.rocdl.readfirstlane(fx.Int32.ir_type, (thread // 64).ir_value()))
        waves_across = shape.WAVES // shape.waves_down
        self.is_first, self.is_second = wave < shape.WAVES // 2, wave >= shape.WAVES // 2
        self.first_row, self.first_col = (
            wave // waves_across * shape.wave_rows,
            wave % waves_across * shape.wave_cols,
        )

        self.wire.begin(Arguments(args.m, args.where, lds[3], self.n, shape))
        self.tile = self.wire.order(fx.block_idx.x)
        self.a = Panel(lds[0], shape.rows, shape.WAVES, columns_of_c=False)
        self.b = Panel(lds[1], shape.cols, shape.WAVES, columns_of_c=True)
        self.a.open(args.a, args.a_pitch, self.tile.row0, args.m, args.k, wave, self.lane)
        self.b.open(args.b, args.b_pitch, self.tile.col0, fx.Int32(self.n), args.k, wave, self.lane)
        self.a.face(self.first_row, self.lane)
        self.b.face(self.first_col, self.lane)
        self.scaling.open(lds[2], self.tile, args, thread, wave, (self.first_row, self.first_col))

    @flyc.jit
    def product(self) -> Any:
        """The wave's sums, [down * across] fragments, in units that `store` knows."""
        first = fx.Int32(0)
        self.scaling.begin()
        self._fetch(first, first)
        sums = [fx.Vector.filled(4, 0.0, fx.Float32) for _ in range(self.down * self.across)]
        wait_for_dma()
        state = self.scaling.start()
        meet()
        if self.is_second:
            meet()
        for step in range(self.num_blocks):
            block = fx.Int32(step)
            stage = block % 2
            self._fetch(block + 1, 1 - stage)
            state = self.scaling.put(block + 1, 1 - stage, state)
            columns = self._load_columns(stage)
            sums, rows = self._load_rows(sums, 0, stage)
            meet()
            sums = self._multiply(sums, 0, columns, rows)
            meet()
            sums, rows = self._load_rows(sums, 1, stage)
            wait_for_dma()
            meet()
            sums = self._multiply(sums, 1, columns, rows)
            meet()
        if self.is_first:
            meet()
        self.scaling.finish(self.num_blocks % 2, state)
        return sums

    def _fetch(self, block: Any, stage: Any) -> None:
        """Behind the last block there is nothing: zeros, without a branch."""
        column = (block < self.num_blocks).select(block * BLOCK, fx.Int32(NOWHERE))
        self.a.fetch(column, stage)
        self.b.fetch(column, stage)
        self.scaling.fetch(block, stage)

    def _load_columns(self, stage: Any) -> tuple[list[Any], list[Any]]:
        """Fragments of B, and what they are scaled with."""
        scales = [self.scaling.of_columns(j, stage) for j in range(self.across)]
        return [self.b.fragment(j, stage) for j in range(self.across)], scales

    def _load_rows(
        self, sums: list[Any], half: int, stage: Any
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        """All sums, those of a half in this block's units; the half's fragments of A and their scales."""
        scales = [self.scaling.of_row(i, stage) for i in self._rows_of(half)]
        rows = [self.a.fragment(i, stage) for i in self._rows_of(half)]
        new = list(sums)
        for i, scale in zip(self._rows_of(half), scales, strict=True):
            for at in range(i * self.across, (i + 1) * self.across):
                new[at] = self.scaling.before(sums[at], scale)
                if self.scaling.rescales and len(sums) == FULL and at % HALF >= HALF - IN_AGPRS:
                    new[at] = in_agprs(new[at])
        return new, (rows, scales)

    def _multiply(self, sums: list[Any], half: int, columns: Any, rows: Any) -> list[Any]:
        """One block added to a half's sums, at a higher priority than the wave that loads."""
        set_priority(1)
        new = list(sums)
        for i, row, of_row in zip(self._rows_of(half), *rows, strict=True):
            for j, (column, of_column) in enumerate(zip(*columns, strict=True)):
                at = i * self.across + j
                new[at] = self.scaling.multiply(column, row, sums[at], of_column, of_row)
        set_priority(0)
        return new

    def _rows_of(self, half: int) -> range:
        """Fragments of the wave's rows."""
        each = self.down // 2
        return range(half * each, (half + 1) * each)

    def store(self, sums: list[Any]) -> None:
        """Eight columns of a row at a time: fragments j and j + 1 lie side by side in a lane."""
        n, tile, pitch, end = self.n, self.tile, 2 * self.n, self.num_blocks % 2
        nbytes = larger(tile.rows * pitch - tile.col0 * 2, 0)
        target = bounded(self.wire.address(tile) + fx.Int64(tile.col0) * 2, nbytes)
        rows = [self.scaling.row_at_end(i, end) for i in range(self.down)]
        for pair in range(self.across // 2):
            column = self.first_col + 32 * pair + self.lane // 16 * 8
            of_columns = self.scaling.columns_at_end(column)
            for i in range(self.down):
                first = i * self.across + 2 * pair
                value = sums[first].shuffle(sums[first + 1], list(range(8)))
                for factor in (rows[i], of_columns):
                    value = value if factor is None else value * factor
                offset = (self.first_row + 16 * i + self.lane % 16) * pitch + column * 2
                if n % self.shape.cols:
                    offset = (tile.col0 + column < n).select(offset, fx.Int32(-1))
                words = value.to(fx.BFloat16).bitcast(fx.Int32)
                fx.rocdl.sched_barrier(0)  # one row after the other: all at once take too many registers
                store16_bounded(target, offset, words, through=self.wire.writethrough)


@functools.cache
def gemm_kernel(quant: str, n: int, shape: TileShape, wire: Wire) -> Kernel:
    """For [*, k] x [n, k], any k that is a multiple of 128, n of 8. Takes a Product, a workgroup per tile."""
    workgroup = Workgroup(quant, n, shape, wire)

    @fx.struct
    class Shared:
        scales: fx.Array[fx.Uint8, max(16, workgroup.scaling.lds_bytes), 16]  # first: short addresses
        wire: fx.Array[fx.Uint8, WIRE_BYTES, 16]
        a: fx.Array[fx.Uint8, 2 * shape.rows * BLOCK, 16]
        b: fx.Array[fx.Uint8, 2 * shape.cols * BLOCK, 16]

    @flyc.kernel(name=f"gemm_{quant}_{shape}_{wire.name}")
    def gemm(args: Product, blocks: fx.Int32) -> None:
        shared = fx.SharedAllocator().allocate(Shared).peek()
        parts = (shared.a, shared.b, shared.scales, shared.wire)
        workgroup.open(args, [fx.Int32(fx.ptrtoint(part.ptr)) for part in parts])
        sums = workgroup.product()
        meet()
        workgroup.store(sums)
        wire.tile_done(workgroup.tile)

    return Kernel(gemm, Product, shape.threads)
