# mypy: disable-error-code="import-untyped, no-untyped-call, untyped-decorator"
"""C = A * B^T for fp8 operands with scales, bf16 out: the device code. gemm.py launches it.

A workgroup of 8 waves computes one tile. Per block of 128 k, with two stages of LDS:

    wait for my own DMA into stage k mod 2; barrier      all of the block is there, and block k-1 is read
    start the DMA of block k+1 into the other stage       it has the whole of the products to arrive
    scale words of block k+1 into LDS; load those of block k+2
    products: fragments of B stay in registers, fragments of A pass by

Then each lane rounds its sums to bf16, once, and stores them where the Wire says.
"""

import functools
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from mori_shmem.device.flydsl.bounded import bounded, store16_bounded

from mori_gemm_ar.targets.rocm.gemm_device import BLOCK, NOWHERE, wait_for_dma
from mori_gemm_ar.targets.rocm.gemm_panels import Panel
from mori_gemm_ar.targets.rocm.gemm_scales import SCALINGS
from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.tiles import TileShape, larger
from mori_gemm_ar.targets.rocm.wire import Arguments, Wire

WIRE_BYTES = 64


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
        zero = fx.Int32(0)
        state = self.scaling.start()
        self._fetch(zero, zero)
        sums = [fx.Vector.filled(4, 0.0, fx.Float32) for _ in range(self.down * self.across)]
        for step in range(self.num_blocks):
            block = fx.Int32(step)
            stage = block % 2
            wait_for_dma()
            fx.barrier()
            self._fetch(block + 1, 1 - stage)
            self.scaling.fetch(block, stage)
            fx.rocdl.sched_barrier(0)
            state = self.scaling.put(block + 1, 1 - stage, state)
            sums = self._multiplied(sums, stage)
        wait_for_dma()
        self.scaling.finish(self.num_blocks % 2, state)
        return sums

    def _fetch(self, block: Any, stage: Any) -> None:
        """Behind the last block there is nothing: zeros, without a branch."""
        column = (block < self.num_blocks).select(block * BLOCK, fx.Int32(NOWHERE))
        self.a.fetch(column, stage)
        self.b.fetch(column, stage)

    def _multiplied(self, sums: list[Any], stage: Any) -> list[Any]:
        """`sums` with what lies in a stage."""
        of_columns = [self.scaling.of_columns(j, stage) for j in range(self.across)]
        columns = [self.b.fragment(j, stage) for j in range(self.across)]
        new = []
        for i in range(self.down):
            rows, of_row = self.a.fragment(i, stage), self.scaling.of_row(i, stage)
            for j in range(self.across):
                old = sums[i * self.across + j]
                new.append(self.scaling.step(old, columns[j], rows, of_columns[j], of_row))
        return new

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
                fx.rocdl.sched_barrier(
                    0
                )  # one row after the other: all at once need more registers than there are
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
        fx.barrier()
        workgroup.store(sums)
        wire.tile_done(workgroup.tile)

    return Kernel(gemm, Product, shape.threads)
