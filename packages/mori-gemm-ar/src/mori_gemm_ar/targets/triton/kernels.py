"""The op's mathematics in Triton, to be read beside the CUDA kernel, and to run where no CUDA compiler may.

    gemm       C = bf16(sum over blocks of k of (A . B) * (scale of A * scale of B)), a tile a program
    reduce     my slice: the W ranks' bf16 partial sums added in fp32 in rank order, rounded once
    quantize   finished rows to e4m3 codes with one fp32 scale a row, amax / 448
    pull       one owner's finished rows into my output; codes are widened on the way

Pointers come as plain addresses (mori_shmem.device.triton_addresses). Everything that is stored is bytes that
we made ourselves: the interpreter truncates where a GPU rounds, and knows no NaN of e4m3.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from mori_shmem.device.triton_addresses import floats, halves, octets, words

SMALLEST_SCALE = tl.constexpr(2.0**-126)


# ---- formats ----


@triton.jit
def float_of(bits):
    """The fp32 number with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def from_bf16(bits):
    """fp32 from the 16 bits of a bf16."""
    return float_of(bits.to(tl.int32) << 16)


@triton.jit
def to_bf16(x):
    """The bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def from_e4m3(code):
    """fp32 from a code."""
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def to_e4m3(x):
    """The nearest code, ties to even, of a number of at most 448; NaN is 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # bias 127 to 7, 3 bits kept
    # Below 2^-6 codes are multiples of 2^-9: the last place of 2^14, so that adding it rounds.
    small = (float_of(magnitude) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < (121 << 23), small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_ue8m0(code):
    """fp32 from a power of two: 0 is 2^-127, 255 is NaN."""
    exponent = code.to(tl.int32)
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    return float_of(tl.where(exponent == 255, 0x7FC00000, bits))


@triton.jit
def dot(a, b, INTERPRETED: tl.constexpr):
    """a . b in fp32 of e4m3 codes. The interpreter is given their values."""
    if INTERPRETED:
        product = tl.dot(from_e4m3(a), from_e4m3(b), input_precision="ieee")
    else:
        product = tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
    return product


@triton.jit
def scales_at(address, offsets, mask, UE8M0: tl.constexpr):
    """fp32 scales; 1 where the mask is off."""
    if UE8M0:
        scales = from_ue8m0(tl.load(octets(address) + offsets, mask=mask, other=127))
    else:
        scales = tl.load(floats(address) + offsets, mask=mask, other=1.0)
    return scales


# ---- the product ----


@triton.jit
def gemm(
    a,  # [m, k] codes, rows a_pitch apart
    b,  # [n, k] codes, rows b_pitch apart
    a_scale,  # a scale for each row and block of k, strides a_row, a_column
    b_scale,  # a scale for each SCALE_ROWS rows and block of k, strides b_row, b_column
    out,  # [m, n] bf16, contiguous
    m,
    n,
    k,
    a_pitch,
    b_pitch,
    a_row,
    a_column,
    b_row,
    b_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # of a block of k: 32 under scales of 32, else 128
    SCALE_ROWS: tl.constexpr,  # of B under one scale
    UE8M0: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inner = tl.arange(0, DEPTH)
    in_rows, in_columns = rows < m, columns < n
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    a_codes = octets(a) + rows[:, None] * a_pitch
    b_codes = octets(b) + columns[None, :] * b_pitch
    for block in range(tl.cdiv(k, DEPTH)):
        at = block * DEPTH + inner
        left = tl.load(a_codes + at[None, :], mask=in_rows[:, None] & (at < k)[None, :], other=0)
        right = tl.load(b_codes + at[:, None], mask=(at < k)[:, None] & in_columns[None, :], other=0)
        of_rows = scales_at(a_scale, rows * a_row + block * a_column, in_rows, UE8M0)
        of_columns = scales_at(b_scale, columns // SCALE_ROWS * b_row + block * b_column, in_columns, UE8M0)
        total += dot(left, right, INTERPRETED) * (of_rows[:, None] * of_columns[None, :])
    to = halves(out) + rows[:, None] * n + columns[None, :]
    tl.store(to, to_bf16(total), mask=in_rows[:, None] & in_columns[None, :])


# ---- the collective, a run of elements or a row a program ----


@triton.jit
def reduce(sources, first, out, num_elements, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """sources # [WORLD_SIZE] addresses, in rank order, of bf16, of which the elements from `first` on"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < num_elements
    table = words(sources)
    total = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(0, WORLD_SIZE):
        part = tl.load(table + source).to(tl.pointer_type(tl.int16))
        x = from_bf16(tl.load(part + first + at, mask=here, other=0))
        total = x if source == 0 else total + x  # not 0 + x, which would make 0 of -0
    tl.store(halves(out) + at, to_bf16(total), mask=here)


@triton.jit
def quantize(rows, codes, scales, n, BLOCK: tl.constexpr):
    """One row a program. A row of zeros gets scale 1, one with a NaN or an infinity scale and codes NaN."""
    row = tl.program_id(0).to(tl.int64)
    source = halves(rows) + row * n
    largest = 0  # the bits of magnitudes are in the order of the numbers, NaN above all
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(source + at, mask=at < n, other=0).to(tl.int32) & 0x7FFF
        largest = tl.maximum(largest, tl.max(bits, axis=0))
    amax = from_bf16(largest)
    scale = tl.maximum(tl.div_rn(amax, 448.0), SMALLEST_SCALE)
    scale = tl.where(largest == 0, 1.0, scale)
    scale = tl.where(largest >= 0x7F80, float("nan"), scale)
    tl.store(floats(scales) + row, scale)
    target = octets(codes) + row * n
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = from_bf16(tl.load(source + at, mask=at < n, other=0))
        tl.store(target + at, to_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale)), mask=at < n)


@triton.jit
def pull(source, scales, out, n, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: bf16 as it is, codes times their row's scale."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, first = at < n, row * n
    if FP8:
        code = tl.load(octets(source) + first + at, mask=here, other=0)
        scale = tl.load(floats(scales) + row)
        bits = to_bf16(from_e4m3(code) * scale)
    else:
        bits = tl.load(halves(source) + first + at, mask=here, other=0)
    tl.store(halves(out) + first + at, bits, mask=here)
