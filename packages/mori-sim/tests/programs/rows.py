"""Row kernels: fp8 quantising (a wave for each row), dequantising, and a sum of bf16 slices in fp32."""

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from device import pointer

LANES, ROWS_PER_GROUP, PER_LANE = 64, 2, 8
LIMIT = 448.0  # the largest finite e4m3 number
TINY = 1e-12
STRIP = LANES * PER_LANE


def lane_and_row():
    return fx.thread_idx.x % LANES, fx.block_idx.x * ROWS_PER_GROUP + fx.thread_idx.x // LANES


def by_rows(kernel):
    """The launcher of a kernel in which a wave takes a row; its pointers are passed on as they come."""

    @flyc.jit
    def launch(
        first: fx.Int64,
        second: fx.Int64,
        third: fx.Int64,
        height: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):
        kernel(first, second, third, height).launch(
            grid=(fx.ceildiv(height, ROWS_PER_GROUP), 1, 1),
            block=(LANES * ROWS_PER_GROUP, 1, 1),
            stream=stream,
        )

    return launch


def quantiser(width):
    strips = width // STRIP

    @flyc.kernel
    def quantise_rows(x: fx.Int64, codes: fx.Int64, scales: fx.Int64, height: fx.Int32):
        lane, row = lane_and_row()
        if row < height:
            source = pointer(fx.BFloat16, x, 16) + fx.Int64(row) * width
            target = pointer(fx.Int32, codes, 8) + fx.Int64(row) * (width // 4)
            held = [
                fx.generic_load(source + (i * LANES + lane) * PER_LANE, count=PER_LANE).to(fx.Float32)
                for i in range(strips)
            ]
            largest = fx.Float32(TINY)
            for values in held:
                for j in fx.range_constexpr(PER_LANE):
                    largest = fx.maxnumf(largest, fx.absf(values[j]))
            for distance in (1, 2, 4, 8, 16, 32):
                largest = fx.maxnumf(largest, fx.shuffle_xor(largest, distance, LANES))
            factor = fx.Float32(LIMIT) / largest
            for i in fx.range_constexpr(strips):
                scaled = [held[i][j] * factor for j in range(PER_LANE)]
                words = []
                for j in fx.range_constexpr(PER_LANE // 4):
                    four = scaled[4 * j : 4 * j + 4]
                    half = fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, four[0], four[1], fx.Int32(0), False)
                    words.append(
                        fx.Int32(fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, four[2], four[3], half, True))
                    )
                fx.generic_store(
                    target + (i * LANES + lane) * (PER_LANE // 4), fx.Vector.from_elements(words, fx.Int32)
                )
            if lane == 0:
                fx.generic_store(pointer(fx.Float32, scales, 4) + row, largest / fx.Float32(LIMIT))

    return by_rows(quantise_rows)


def dequantiser(width):
    strips = width // STRIP

    @flyc.kernel
    def dequantise_rows(codes: fx.Int64, scales: fx.Int64, y: fx.Int64, height: fx.Int32):
        lane, row = lane_and_row()
        if row < height:
            scale = fx.generic_load(pointer(fx.Float32, scales, 4) + row)
            source = pointer(fx.Int32, codes, 8) + fx.Int64(row) * (width // 4)
            target = pointer(fx.BFloat16, y, 16) + fx.Int64(row) * width
            for i in fx.range_constexpr(strips):
                words = fx.generic_load(source + (i * LANES + lane) * (PER_LANE // 4), count=PER_LANE // 4)
                values = []
                for j in fx.range_constexpr(PER_LANE // 2):
                    two = fx.Vector(fx.rocdl.cvt_pk_f32_fp8(fx.Float32x2.ir_type, words[j // 2], j % 2 == 1))
                    values += [two[0] * scale, two[1] * scale]
                fx.generic_store(
                    target + (i * LANES + lane) * PER_LANE,
                    fx.Vector.from_elements(values, fx.Float32).to(fx.BFloat16),
                )

    return by_rows(dequantise_rows)


def summer(num_slices, groups, items=256):
    @flyc.kernel
    def sum_slices(x: fx.Int64, slice_bytes: fx.Int64, y: fx.Int64, packs: fx.Int32):
        for i in range(fx.block_idx.x * items + fx.thread_idx.x, packs, groups * items):
            total = fx.Vector.filled(PER_LANE, 0.0, fx.Float32)
            for s in fx.range_constexpr(num_slices):
                part = pointer(fx.BFloat16, x + slice_bytes * s, 16) + fx.Int64(i) * PER_LANE
                total = total + fx.generic_load(part, count=PER_LANE, nontemporal=True).to(fx.Float32)
            fx.generic_store(pointer(fx.BFloat16, y, 16) + fx.Int64(i) * PER_LANE, total.to(fx.BFloat16))

    @flyc.jit
    def launch(
        x: fx.Int64, slice_bytes: fx.Int64, y: fx.Int64, packs: fx.Int32, stream: fx.Stream = fx.Stream(None)
    ):
        sum_slices(x, slice_bytes, y, packs).launch(grid=(groups, 1, 1), block=(items, 1, 1), stream=stream)

    return launch


# ---- what "right" means
def quantised(x):
    largest = x.float().abs().amax(1).clamp_min(TINY)
    return (x.float() * (LIMIT / largest)[:, None]).to(torch.float8_e4m3fn), largest / LIMIT


def dequantised(codes, scales):
    return (codes.float() * scales[:, None]).bfloat16()


def summed(x):
    total = torch.zeros(x.shape[1])
    for part in x:
        total = total + part.float()
    return total.bfloat16()
