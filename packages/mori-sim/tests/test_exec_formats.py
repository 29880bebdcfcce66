"""Conversions to and from fp8, bf8, fp6, bf6, fp4, bf16, and matrix instructions, against independent NumPy models."""
# ruff: noqa: E501, E731  (one instruction, one line)

import itertools

import numpy as np
import pytest
from asm950 import LANES, run_lanes

# name -> bits, exponent bits, mantissa bits, bias, kind of specials
FORMATS = {
    "fp8": (8, 4, 3, 7, "nan"),
    "bf8": (8, 5, 2, 15, "inf"),
    "fp6": (6, 2, 3, 1, ""),
    "bf6": (6, 3, 2, 3, ""),
    "fp4": (4, 2, 1, 1, ""),
}
CBSZ = ["fp8", "bf8", "fp6", "bf6", "fp4"]


def table(name: str) -> np.ndarray:
    """Value of every code."""
    width, ebits, mbits, bias, kind = FORMATS[name]
    v = np.zeros(1 << width)
    for c in range(1 << width):
        e, m = c >> mbits & ((1 << ebits) - 1), c & ((1 << mbits) - 1)
        x = m * 2.0 ** (1 - bias - mbits) if e == 0 else (1 + m / (1 << mbits)) * 2.0 ** (e - bias)
        if kind == "nan" and c & 0x7F == 0x7F:
            x = np.nan
        if kind == "inf" and e == 31:
            x = np.nan if m else np.inf
        v[c] = -x if c >> (width - 1) else x
    return v


def nearest(name: str, x: np.ndarray) -> np.ndarray:
    """Round to nearest even among the finite codes; out of range handled by the caller."""
    width = FORMATS[name][0]
    t = table(name)[: 1 << (width - 1)]
    finite = t[np.isfinite(t)]
    a = np.abs(x)[:, None].astype(np.float64)
    d = np.abs(a - finite[None, :])
    best = d.min(axis=1)
    out = np.zeros(len(x), np.uint32)
    for k in range(len(x)):
        ties = np.flatnonzero(d[k] == best[k])
        out[k] = ties[0] if len(ties) == 1 else ties[ties % 2 == 0][0]
    return out | (np.signbit(x).astype(np.uint32) << np.uint32(width - 1))


def samples(limit: float) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [
            np.linspace(-limit, limit, 31),
            rng.standard_normal(60) * limit / 3,
            rng.standard_normal(37) * limit / 2000,
            [0.0, -0.0, 1e-30, limit, -limit],
        ]
    )
    return np.resize(np.clip(x, -limit, limit), 2 * LANES).astype(np.float32)


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_pack_and_unpack_8_bit(name):
    limit = {"fp8": 448.0, "bf8": 57344.0}[name]
    x = samples(limit)
    a, b = x[:LANES], x[LANES:]
    out = run_lanes(
        f"v_mov_b32_e32 v20, -1\nv_cvt_pk_{name}_f32 v20, v10, v12\nv_mov_b32_e32 v21, -1\nv_cvt_pk_{name}_f32 v21, v10, v12 op_sel:[0,0,1]",
        {10: a, 12: b},
        [20, 21],
    )
    want = nearest(name, a) | nearest(name, b) << np.uint32(8)
    assert (out[20] == (want | 0xFFFF0000)).all()
    assert (out[21] == (want << np.uint32(16) | 0xFFFF)).all()
    codes = np.arange(256, dtype=np.uint32)
    t = table(name).astype(np.float32)
    for part in range(2):
        c = np.arange(LANES, dtype=np.uint32) * 4 + part
        word = (
            c
            | (c + 1 & 255) << np.uint32(8)
            | (c + 2 & 255) << np.uint32(16)
            | (c + 3 & 255) << np.uint32(24)
        )
        got = run_lanes(
            f"v_cvt_pk_f32_{name}_e32 v[20:21], v10\nv_cvt_pk_f32_{name}_sdwa v[22:23], v10 src0_sel:WORD_1\nv_cvt_f32_{name}_sdwa v24, v10 src0_sel:BYTE_3",
            {10: word},
            [20, 21, 22, 23, 24],
        )
        for register, at in ((20, 0), (21, 1), (22, 2), (23, 3), (24, 3)):
            np.testing.assert_array_equal(got[register].view(np.float32), t[codes[(c + at) & 255]])


@pytest.mark.parametrize(("name", "over", "most"), [("fp8", 0x7F, 0x7E), ("bf8", 0x7C, 0x7B)])
def test_out_of_range(name, over, most):
    x = np.resize(
        np.array([465.0, 1e6, 3e38, np.inf] if name == "fp8" else [61441.0, 1e6, 3e38, np.inf], np.float32),
        LANES,
    )
    line = f"v_cvt_pk_{name}_f32 v20, v10, v10"
    assert (run_lanes(line, {10: x}, [20])[20] & 255 == over).all()
    assert (run_lanes(line, {10: x}, [20], fp8_saturates=True)[20] & 255 == most).all()
    assert (run_lanes(line, {10: x}, [20], mode=0x2F0 | 1 << 23)[20] & 255 == most).all()
    nan = np.full(LANES, np.nan, np.float32)
    assert (run_lanes(line, {10: nan}, [20], fp8_saturates=True)[20] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("name", ["fp8", "bf8", "fp4"])
@pytest.mark.parametrize("exponent", [127, 120, 131])
def test_scaled_pairs(name, exponent):
    limit = {"fp8": 448.0, "bf8": 57344.0, "fp4": 6.0}[name]
    x = samples(limit)
    scale = np.full(LANES, np.float32(2.0) ** (exponent - 127), np.float32)
    a, b = x[:LANES] * scale, x[LANES:] * scale
    out = run_lanes(f"v_cvt_scalef32_pk_{name}_f32 v20, v10, v12, v14", {10: a, 12: b, 14: scale}, [20])
    width = FORMATS[name][0]
    want = nearest(name, x[:LANES]) | nearest(name, x[LANES:]) << np.uint32(width)
    got = out[20] & ((1 << 2 * width) - 1)
    assert (got == want).all()
    back = run_lanes(f"v_cvt_scalef32_pk_f32_{name} v[20:21], v10, v14", {10: want, 14: scale}, [20, 21])
    t = table(name).astype(np.float32)
    np.testing.assert_array_equal(back[20].view(np.float32), t[want & ((1 << width) - 1)] * scale)
    np.testing.assert_array_equal(back[21].view(np.float32), t[want >> np.uint32(width)] * scale)


@pytest.mark.parametrize("name", ["fp6", "bf6"])
def test_six_bit_blocks(name):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 64, (LANES, 32)).astype(np.uint32)
    words = pack(codes, 6)
    scale = np.full(LANES, 2.0, np.float32)
    out = run_lanes(f"v_cvt_scalef32_pk32_f32_{name} v[30:61], v[10:15], v20\nv_cvt_scalef32_2xpk16_{name}_f32 v[64:69], v[30:45], v[46:61], v20",
                    {**{10 + k: words[:, k] for k in range(6)}, 20: scale}, [*range(30, 62), *range(64, 70)])  # fmt: skip
    t = table(name).astype(np.float32)
    for k in range(32):
        np.testing.assert_array_equal(out[30 + k].view(np.float32), t[codes[:, k]] * 2)
    order = np.arange(32).reshape(2, 16).T.ravel()  # the two halves interleave
    again = codes[:, order]
    zero = t[again] == 0
    got = np.stack([unpack(np.stack([out[64 + k] for k in range(6)], axis=1), 6)], axis=0)[0]
    assert ((got == again) | zero).all()


def pack(codes: np.ndarray, width: int) -> np.ndarray:
    """[lanes, n] codes -> [lanes, n * width / 32] dwords, lowest first."""
    bits = (
        (codes[:, :, None] >> np.arange(width, dtype=np.uint32) & 1).reshape(len(codes), -1).astype(np.uint8)
    )
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def unpack(words: np.ndarray, width: int) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    n = bits.shape[1] // width
    return (
        (bits[:, : n * width].reshape(len(words), n, width) * (1 << np.arange(width)))
        .sum(axis=2)
        .astype(np.uint32)
    )


# ------------------------------------------------------------------ matrix instructions
def k_of(width: int, group: int, groups: int, per: int, mixed: bool) -> np.ndarray:
    if mixed and width == 8:
        return np.concatenate([np.arange(16) + 16 * group, np.arange(16) + 16 * (group + groups)])
    return np.arange(per) + per * group


def lanes_of(matrix: np.ndarray, width: int, mixed: bool) -> np.ndarray:
    """[rows, k] codes -> [64, codes per lane]"""
    rows, k = matrix.shape
    groups = LANES // rows
    return np.stack(
        [matrix[lane % rows, k_of(width, lane // rows, groups, k // groups, mixed)] for lane in range(LANES)]
    )


def result_of(out: dict[int, np.ndarray], first: int, m: int, dtype) -> np.ndarray:
    d = np.zeros((m, m), dtype)
    for v in range(m * m // LANES):
        for lane in range(LANES):
            d[v // 4 * 4 * (LANES // m) + lane // m * 4 + v % 4, lane % m] = out[first + v][lane].view(dtype)
    return d


def operands(regs_a, regs_b, c, m):
    inputs = {10 + k: regs_a[:, k] for k in range(regs_a.shape[1])} | {
        30 + k: regs_b[:, k] for k in range(regs_b.shape[1])
    }
    for v in range(m * m // LANES):
        rows = [v // 4 * 4 * (LANES // m) + lane // m * 4 + v % 4 for lane in range(LANES)]
        inputs[64 + v] = c[rows, np.arange(LANES) % m]
    return inputs


def reg(first, n):
    return f"v[{first}:{first + n - 1}]" if n > 1 else f"v{first}"


@pytest.mark.parametrize(("m", "k"), [(16, 128), (32, 64)])
@pytest.mark.parametrize(("fa", "fb"), list(itertools.product(CBSZ, CBSZ)))
def test_f8f6f4_all_pairs(fa, fb, m, k):
    rng = np.random.default_rng(11)
    a, b = (rng.integers(0, 1 << FORMATS[f][0], (m, k)).astype(np.uint32) for f in (fa, fb))
    a[~np.isfinite(table(fa)[a])] = 1
    b[~np.isfinite(table(fb)[b])] = 1
    c = rng.standard_normal((m, m)).astype(np.float32)
    wa, wb = FORMATS[fa][0], FORMATS[fb][0]
    ra, rb = pack(lanes_of(a, wa, True), wa), pack(lanes_of(b, wb, True), wb)
    n = m * m // LANES
    name, modifiers = f"f32_{m}x{m}x{k}_f8f6f4", f"cbsz:{CBSZ.index(fa)} blgp:{CBSZ.index(fb)}"
    regs = f"{reg(64, n)}, {reg(10, ra.shape[1])}, {reg(30, rb.shape[1])}, {reg(64, n)}"
    out = run_lanes(f"v_mfma_{name} {regs} {modifiers}", operands(ra, rb, c, m), list(range(64, 64 + n)))
    exact = table(fa)[a] @ table(fb)[b].T + c
    np.testing.assert_array_equal(result_of(out, 64, m, np.float32), exact.astype(np.float32))
    if (fa, fb) not in (("fp8", "fp4"), ("fp6", "bf6"), ("fp4", "fp4")):
        return
    # scaled, with every choice of scale byte
    sa, sb = (rng.integers(120, 134, (m, k // 32, 4)).astype(np.uint32) for _ in range(2))
    word = lambda s: np.array(
        [int.from_bytes(bytes(s[lane % m, lane // m].astype(np.uint8)), "little") for lane in range(LANES)],
        np.uint32,
    )
    for sel_a, sel_b in ((0, 0), (1, 2), (3, 1)):
        op_sel = f"op_sel:[{sel_a & 1},{sel_b & 1},0] op_sel_hi:[{sel_a >> 1},{sel_b >> 1},0]"
        out = run_lanes(
            f"v_mfma_scale_{name} {regs}, v50, v51 {op_sel} {modifiers}",
            {**operands(ra, rb, c, m), 50: word(sa), 51: word(sb)},
            list(range(64, 64 + n)),
        )
        va = table(fa)[a] * np.repeat(2.0 ** (sa[:, :, sel_a].astype(float) - 127), 32, axis=1)
        vb = table(fb)[b] * np.repeat(2.0 ** (sb[:, :, sel_b].astype(float) - 127), 32, axis=1)
        np.testing.assert_allclose(result_of(out, 64, m, np.float32), va @ vb.T + c, rtol=2e-7, atol=1e-5)


@pytest.mark.parametrize(
    ("m", "k", "kind"),
    [
        (16, 32, "f16"),
        (32, 16, "f16"),
        (16, 16, "f16"),
        (32, 8, "f16"),
        (16, 32, "bf16"),
        (32, 16, "bf16"),
        (16, 16, "bf16"),
        (32, 8, "bf16"),
        (16, 4, "f32"),
        (32, 2, "f32"),
    ],
)
def test_float_matrices(m, k, kind):
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal((m, k)).astype(np.float32) for _ in range(2))
    c = rng.standard_normal((m, m)).astype(np.float32)
    if kind == "f16":
        a, b = a.astype(np.float16), b.astype(np.float16)
        code = lambda x: x.view(np.uint16).astype(np.uint32)
    elif kind == "bf16":
        a, b = ((x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in (a, b))
        code = lambda x: x.view(np.uint32) >> 16
    else:
        code = lambda x: x.view(np.uint32)
    width = 32 if kind == "f32" else 16
    ra, rb = (pack(lanes_of(code(x), width, False), width) for x in (a, b))
    n = m * m // LANES
    out = run_lanes(
        f"v_mfma_f32_{m}x{m}x{k}_{kind} {reg(64, n)}, {reg(10, ra.shape[1])}, {reg(30, rb.shape[1])}, {reg(64, n)}",
        operands(ra, rb, c, m),
        list(range(64, 64 + n)),
    )
    exact = (a.astype(np.float64) @ b.astype(np.float64).T + c).astype(np.float32)
    np.testing.assert_allclose(result_of(out, 64, m, np.float32), exact, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize(("m", "k"), [(16, 64), (32, 32), (16, 32), (32, 16)])
def test_integer_matrices(m, k):
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-128, 128, (m, k)) for _ in range(2))
    c = rng.integers(-(2**31), 2**31, (m, m)).astype(np.int32)
    ra, rb = (pack(lanes_of((x & 255).astype(np.uint32), 8, False), 8) for x in (a, b))
    n = m * m // LANES
    out = run_lanes(
        f"v_mfma_i32_{m}x{m}x{k}_i8 {reg(64, n)}, {reg(10, ra.shape[1])}, {reg(30, rb.shape[1])}, {reg(64, n)}",
        operands(ra, rb, c, m),
        list(range(64, 64 + n)),
    )
    np.testing.assert_array_equal(
        result_of(out, 64, m, np.int32),
        (a @ b.T + c.astype(np.int64)).astype(np.uint64).astype(np.uint32).view(np.int32),
    )


def test_fp8_pairs_16x16x32():
    rng = np.random.default_rng(4)
    for fa, fb in itertools.product(("fp8", "bf8"), repeat=2):
        a, b = (rng.integers(0, 256, (16, 32)).astype(np.uint32) for _ in range(2))
        a[~np.isfinite(table(fa)[a])] = 3
        b[~np.isfinite(table(fb)[b])] = 3
        c = np.zeros((16, 16), np.float32)
        ra, rb = (pack(lanes_of(x, 8, False), 8) for x in (a, b))
        out = run_lanes(
            f"v_mfma_f32_16x16x32_{fa}_{fb} v[64:67], v[10:11], v[30:31], v[64:67]",
            operands(ra, rb, c, 16),
            [64, 65, 66, 67],
        )
        np.testing.assert_array_equal(
            result_of(out, 64, 16, np.float32), (table(fa)[a] @ table(fb)[b].T).astype(np.float32)
        )


def test_accumulation_orders():
    """1 + 2^-24 + 2^-24 + ...: each order keeps a different part of the small terms."""
    a = np.zeros((16, 32), np.float32)
    a[:, 0], a[:, 1:9] = 1.0, 2.0**-24
    b = np.ones((16, 32), np.float32)
    code = lambda x: x.astype(np.float16).view(np.uint16).astype(np.uint32)
    ra, rb = (pack(lanes_of(code(x), 16, False), 16) for x in (a, b))
    c = np.zeros((16, 16), np.float32)
    got = {}
    for order in ("exact", "sequential", "blocked"):
        out = run_lanes(
            "v_mfma_f32_16x16x32_f16 v[64:67], v[10:13], v[30:33], v[64:67]",
            operands(ra, rb, c, 16),
            [64, 65, 66, 67],
            mfma_order=order,
            mfma_block=4,
        )
        got[order] = result_of(out, 64, 16, np.float32)[0, 0]
    assert got["exact"] == np.float32(1 + 2.0**-21)
    assert got["sequential"] == 1.0
    assert 1.0 < got["blocked"] <= got["exact"]


def test_f64_matrix():
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((16, 4)), rng.standard_normal((16, 4))
    pair = lambda x: (
        np.ascontiguousarray(np.stack([x[lane % 16, lane // 16] for lane in range(LANES)]))
        .view(np.uint32)
        .reshape(LANES, 2)
    )
    pa, pb = pair(a), pair(b)
    out = run_lanes(
        "v_mfma_f64_16x16x4_f64 v[64:71], v[10:11], v[30:31], 0",
        {10: pa[:, 0], 11: pa[:, 1], 30: pb[:, 0], 31: pb[:, 1]},
        list(range(64, 72)),
    )
    d = np.zeros((16, 16))
    for v in range(4):
        value = (out[64 + 2 * v].astype(np.uint64) | out[65 + 2 * v].astype(np.uint64) << np.uint64(32)).view(
            np.float64
        )
        for lane in range(LANES):
            d[lane // 16 + 4 * v, lane % 16] = value[lane]
    np.testing.assert_allclose(d, a @ b.T, rtol=1e-14, atol=1e-15)


def test_blocks_4x4x4_16b():
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal((16, 4, 4)).astype(np.float16) for _ in range(2))  # [block, row, k]
    image = lambda x: pack(
        np.stack([x[lane // 4, lane % 4] for lane in range(LANES)]).view(np.uint16).astype(np.uint32), 16
    )
    ra, rb = image(a), image(b)
    out = run_lanes(
        "v_mfma_f32_4x4x4_16b_f16 v[64:67], v[10:11], v[30:31], 0",
        {10: ra[:, 0], 11: ra[:, 1], 30: rb[:, 0], 31: rb[:, 1]},
        [64, 65, 66, 67],
    )
    for block in range(16):
        want = a[block].astype(np.float64) @ b[block].astype(np.float64).T
        got = np.array([[out[64 + r].view(np.float32)[4 * block + c] for c in range(4)] for r in range(4)])
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
