# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"
"""C = A * B^T for fp8 operands with scales, bf16 out: the device code. gemm.py launches it.

A workgroup of 8 waves computes one tile. Per block of 128 k, with two stages of LDS:

    wait for my own DMA into stage k mod 2; barrier      all of the block is there, and block k-1 is read
    start the DMA of block k+1 into the other stage       it has the whole of the products to arrive
    scale words of block k+1 into LDS; load those of block k+2
    products: fragments of B stay in registers, fragments of A pass by

Then each lane rounds its sums to bf16, once, and stores them where the Wire says.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from mori_gemm_ar.targets.rocm.gemm_device import BLOCK, buffer, store_16_bytes
from mori_gemm_ar.targets.rocm.gemm_panels import Panel
from mori_gemm_ar.targets.rocm.gemm_scales import SCALINGS, WORD
from mori_gemm_ar.targets.rocm.tiles import TileShape, larger
from mori_gemm_ar.targets.rocm.wire import Arguments, Wire

WRITETHROUGH = 17
WIRE_BYTES = 64
NOWHERE = 1 << 30  # behind the end of every buffer: its loads give 0
HINTS = {"llvm_options": {"amdgpu-mfma-vgpr-form": True}}


@dataclass(frozen=True)
class Operands:
    """The kernel's first arguments."""

    a: Any
    b: Any
    a_scale: Any
    b_scale: Any
    m: Any
    a_pitch: Any  # bytes between rows
    b_pitch: Any
    a_scale_pitch: Any  # elements between blocks of k
    b_scale_pitch: Any  # elements between blocks of columns


class Workgroup:
    """One workgroup's tile while the kernel is traced."""

    def __init__(self, quant: str, n: int, k: int, shape: TileShape, wire: Wire) -> None:
        self.n, self.k, self.shape, self.wire = n, k, shape, wire
        self.num_blocks = k // BLOCK
        self.scaling = SCALINGS[quant](shape, n, self.num_blocks)
        self.down, self.across = shape.wave_rows // 16, shape.wave_cols // 16

    def open(self, operands: Operands, wire_arguments: tuple[Any, Any], lds: list[Any]) -> None:
        """Which tile it is, and where everything lies. lds: a, b, scales, the wire's own."""
        shape, thread = self.shape, fx.thread_idx.x
        self.lane = thread % 64
        wave = fx.Int32(fx.rocdl.readfirstlane(fx.Int32.ir_type, (thread // 64).ir_value()))
        waves_across = shape.WAVES // shape.waves_down
        self.first_row, self.first_col = (
            wave // waves_across * shape.wave_rows,
            wave % waves_across * shape.wave_cols,
        )

        self.wire.begin(Arguments(operands.m, *wire_arguments, lds[3], self.n, shape))
        self.tile = self.wire.order(fx.block_idx.x)
        self.a = Panel(lds[0], shape.rows, shape.WAVES, columns_of_c=False)
        self.b = Panel(lds[1], shape.cols, shape.WAVES, columns_of_c=True)
        self.a.open(operands.a, operands.a_pitch, self.tile.row0, operands.m, self.k, wave, self.lane)
        self.b.open(operands.b, operands.b_pitch, self.tile.col0, fx.Int32(self.n), self.k, wave, self.lane)
        self.a.face(self.first_row, self.lane)
        self.b.face(self.first_col, self.lane)
        self.scaling.open(lds[2], self.tile, operands, thread, (self.first_row, self.first_col))

    @flyc.jit
    def product(self) -> Any:
        """The wave's sums, [down * across] fragments, in units that `store` knows."""
        zero = fx.Int32(0)
        state = self.scaling.put(zero, self.scaling.start(), self.scaling.load(zero))
        loaded = self.scaling.load(fx.Int32(1))
        self._fetch(zero, zero)
        sums = [fx.Vector.filled(4, 0.0, fx.Float32) for _ in range(self.down * self.across)]
        for step in range(self.num_blocks):
            block = fx.Int32(step)
            stage = block % 2
            fx.rocdl.asyncmark()
            fx.rocdl.wait_asyncmark(0)
            fx.barrier()
            state = self.scaling.put(1 - stage, state, loaded)
            loaded = self.scaling.load(block + 2)
            self._fetch(block + 1, 1 - stage)
            sums = self._multiplied(sums, stage)
        fx.rocdl.asyncmark()
        fx.rocdl.wait_asyncmark(0)
        self.scaling.finish(fx.Int32(self.num_blocks % 2), state)
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
        """Eight columns of a row at a time: fragments j and j + 1 of the columns lie side by side in a lane."""
        n, tile, pitch, end = self.n, self.tile, 2 * self.n, fx.Int32(self.num_blocks % 2)
        nbytes = larger(tile.rows * pitch - tile.col0 * 2, 0)
        target = buffer(self.wire.address(tile) + fx.Int64(tile.col0) * 2, fx.Int64(nbytes))
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
                store_16_bytes(target, offset, words, WRITETHROUGH if self.wire.writethrough else 0)


def gemm_kernel(quant: str, n: int, k: int, shape: TileShape, wire: Wire) -> Any:
    """A launcher for [*, k] x [n, k], k a multiple of 128, n of 8."""
    workgroup = Workgroup(quant, n, k, shape, wire)

    @fx.struct
    class Shared:
        a: fx.Array[fx.Uint8, 2 * shape.rows * BLOCK, 16]
        b: fx.Array[fx.Uint8, 2 * shape.cols * BLOCK, 16]
        scales: fx.Array[fx.Uint8, max(16, 2 * workgroup.scaling.num_slots * WORD), 16]
        wire: fx.Array[fx.Uint8, WIRE_BYTES, 16]

    @flyc.kernel(name=f"gemm_{quant}_{shape}_{wire.name}")
    def gemm(
        a: fx.Int64,
        b: fx.Int64,
        a_scale: fx.Int64,
        b_scale: fx.Int64,
        m: fx.Int32,
        a_pitch: fx.Int32,
        b_pitch: fx.Int32,
        a_scale_pitch: fx.Int32,
        b_scale_pitch: fx.Int32,
        where: fx.Int64,
        call: fx.Int64,
    ):
        shared = fx.SharedAllocator().allocate(Shared).peek()
        parts = (shared.a, shared.b, shared.scales, shared.wire)
        operands = Operands(a, b, a_scale, b_scale, m, a_pitch, b_pitch, a_scale_pitch, b_scale_pitch)
        workgroup.open(operands, (where, call), [fx.Int32(fx.ptrtoint(part.ptr)) for part in parts])
        sums = workgroup.product()
        fx.barrier()
        workgroup.store(sums)
        wire.tile_done(workgroup.tile)

    @flyc.jit
    def launch(
        a: fx.Int64,
        b: fx.Int64,
        a_scale: fx.Int64,
        b_scale: fx.Int64,
        m: fx.Int32,
        a_pitch: fx.Int32,
        b_pitch: fx.Int32,
        a_scale_pitch: fx.Int32,
        b_scale_pitch: fx.Int32,
        where: fx.Int64,
        call: fx.Int64,
        num_tiles: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):
        gemm(
            a,
            b,
            a_scale,
            b_scale,
            m,
            a_pitch,
            b_pitch,
            a_scale_pitch,
            b_scale_pitch,
            where,
            call,
        ).launch(grid=(num_tiles, 1, 1), block=(shape.threads, 1, 1), stream=stream)

    return flyc.compile[HINTS](launch)
