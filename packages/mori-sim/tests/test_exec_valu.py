"""Vector instructions against NumPy and integer models, over edge values, with EXEC full and partly off.

Each case is one line of assembly over fixed registers: v10:v11 holds source 0, v12:v13 source 1, v14:v15 source 2,
v20:v21 the destination (preset to a pattern). Operands run over all pairs of the edge values of their type.
"""
# ruff: noqa: E501, E731  (one instruction, one line)

import math

import numpy as np
import pytest
from asm950 import LANES, run_lanes

F32 = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, 3.0, 1e-38, -1e-40, 1.4e-45, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan,
     16777216.0, 16777217.0, 2147483648.0, -2147483648.0, 4294967296.0, 0.1, 1e10, 1.0000001, 448.0, 464.0, 480.0, 0.0009765625, 240.0, 57344.0, 65520.0, 6.0],
    dtype=np.float32,
)  # fmt: skip
F16 = np.array(
    [
        0,
        -0.0,
        1,
        -1,
        0.5,
        1.5,
        -2.5,
        65504,
        -65504,
        np.inf,
        -np.inf,
        np.nan,
        6e-8,
        -6e-5,
        6.1e-5,
        2048,
        2049,
        0.1,
        3,
        1000,
    ],
    dtype=np.float16,
)
F64 = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.5,
        1e-310,
        1.7976931348623157e308,
        np.inf,
        -np.inf,
        np.nan,
        0.1,
        2.0**53 + 1,
        -3.0,
        4294967295.5,
        -2147483649.0,
    ],
    dtype=np.float64,
)
I32 = np.array(
    [
        0,
        1,
        2,
        31,
        32,
        33,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFFFF,
        0xFFFFFFFE,
        0x12345678,
        0x00FF00FF,
        0xFFFF,
        0x10000,
        0xFFFFFF,
        0x800000,
    ],
    dtype=np.uint32,
)
I16 = np.array([0, 1, 2, 15, 16, 0x7FFF, 0x8000, 0xFFFF, 0xFFFE, 0x1234, 0x00FF], dtype=np.uint32)
I64 = np.array(
    [
        0,
        1,
        63,
        0x7FFFFFFFFFFFFFFF,
        0x8000000000000000,
        0xFFFFFFFFFFFFFFFF,
        0x123456789ABCDEF0,
        0xFFFFFFFF,
        0x100000000,
    ],
    dtype=np.uint64,
)
EDGES = {"f": F32, "h": F16, "d": F64, "u": I32, "i": I32, "w": I16, "q": I64}
PARTLY_OFF = 0x0F0F_F00D_8000_0001


def words(values: np.ndarray, kind: str) -> list[np.ndarray]:
    """A column of values as one or two register images."""
    if kind in "dq":
        w = np.ascontiguousarray(values).view(np.uint32).reshape(-1, 2)
        return [w[:, 0], w[:, 1]]
    if kind == "h":
        return [np.ascontiguousarray(values).view(np.uint16).astype(np.uint32)]
    return [np.ascontiguousarray(values).view(np.uint32)]


def operand_sets(kinds: str) -> list[list[np.ndarray]]:
    """All combinations of edge values (thirds are drawn), in groups of 64 lanes."""
    rng = np.random.default_rng(5)
    pools = [EDGES[k] for k in kinds]
    grids = np.meshgrid(*[np.arange(len(p)) for p in pools[:2]], indexing="ij")
    columns = [p[g.ravel()] for p, g in zip(pools, grids, strict=False)]
    if len(pools) == 3:
        columns.append(pools[2][rng.integers(0, len(pools[2]), len(columns[0]))])
    n = -(-len(columns[0]) // LANES) * LANES
    columns = [np.resize(c, n) for c in columns]
    return [[c[i : i + LANES] for c in columns] for i in range(0, n, LANES)]


def execute(line: str, kinds: str, columns: list[np.ndarray], wide: bool, mask=None, **options) -> np.ndarray:
    inputs = {20: np.full(LANES, 0xDEADBEEF, np.uint32), 21: np.full(LANES, 0xDEADBEEF, np.uint32)}
    for k, column in enumerate(columns):
        for h, w in enumerate(words(column, kinds[k])):
            inputs[10 + 2 * k + h] = w
    out = run_lanes(line, inputs, [20, 21], exec_mask=mask, **options)
    return (out[20].astype(np.uint64) | out[21].astype(np.uint64) << 32) if wide else out[20]


def bits(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f":
        return np.asarray(values, np.float32).view(np.uint32)
    if kind == "d":
        return np.asarray(values, np.float64).view(np.uint64)
    if kind == "h":
        return np.asarray(values, np.float16).view(np.uint16).astype(np.uint32)
    if kind == "q":
        return np.asarray(values).astype(np.uint64)
    return (
        np.asarray(values).astype(np.int64).astype(np.uint32)
        if np.asarray(values).dtype.kind == "i"
        else np.asarray(values).astype(np.uint32)
    )


def is_nan(b: np.ndarray, kind: str) -> np.ndarray:
    view = {"f": (np.uint32, np.float32), "d": (np.uint64, np.float64), "h": (np.uint16, np.float16)}.get(
        kind
    )
    return np.isnan(b.astype(view[0]).view(view[1])) if view else np.zeros(b.shape, bool)


def check(line: str, kinds: str, result: str, model, **options) -> None:
    with np.errstate(all="ignore"):
        for columns in operand_sets(kinds):
            want = bits(model(*columns), result)
            got = execute(line, kinds, columns, result in "dq", **options)
            both = is_nan(want, result) & is_nan(got, result)  # a NaN's payload is not compared
            bad = np.flatnonzero(~both & (got != want))
            assert bad.size == 0, (
                line,
                [hex(int(words(c, k)[0][bad[0]])) for c, k in zip(columns, kinds, strict=True)],
                hex(int(got[bad[0]])),
                hex(int(want[bad[0]])),
            )
    columns = operand_sets(kinds)[0]
    with np.errstate(all="ignore"):
        want = bits(model(*columns), result)
    got = execute(line, kinds, columns, result in "dq", mask=PARTLY_OFF, **options)
    on = np.array([PARTLY_OFF >> i & 1 for i in range(LANES)], bool)
    keep = np.uint64(0xDEADBEEFDEADBEEF) if result in "dq" else np.uint32(0xDEADBEEF)
    assert (got[~on] == keep).all()
    assert ((got == want) | (is_nan(got, result) & is_nan(want, result)))[on].all()


def i(a):
    return a.view(np.int32).astype(np.int64)


def u(a):
    return a.astype(np.uint64)


def lo(a):
    return (a.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def s24(a):
    return (a << np.uint32(8)).view(np.int32).astype(np.int64) >> 8


def u24(a):
    return u(a) & np.uint64(0xFFFFFF)


def fma32(a, b, c):
    """Exact product and sum, one rounding: Fractions where everything is finite."""
    from fractions import Fraction

    out = np.empty(len(a), np.float32)
    for k, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
            out[k] = np.float32(np.float64(x) * np.float64(y) + np.float64(z))
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        out[k] = round32(exact) if exact else np.float32(x) * np.float32(y) + np.float32(z)
    return out


def round32(v) -> np.float32:
    from fractions import Fraction

    s, a = (-1 if v < 0 else 1), abs(v)
    e = max(math.floor(math.log2(a)) if a > Fraction(1, 2**1000) else -1000, -126)
    while Fraction(2) ** (e + 1) <= a:
        e += 1
    while e > -126 and Fraction(2) ** e > a:
        e -= 1
    q = a / Fraction(2) ** (e - 23)
    n = q.numerator // q.denominator
    rest = q - n
    n += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n & 1)
    v = Fraction(n) * Fraction(2) ** (e - 23)
    return np.float32(s * (np.inf if v >= 2**128 else float(v)))


def maximum(a, b):
    r = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b)))
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a) & np.signbit(b), a, np.abs(a)), r)


def minimum(a, b):
    r = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b)))
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a) | np.signbit(b), -np.abs(a), a), r)


def to_int(a, least, most):
    return np.nan_to_num(np.clip(np.trunc(a.astype(np.float64)), least, most), nan=0.0).astype(np.int64)


CASES = [
    ("v_add_f32_e32 v20, v10, v12", "ff", "f", lambda a, b: a + b),
    ("v_sub_f32_e32 v20, v10, v12", "ff", "f", lambda a, b: a - b),
    ("v_subrev_f32_e32 v20, v10, v12", "ff", "f", lambda a, b: b - a),
    ("v_mul_f32_e32 v20, v10, v12", "ff", "f", lambda a, b: a * b),
    ("v_add_f32_e64 v20, |v10|, -v12", "ff", "f", lambda a, b: np.abs(a) - b),
    ("v_add_f32_e64 v20, v10, v12 clamp", "ff", "f", lambda a, b: np.nan_to_num(np.clip(a + b, np.float32(0), np.float32(1)), nan=0.0) + np.float32(0)),
    ("v_mul_legacy_f32 v20, v10, v12", "ff", "f", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b)),
    ("v_max_f32_e32 v20, v10, v12", "ff", "f", maximum),
    ("v_min_f32_e32 v20, v10, v12", "ff", "f", minimum),
    ("v_max3_f32 v20, v10, v12, v14", "fff", "f", lambda a, b, c: maximum(maximum(a, b), c)),
    ("v_min3_f32 v20, v10, v12, v14", "fff", "f", lambda a, b, c: minimum(minimum(a, b), c)),
    ("v_fma_f32 v20, v10, v12, v14", "fff", "f", fma32),
    ("v_rndne_f32_e32 v20, v10", "f", "f", np.rint),
    ("v_floor_f32_e32 v20, v10", "f", "f", np.floor),
    ("v_ceil_f32_e32 v20, v10", "f", "f", np.ceil),
    ("v_trunc_f32_e32 v20, v10", "f", "f", np.trunc),
    ("v_cvt_i32_f32_e32 v20, v10", "f", "i", lambda a: to_int(a, -(2**31), 2**31 - 1)),
    ("v_cvt_u32_f32_e32 v20, v10", "f", "i", lambda a: to_int(a, 0, 2**32 - 1)),
    ("v_cvt_f32_i32_e32 v20, v10", "u", "f", lambda a: i(a).astype(np.float32)),
    ("v_cvt_f32_u32_e32 v20, v10", "u", "f", lambda a: a.astype(np.float32)),
    ("v_cvt_f32_ubyte2_e32 v20, v10", "u", "f", lambda a: (a >> 16 & 255).astype(np.float32)),
    ("v_cvt_f16_f32_e32 v20, v10", "f", "h", lambda a: a.astype(np.float16)),
    ("v_cvt_f32_f16_e32 v20, v10", "h", "f", lambda a: a.astype(np.float32)),
    ("v_cvt_f64_f32_e32 v[20:21], v10", "f", "d", lambda a: a.astype(np.float64)),
    ("v_cvt_f32_f64_e32 v20, v[10:11]", "d", "f", lambda a: a.astype(np.float32)),
    ("v_cvt_i32_f64_e32 v20, v[10:11]", "d", "i", lambda a: to_int(a, -(2**31), 2**31 - 1)),
    ("v_add_f64 v[20:21], v[10:11], v[12:13]", "dd", "d", lambda a, b: a + b),
    ("v_mul_f64 v[20:21], v[10:11], -v[12:13]", "dd", "d", lambda a, b: a * -b),
    ("v_max_f64 v[20:21], v[10:11], v[12:13]", "dd", "d", maximum),
    ("v_add_f16_e32 v20, v10, v12", "hh", "h", lambda a, b: a + b),
    ("v_mul_f16_e32 v20, v10, v12", "hh", "h", lambda a, b: a * b),
    ("v_max_f16_e32 v20, v10, v12", "hh", "h", maximum),
    ("v_sqrt_f32_e32 v20, v10", "f", "f", lambda a: np.sqrt(np.where(np.abs(a) < 1.1754944e-38, np.copysign(np.float32(0), a), a))),
    ("v_rcp_f32_e32 v20, v10", "f", "f", lambda a: flush(np.float32(1) / flush(a))),
    ("v_ldexp_f32 v20, v10, v12", "fw", "f", lambda a, b: np.ldexp(a.astype(np.float64), np.clip(b.view(np.int32), -400, 400)).astype(np.float32)),
    ("v_add_u32_e32 v20, v10, v12", "uu", "u", lambda a, b: a + b),
    ("v_add_u32_e64 v20, v10, v12 clamp", "uu", "u", lambda a, b: np.minimum(u(a) + u(b), np.uint64(0xFFFFFFFF))),
    ("v_sub_u32_e32 v20, v10, v12", "uu", "u", lambda a, b: a - b),
    ("v_sub_u32_e64 v20, v10, v12 clamp", "uu", "u", lambda a, b: np.where(b > a, 0, a - b)),
    ("v_mul_lo_u32 v20, v10, v12", "uu", "u", lambda a, b: lo(u(a) * u(b))),
    ("v_mul_hi_u32 v20, v10, v12", "uu", "u", lambda a, b: u(a) * u(b) >> np.uint64(32)),
    ("v_mul_hi_i32 v20, v10, v12", "uu", "i", lambda a, b: i(a) * i(b) >> 32),
    ("v_mul_u32_u24_e32 v20, v10, v12", "uu", "u", lambda a, b: lo(u24(a) * u24(b))),
    ("v_mul_i32_i24_e32 v20, v10, v12", "uu", "i", lambda a, b: s24(a) * s24(b)),
    ("v_mad_u32_u24 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: lo(u24(a) * u24(b) + u(c))),
    ("v_mad_u64_u32 v[20:21], vcc, v10, v12, v[14:15]", "uuq", "q", lambda a, b, c: u(a) * u(b) + c),
    ("v_lshlrev_b32_e32 v20, v10, v12", "uu", "u", lambda a, b: b << (a & 31)),
    ("v_lshrrev_b32_e32 v20, v10, v12", "uu", "u", lambda a, b: b >> (a & 31)),
    ("v_ashrrev_i32_e32 v20, v10, v12", "uu", "i", lambda a, b: i(b) >> (a & 31)),
    ("v_lshlrev_b64 v[20:21], v10, v[12:13]", "uq", "q", lambda a, b: b << (u(a) & np.uint64(63))),
    ("v_ashrrev_i64 v[20:21], v10, v[12:13]", "uq", "q", lambda a, b: (b.view(np.int64) >> (a & 63)).view(np.uint64)),
    ("v_lshl_add_u64 v[20:21], v[10:11], 3, v[12:13]", "qq", "q", lambda a, b: (a << np.uint64(3)) + b),
    ("v_and_b32_e32 v20, v10, v12", "uu", "u", lambda a, b: a & b),
    ("v_or3_b32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: a | b | c),
    ("v_and_or_b32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: a & b | c),
    ("v_lshl_or_b32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: a << (b & 31) | c),
    ("v_lshl_add_u32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: (a << (b & 31)) + c),
    ("v_add_lshl_u32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: (a + b) << (c & 31)),
    ("v_add3_u32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: a + b + c),
    ("v_xad_u32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: (a ^ b) + c),
    ("v_bfi_b32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: a & b | ~a & c),
    ("v_bitop3_b32 v20, v10, v12, v14 bitop3:0x96", "uuu", "u", lambda a, b, c: a ^ b ^ c),
    ("v_bitop3_b32 v20, v10, v12, v14 bitop3:0xca", "uuu", "u", lambda a, b, c: a & b | ~a & c),
    ("v_bfe_u32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: bfe(a, b & 31, c & 31)),
    ("v_alignbit_b32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: lo((u(a) << np.uint64(32) | u(b)) >> u(c & 31))),
    ("v_max_i32_e32 v20, v10, v12", "uu", "i", lambda a, b: np.maximum(i(a), i(b))),
    ("v_min_u32_e32 v20, v10, v12", "uu", "u", np.minimum),
    ("v_med3_i32 v20, v10, v12, v14", "uuu", "i", lambda a, b, c: np.median(np.stack([i(a), i(b), i(c)]), axis=0).astype(np.int64)),
    ("v_bcnt_u32_b32 v20, v10, v12", "uu", "u", lambda a, b: np.array([bin(int(x)).count("1") for x in a], np.uint32) + b),
    ("v_ffbh_u32_e32 v20, v10", "u", "i", lambda a: np.array([32 - int(x).bit_length() if x else -1 for x in a], np.int64)),
    ("v_ffbl_b32_e32 v20, v10", "u", "i", lambda a: np.array([(int(x) & -int(x)).bit_length() - 1 for x in a], np.int64)),
    ("v_bfrev_b32_e32 v20, v10", "u", "u", lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], np.uint32)),
    ("v_not_b32_e32 v20, v10", "u", "u", lambda a: ~a),
    ("v_add_u16_e32 v20, v10, v12", "ww", "u", lambda a, b: a + b & 0xFFFF),
    ("v_mul_lo_u16_e32 v20, v10, v12", "ww", "u", lambda a, b: a * b & 0xFFFF),
    ("v_max_i16_e32 v20, v10, v12", "ww", "u", lambda a, b: np.maximum(a.astype(np.int16), b.astype(np.int16)).astype(np.uint16)),
    ("v_ashrrev_i16_e32 v20, v10, v12", "ww", "u", lambda a, b: (b.astype(np.uint16).view(np.int16) >> (a & 15).astype(np.int16)).view(np.uint16)),
    ("v_cvt_pk_i16_i32 v20, v10, v12", "uu", "u", lambda a, b: sat16(a) | sat16(b) << np.uint32(16)),
    ("v_perm_b32 v20, v10, v12, v14", "uuu", "u", lambda a, b, c: np.array([perm(*map(int, t)) for t in zip(a, b, c, strict=True)], np.uint32)),
    ("v_mov_b32_sdwa v20, v10 dst_sel:DWORD src0_sel:BYTE_2", "u", "u", lambda a: a >> 16 & 255),
    ("v_add_u32_sdwa v20, v10, v12 dst_sel:DWORD src0_sel:WORD_1 src1_sel:BYTE_0", "uu", "u", lambda a, b: (a >> 16) + (b & 255)),
    ("v_mov_b32_e32 v20, v10\nv_mov_b32_sdwa v20, v12 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD", "uu", "u", lambda a, b: a & 0xFFFF00FF | (b & 255) << 8),
    ("v_cmp_gt_i32_e32 vcc, v10, v12\nv_cndmask_b32_e32 v20, v10, v12, vcc", "uu", "u", lambda a, b: np.where(i(a) > i(b), b, a)),
    ("v_cmp_nlt_f32_e64 s[14:15], v10, |v12|\nv_cndmask_b32_e64 v20, 0, 1, s[14:15]", "ff", "u", lambda a, b: ~(a < np.abs(b)) & 1),
    ("v_cmp_u_f32_e32 vcc, v10, v12\nv_cndmask_b32_e64 v20, 0, -1, vcc", "ff", "i", lambda a, b: np.where(np.isnan(a) | np.isnan(b), -1, 0)),
    ("v_cmp_lt_u64_e32 vcc, v[10:11], v[12:13]\nv_cndmask_b32_e64 v20, 0, 1, vcc", "qq", "u", lambda a, b: (a < b).astype(np.uint32)),
    ("v_cmp_class_f32_e64 s[14:15], v10, 0x3\nv_cndmask_b32_e64 v20, 0, 1, s[14:15]".replace("0x3", "3"), "f", "u", lambda a: np.isnan(a).astype(np.uint32)),
    ("v_add_co_u32_e32 v20, vcc, v10, v12\nv_addc_co_u32_e32 v20, vcc, v10, v12, vcc", "uu", "u", lambda a, b: a + b + ((u(a) + u(b)) >> np.uint64(32)).astype(np.uint32)),
    ("v_sub_co_u32_e32 v20, vcc, v10, v12\nv_subb_co_u32_e32 v20, vcc, v10, v12, vcc", "uu", "u", lambda a, b: a - b - (b > a)),
    ("v_accvgpr_write_b32 a7, v10\nv_accvgpr_read_b32 v20, a7", "u", "u", lambda a: a),
    ("v_cvt_pk_bf16_f32 v20, v10, v12", "ff", "u", lambda a, b: bf16(a) | bf16(b) << np.uint32(16)),
    ("v_pk_add_f16 v20, v10, v12", "hh", "u", lambda a, b: (a + b).view(np.uint16).astype(np.uint32)),
]  # fmt: skip


def flush(a):
    return np.where(np.abs(a) < np.float32(1.1754944e-38), np.copysign(np.float32(0), a), a)


def bfe(a, at, n):
    mask = np.where(n == 0, 0, (np.uint64(1) << u(n)) - np.uint64(1)).astype(np.uint64)
    return (u(a) >> u(at)) & mask


def sat16(a):
    return np.clip(i(a), -32768, 32767).astype(np.int16).view(np.uint16).astype(np.uint32)


def perm(a, b, c):
    source = (a << 32 | b).to_bytes(8, "little")
    out = 0
    for k in range(4):
        s = c >> 8 * k & 255
        v = (
            255
            if s >= 13
            else 0
            if s == 12
            else (255 if source[2 * (s - 8) + 1] >> 7 else 0)
            if s >= 8
            else source[s]
        )
        out |= v << 8 * k
    return out


def bf16(a):
    b = a.view(np.uint32)
    r = (u(b) + np.uint64(0x7FFF) + (u(b) >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(a), b >> 16 | 0x40, r).astype(np.uint32)


@pytest.mark.parametrize("case", CASES, ids=[c[0].split("\n")[0] for c in CASES])
def test_against_model(case):
    check(*case)


@pytest.mark.parametrize("op", ["add", "mul", "fma"])
@pytest.mark.parametrize(("round_bits", "direction"), [(1, np.inf), (2, -np.inf), (3, 0.0)])
def test_rounding_modes(op, round_bits, direction):
    """f32 results in the three directed modes lie on the right side of, or at, the exact value."""
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(LANES).astype(np.float32) for _ in range(3))
    line = {
        "add": "v_add_f32_e32 v20, v10, v12",
        "mul": "v_mul_f32_e32 v20, v10, v12",
        "fma": "v_fma_f32 v20, v10, v12, v14",
    }[op]
    exact = {
        "add": a.astype(np.float64) + b,
        "mul": a.astype(np.float64) * b,
        "fma": a.astype(np.float64) * b + c,
    }[op]
    got = execute(line, "fff", [a, b, c], False, mode=0x2F0 | round_bits).view(np.float32)
    if direction == 0.0:
        assert (np.abs(got) <= np.abs(exact)).all()
    else:
        assert ((got >= exact) if direction > 0 else (got <= exact)).all()
    assert (np.abs(got - exact) <= np.spacing(np.abs(got))).all()


def test_denormals_follow_the_mode():
    a = np.full(LANES, 1e-39, np.float32)
    one = np.ones(LANES, np.float32)
    kept = execute("v_mul_f32_e32 v20, v10, v12", "ff", [a, one], False, mode=0x2F0).view(np.float32)
    gone = execute("v_mul_f32_e32 v20, v10, v12", "ff", [a, one], False, mode=0x200).view(np.float32)
    assert (kept == a).all()
    assert (gone == 0).all()


def test_division_sequence_is_correctly_rounded():
    """The compiler's expansion: div_scale, rcp, fma steps, div_fmas, div_fixup."""
    body = """
    v_div_scale_f32 v30, s[14:15], v12, v12, v10
    v_div_scale_f32 v31, vcc, v10, v12, v10
    v_rcp_f32_e32 v32, v30
    v_fma_f32 v33, -v30, v32, 1.0
    v_fma_f32 v32, v33, v32, v32
    v_mul_f32_e32 v34, v31, v32
    v_fma_f32 v35, -v30, v34, v31
    v_fma_f32 v34, v35, v32, v34
    v_fma_f32 v36, -v30, v34, v31
    v_div_fmas_f32 v37, v36, v32, v34
    v_div_fixup_f32 v20, v37, v12, v10
    """
    rng = np.random.default_rng(2)
    random = lambda: np.ldexp(rng.uniform(1, 2, LANES), rng.integers(-120, 120, LANES)).astype(np.float32)
    sets = operand_sets("ff") + [[random(), random()] for _ in range(4)]
    for a, b in sets:
        with np.errstate(all="ignore"):
            want = (a.astype(np.float64) / b.astype(np.float64)).astype(np.float32)
        got = execute(body, "ff", [a, b], False).view(np.float32)
        normal = np.abs(want) >= 1.1754944e-38  # a quotient that is denormal may be rounded twice
        with np.errstate(all="ignore"):
            close = np.abs(got - want) <= 1.5e-45
        same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
        assert (same | ~normal & close).all(), (
            a[~same],
            b[~same],
            got[~same],
            want[~same],
        )


def digest() -> str:
    """Of every case's raw output, NaN payloads included, and of a few matrix products."""
    import hashlib

    h = hashlib.sha256()
    for line, kinds, result, _ in CASES:
        h.update(execute(line, kinds, operand_sets(kinds)[0], result in "dq").tobytes())
    rng = np.random.default_rng(0)
    regs = {k: rng.integers(0x20000000, 0x40000000, LANES).astype(np.uint32) for k in range(10, 30)}
    for name in (
        "f32_16x16x128_f8f6f4 v[30:33], v[10:17], v[20:27], 1.0",
        "f32_32x32x16_bf16 v[30:45], v[10:13], v[20:23], 0",
    ):
        out = run_lanes(f"v_mfma_{name}", regs, [30, 31, 32, 33])
        h.update(b"".join(out[k].tobytes() for k in (30, 31, 32, 33)))
    return h.hexdigest()


def test_both_lane_sets_give_the_same_bits():
    """The portable kernels and those for the processor at hand; on other processors both are the portable ones."""
    import os
    import subprocess
    import sys

    here = os.path.dirname(__file__)
    env = {**os.environ, "PYTHONPATH": here, "MORI_SIM_LANES": "base"}
    code = "import test_exec_valu as t; from mori_sim import _exec; print(_exec.lane_set(), t.digest())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["base", digest()], done.stderr[-2000:]
