"""Finished bf16 rows to fp8, and landed fp8 rows to bf16: a wave for each row."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
import functools

import flydsl.compiler as flyc
import flydsl.expr as fx

from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.rows import LANES, held_row, store_narrowed, widen_row

THREADS = 256
WAVES = THREADS // LANES


@fx.struct
class Narrow:
    """rows: how many; values: where they begin, bf16."""

    values: fx.Int64
    codes: fx.Int64
    scales: fx.Int64
    rows: fx.Int32


@functools.cache
def quantizer(n: int) -> Kernel:
    """`quantize`: codes, scales = values."""

    @flyc.kernel
    def quantize(args: Narrow, blocks: fx.Int32):
        lane, wave = fx.thread_idx.x % LANES, fx.thread_idx.x // LANES
        for row in range(fx.block_idx.x * WAVES + wave, args.rows, blocks * WAVES):
            at = fx.Int64(row)
            packs = held_row(n, args.values + at * (2 * n), lane)
            store_narrowed(packs, n, args.codes + at * n, args.scales + at * 4, lane)

    return Kernel(quantize, Narrow, THREADS)


@fx.struct
class Widen:
    """Rows of the whole matrix: those of owner o, `slice_rows` of them, lie from row o * slot_rows of codes
    on."""

    codes: fx.Int64
    scales: fx.Int64
    out: fx.Int64
    m: fx.Int32
    slice_rows: fx.Int32
    slot_rows: fx.Int32


@functools.cache
def dequantizer(n: int) -> Kernel:
    """`dequantize`: out = codes * scales."""

    @flyc.kernel
    def dequantize(args: Widen, blocks: fx.Int32):
        lane, wave = fx.thread_idx.x % LANES, fx.thread_idx.x // LANES
        for row in range(fx.block_idx.x * WAVES + wave, args.m, blocks * WAVES):
            at = fx.Int32(row)
            place = fx.Int64(at // args.slice_rows * args.slot_rows + at % args.slice_rows)
            out = args.out + fx.Int64(row) * (2 * n)
            widen_row(n, args.codes + place * n, args.scales + place * 4, out, lane)

    return Kernel(dequantize, Widen, THREADS)
