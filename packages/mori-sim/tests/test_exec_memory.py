"""Scalar unit, memory, LDS, atomics, lane movement, faults and scheduling."""
# ruff: noqa: E501  (one instruction, one line)

import numpy as np
import pytest
from asm950 import LANES, Bench, run_lanes

LANE = np.arange(LANES, dtype=np.uint32)
PARTLY_OFF = 0x0F0F_F00D_8000_0001
ON = np.array([PARTLY_OFF >> k & 1 for k in range(LANES)], bool)


def scalar(body: str, count: int, **options) -> np.ndarray:
    """Runs scalar code; s[20:20+count] come back."""
    moves = "\n".join(f"v_mov_b32_e32 v{40 + k}, s{20 + k}" for k in range(count))
    out = run_lanes(f"{body}\n{moves}", {}, [40 + k for k in range(count)], **options)
    return np.array([out[40 + k][0] for k in range(count)])


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("s_mov_b32 s20, 0x80000000\ns_add_u32 s20, s20, s20\ns_addc_u32 s21, 0, 0", [0, 1]),
        ("s_mov_b32 s20, 5\ns_sub_u32 s20, s20, 7\ns_subb_u32 s21, 0, 0", [0xFFFFFFFE, 0xFFFFFFFF]),
        ("s_mov_b32 s22, 0x7fffffff\ns_add_i32 s20, s22, 1\ns_cselect_b32 s21, 1, 0", [0x80000000, 1]),
        ("s_mov_b64 s[22:23], 0xff00\ns_lshl_b64 s[20:21], s[22:23], 28", [0, 0xFF0]),
        ("s_mov_b32 s22, 0x12345678\ns_bfe_u32 s20, s22, 0x80010\ns_bfe_i32 s21, s22, 0x40004", [0x34, 7]),
        ("s_mov_b32 s22, -8\ns_ashr_i32 s20, s22, 1\ns_lshr_b32 s21, s22, 28", [0xFFFFFFFC, 15]),
        ("s_movk_i32 s20, 0x8000\ns_mulk_i32 s20, 3\ns_cmpk_lt_i32 s20, 0\ns_cselect_b32 s21, 7, 9", [0xFFFE8000, 7]),
        ("s_mov_b32 s22, 0xf0\ns_ff1_i32_b32 s20, s22\ns_flbit_i32_b32 s21, s22", [4, 24]),
        ("s_mov_b64 s[22:23], 0x5\ns_bcnt1_i32_b64 s20, s[22:23]\ns_brev_b32 s21, s22", [2, 0xA0000000]),
        ("s_mov_b32 s22, 0x80\ns_sext_i32_i8 s20, s22\ns_abs_i32 s21, s20", [0xFFFFFF80, 0x80]),
        ("s_mov_b32 s22, 0x10001\ns_mul_hi_u32 s20, s22, s22\ns_mul_i32 s21, s22, s22", [1, 0x20001]),
        ("s_mov_b64 s[14:15], exec\ns_mov_b64 s[22:23], 0xff\ns_and_saveexec_b64 s[24:25], s[22:23]\ns_mov_b32 s20, exec_lo\ns_mov_b32 s21, s25\ns_mov_b64 exec, s[14:15]", [0xFF, 0xFFFFFFFF]),
        ("s_getpc_b64 s[22:23]\ns_add_u32 s22, s22, 16\ns_addc_u32 s23, s23, 0\ns_swappc_b64 s[24:25], s[22:23]\ns_mov_b32 s20, 1\ns_mov_b32 s21, 2", [None, 2]),
        ("s_mov_b32 s20, 0\ns_mov_b32 s21, 0\nL: s_add_u32 s20, s20, 3\ns_add_u32 s21, s21, 1\ns_cmp_lt_u32 s21, 10\ns_cbranch_scc1 L", [30, 10]),
        ("s_setreg_imm32_b32 hwreg(1, 4, 4), 5\ns_getreg_b32 s20, hwreg(1, 4, 4)\ns_getreg_b32 s21, hwreg(1, 0, 4)", [5, 0]),
        ("s_memtime s[22:23]\ns_nop 0\ns_memtime s[24:25]\ns_waitcnt lgkmcnt(0)\ns_sub_u32 s20, s24, s22\ns_pack_ll_b32_b16 s21, 1, 2", [2, 0x20001]),
    ],
)  # fmt: skip
def test_scalar_unit(body, want):
    got = scalar(body, 2)
    assert all(w is None or g == w for g, w in zip(got, want, strict=True)), [hex(int(g)) for g in got]


def test_global_loads_and_stores_of_all_sizes():
    body = """
    v_mov_b32_e32 v20, -1
    v_mov_b32_e32 v21, -1
    global_store_dwordx4 v12, v[10:13], s[8:9]
    global_store_byte v12, v10, s[8:9] offset:1
    global_store_short_d16_hi v12, v11, s[8:9] offset:4
    s_waitcnt vmcnt(0)
    global_load_dwordx3 v[22:24], v12, s[8:9]
    global_load_sbyte v25, v12, s[8:9] offset:1
    global_load_ushort v26, v12, s[8:9] offset:4
    global_load_short_d16 v20, v12, s[8:9] offset:4
    global_load_ubyte_d16_hi v21, v12, s[8:9] offset:1
    s_waitcnt vmcnt(0)
    """
    a, b, d = LANE * 0x01010101, LANE * 0x01000193 + 0x80FF0000, LANE + 77
    out = run_lanes(body, {10: a, 11: b, 12: LANE * 16, 13: d}, [20, 21, 22, 23, 24, 25, 26])
    first = (a & 0xFFFF00FF) | (a & 255) << np.uint32(8)
    second = (b & 0xFFFF0000) | b >> np.uint32(16)
    assert (out[22] == first).all()
    assert (out[23] == second).all()
    assert (out[24] == LANE * 16).all()
    assert (out[25].view(np.int32) == (a & 255).astype(np.uint8).view(np.int8)).all()
    assert (out[26] == b >> np.uint32(16)).all()
    assert (out[20] == (0xFFFF0000 | b >> np.uint32(16))).all()
    assert (out[21] == (0xFFFF | (a & 255) << np.uint32(16))).all()
    assert (out[-1][: 4 * LANES].reshape(LANES, 4)[:, 3] == d).all()


RMW = {
    "add": lambda m, x: m + x, "sub": lambda m, x: m - x, "smin": lambda m, x: np.minimum(m.view(np.int32), x.view(np.int32)).view(np.uint32),
    "umax": np.maximum, "and": lambda m, x: m & x, "or": lambda m, x: m | x, "xor": lambda m, x: m ^ x, "swap": lambda m, x: x,
    "inc": lambda m, x: np.where(m >= x, 0, m + 1).astype(np.uint32), "dec": lambda m, x: np.where((m == 0) | (m > x), x, m - 1).astype(np.uint32),
}  # fmt: skip
MEMORY = np.resize(np.array([0, 1, 5, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 100, 0xDEADBEEF], np.uint32), LANES)
OPERAND = np.resize(np.array([1, 0xFFFFFFFF, 5, 3, 0x80000001, 7, 100], np.uint32), LANES)


@pytest.mark.parametrize("space", ["global", "flat", "buffer", "ds"])
@pytest.mark.parametrize("op", RMW)
def test_atomics_return_the_old_value(space, op):
    body = [
        "global_store_dword v255, v10, s[8:9]",
        "s_waitcnt vmcnt(0)",
        f"s_mov_b32 exec_lo, {hex(PARTLY_OFF & 0xFFFFFFFF)}",
        f"s_mov_b32 exec_hi, {hex(PARTLY_OFF >> 32)}",
    ]
    if space == "global":
        body.append(f"global_atomic_{op} v20, v255, v12, s[8:9] sc0")
    elif space == "flat":
        body += [
            "v_mov_b32_e32 v31, s9",
            "v_add_co_u32_e32 v30, vcc, s8, v255",
            "v_addc_co_u32_e32 v31, vcc, 0, v31, vcc",
            f"flat_atomic_{op} v20, v[30:31], v12 sc0",
        ]
    elif space == "buffer":
        body += [
            "s_mov_b32 s12, s8",
            "s_mov_b32 s13, s9",
            "s_mov_b32 s14, 0x1000",
            "s_mov_b32 s15, 0x27000",
            "v_mov_b32_e32 v20, v12",
            f"buffer_atomic_{op} v20, v255, s[12:15], 0 offen sc0",
        ]
    else:
        body.insert(0, "ds_write_b32 v255, v10")
        name = {"swap": "wrxchg_rtn_b32", "smin": "min_rtn_i32", "umax": "max_rtn_u32"}.get(
            op, f"{op}_rtn_" + ("b32" if op in ("and", "or", "xor") else "u32")
        )
        body += [
            f"ds_{name} v20, v255, v12",
            "s_waitcnt lgkmcnt(0)",
            "s_mov_b64 exec, -1",
            "ds_read_b32 v21, v255",
            "s_waitcnt lgkmcnt(0)",
            "global_store_dword v255, v21, s[8:9]",
        ]
    out = run_lanes(
        "\n".join(body), {10: MEMORY, 12: OPERAND, 20: np.full(LANES, 9, np.uint32)}, [20], lds=1024
    )
    assert (out[20][ON] == MEMORY[ON]).all()
    assert (out[-1][:LANES] == np.where(ON, RMW[op](MEMORY, OPERAND), MEMORY)).all()
    if space != "buffer":
        assert (out[20][~ON] == 9).all()


def test_wide_and_float_atomics():
    body = """
    v_lshlrev_b32_e32 v30, 3, v254
    global_store_dwordx2 v30, v[10:11], s[8:9]
    s_waitcnt vmcnt(0)
    global_atomic_add_x2 v[20:21], v30, v[12:13], s[8:9] sc0 sc1
    s_waitcnt vmcnt(0)
    global_atomic_cmpswap_x2 v30, v[14:17], s[8:9]
    global_store_dword v30, v18, s[8:9] offset:2048
    s_waitcnt vmcnt(0)
    global_atomic_add_f32 v30, v18, s[8:9] offset:2048
    global_atomic_pk_add_bf16 v22, v30, v19, s[8:9] offset:2048 sc0
    s_waitcnt vmcnt(0)
    """
    ones = np.full(LANES, 0xFFFFFFFF, np.uint32)
    x = np.linspace(-4, 4, LANES, dtype=np.float32)
    inputs = {
        10: ones,
        11: LANE,
        12: LANE + 1,
        13: LANE * 0,
        14: LANE + 7,
        15: LANE + 8,
        16: LANE,
        17: LANE + 1,
        18: x,
        19: LANE * 0,
    }
    out = run_lanes(body, inputs, [20, 21, 22])
    assert (out[20] == ones).all()
    assert (out[21] == LANE).all()
    memory = out[-1][: 2 * LANES].reshape(LANES, 2)
    assert (memory[:, 0] == LANE + 7).all()  # -1 + lane + 1 = lane with a carry: the comparand matched
    assert (memory[:, 1] == LANE + 8).all()
    assert (out[22].view(np.float32) == 2 * x).all()


def test_buffer_bounds_per_dword():
    """num_records 100: loads beyond give zero, stores beyond do nothing, a dwordx4 is cut dword by dword."""
    body = """
    s_mov_b32 s12, s8
    s_mov_b32 s13, s9
    s_mov_b32 s14, 100
    s_mov_b32 s15, 0x27000
    v_lshlrev_b32_e32 v30, 4, v254
    buffer_store_dword v10, v255, s[12:15], 0 offen
    s_waitcnt vmcnt(0)
    buffer_load_dwordx4 v[20:23], v30, s[12:15], 0 offen
    buffer_load_ubyte v24, v254, s[12:15], 0 offen offset:90
    s_waitcnt vmcnt(0)
    """
    out = run_lanes(body, {10: LANE + 1}, [20, 21, 22, 23, 24])
    kept = np.where(LANE < 25, LANE + 1, 0)
    assert (out[-1][:LANES] == kept).all()
    flat = np.concatenate([kept, np.zeros(4 * LANES, np.uint32)])
    for k in range(4):
        assert (out[20 + k] == flat[4 * LANE + k]).all()
    image = np.ascontiguousarray(flat.astype(np.uint32)).view(np.uint8)
    assert (out[24] == np.where(LANE + 90 < 100, image[LANE + 90], 0)).all()


def test_lds_dma_takes_the_offset_twice():
    body = """
    global_store_dword v255, v10, s[8:9]
    s_waitcnt vmcnt(0)
    s_mov_b32 m0, 0x100
    global_load_lds_dword v255, s[8:9] offset:32
    s_waitcnt vmcnt(0)
    ds_read_b32 v20, v255 offset:288
    s_waitcnt lgkmcnt(0)
    """
    out = run_lanes(body, {10: LANE + 5}, [20], lds=2048)
    assert (out[20][: LANES - 8] == LANE[: LANES - 8] + 13).all()


def test_lds_two_address_and_wide_forms():
    body = """
    v_lshlrev_b32_e32 v30, 4, v254
    ds_write_b128 v30, v[10:13]
    ds_read2_b32 v[20:21], v30 offset0:1 offset1:3
    ds_read_b96 v[22:24], v30
    ds_read_u16_d16_hi v25, v30 offset:2
    ds_write2st64_b32 v255, v10, v11 offset0:8 offset1:9
    ds_read2st64_b32 v[26:27], v255 offset0:9 offset1:8
    s_waitcnt lgkmcnt(0)
    """
    a = [LANE * 3 + k * 0x10000 for k in range(4)]
    out = run_lanes(body, {10: a[0], 11: a[1], 12: a[2], 13: a[3], 25: LANE}, list(range(20, 28)), lds=8192)
    for register, want in (
        (20, a[1]),
        (21, a[3]),
        (22, a[0]),
        (23, a[1]),
        (24, a[2]),
        (25, LANE | a[0] & 0xFFFF0000),
        (26, a[1]),
        (27, a[0]),
    ):
        assert (out[register] == want).all(), register


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("ds_swizzle_b32 v20, v10 offset:swizzle(BITMASK_PERM,\"0p0pp\")".replace('swizzle(BITMASK_PERM,"0p0pp")', "0x401f"), lambda k: k ^ 16),
        ("ds_swizzle_b32 v20, v10 offset:0x80b1", lambda k: k ^ 1),
        ("v_mov_b32_dpp v20, v10 row_ror:3 row_mask:0xf bank_mask:0xf", lambda k: k & ~15 | (k - 3) & 15),
        ("v_mov_b32_dpp v20, v10 row_half_mirror row_mask:0xf bank_mask:0xf", lambda k: k ^ 7),
        ("v_mov_b32_dpp v20, v10 row_newbcast:5 row_mask:0xf bank_mask:0xf", lambda k: k & ~15 | 5),
        ("v_mov_b32_dpp v20, v10 quad_perm:[3,0,1,2] row_mask:0xf bank_mask:0xf", lambda k: k & ~3 | (k - 1) & 3),
        ("ds_bpermute_b32 v20, v12, v10", lambda k: (k * 7 + 3) % 64),
    ],
)  # fmt: skip
def test_lane_movement(line, source):
    out = run_lanes(
        f"{line}\ns_waitcnt lgkmcnt(0)", {10: LANE + 100, 12: (LANE * 7 + 3) * 4, 20: LANE * 0}, [20]
    )
    assert (out[20] == np.array([source(k) for k in range(LANES)]) + 100).all()


def test_dpp_bounds_and_masks():
    line = "v_mov_b32_dpp v20, v10 row_shr:1 row_mask:0x5 bank_mask:0xf\nv_add_u32_dpp v21, v10, v12 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0"
    out = run_lanes(line, {10: LANE + 100, 12: LANE, 20: LANE * 0 + 7, 21: LANE * 0}, [20, 21])
    writes = (LANE // 16 % 2 == 0) & (LANE % 16 != 0)
    assert (out[20] == np.where(writes, LANE + 99, 7)).all()
    assert (out[21] == np.where(LANE % 16 == 0, LANE, LANE + 99 + LANE)).all()


@pytest.mark.parametrize("rows", [16, 32])
def test_permlane_swap(rows):
    out = run_lanes(f"v_permlane{rows}_swap_b32 v10, v12", {10: LANE, 12: LANE + 100}, [10, 12])
    odd = LANE // rows % 2 == 1
    assert (out[10] == np.where(odd, LANE - rows + 100, LANE)).all()
    assert (out[12] == np.where(odd, LANE + 100, LANE + rows)).all()


def test_readlane_writelane_readfirstlane():
    out = run_lanes(
        "v_readlane_b32 s20, v10, 37\nv_writelane_b32 v10, s20, 2\nv_readfirstlane_b32 s21, v10\nv_mov_b32_e32 v20, s21",
        {10: LANE + 1},
        [10, 20],
        exec_mask=PARTLY_OFF & ~1,
    )
    assert out[10][2] == 38
    assert out[20][31] == 32  # lane 31 is the first active one


def test_vgpr_indexing():
    body = """
    s_mov_b32 s20, 3
    s_set_gpr_idx_on s20, gpr_idx(SRC0)
    v_mov_b32_e32 v20, v10
    s_set_gpr_idx_mode 8
    v_mov_b32_e32 v20, v11
    s_set_gpr_idx_off
    v_mov_b32_e32 v24, v10
    """
    out = run_lanes(body, {10: LANE, 11: LANE + 50, 13: LANE + 100, 23: LANE * 0}, [20, 23, 24])
    assert (out[20] == LANE + 100).all()
    assert (out[23] == LANE + 50).all()
    assert (out[24] == LANE).all()


@pytest.mark.parametrize(("bits", "name"), [(16, "b64_tr_b16"), (8, "b64_tr_b8"), (4, "b64_tr_b4")])
def test_transposing_reads_give_columns(bits, name):
    """A 16-column tile per 16 lanes: lane c receives column c."""
    rows = 64 // bits
    rng = np.random.default_rng(0)
    tile = rng.integers(0, 1 << bits, (4, rows, 16)).astype(np.uint64)
    image = np.zeros(4 * rows * 16 * bits // 64, np.uint64)
    for k, v in enumerate(tile.ravel()):
        image[k * bits // 64] |= v << np.uint64(k * bits % 64)
    w = image.view(np.uint32).reshape(LANES, 2)
    out = run_lanes(
        f"v_lshlrev_b32_e32 v30, 3, v254\nds_write_b64 v30, v[10:11]\nds_read_{name} v[20:21], v30\ns_waitcnt lgkmcnt(0)",
        {10: w[:, 0], 11: w[:, 1]},
        [20, 21],
        lds=1024,
    )
    got = out[20].astype(np.uint64) | out[21].astype(np.uint64) << np.uint64(32)
    for lane in range(LANES):
        column = tile[lane // 16, :, lane % 16]
        assert int(got[lane]) == sum(int(v) << bits * r for r, v in enumerate(column))


def test_scratch_is_private_to_a_lane():
    bench = Bench()
    out = bench.array(np.zeros(LANES, np.uint32))
    source = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\nscratch_store_dword off, v0, off offset:8\nscratch_load_dword v2, off, off offset:8\ns_waitcnt vmcnt(0) lgkmcnt(0)\nglobal_store_dword v1, v2, s[4:5]\ns_endpgm"
    bench.submit(source, [out.ctypes.data], scratch=16)
    bench.run()
    assert (out == LANE).all()


# ------------------------------------------------------------------ faults
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("v_mov_b32_e32 v1, 0\nv_mov_b32_e32 v2, 0\nglobal_load_dword v3, v[1:2], off".replace("v[1:2]", "v[2:3]"), ["nothing is mapped", "global_load_dword"]),
        ("s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v1, 0x1000\nglobal_store_dword v1, v1, s[4:5]", ["mapped", "global_store_dword"]),
        ("v_mov_b32_e32 v1, 0x1000\nds_read_b32 v2, v1", ["LDS read of 4 bytes at offset 4096", "1024 bytes"]),
        ("s_trap 2", ["trapped"]),
        ("s_sendmsg 1", ["s_sendmsg is not implemented"]),
        ("s_mov_b64 s[4:5], 64\ns_setpc_b64 s[4:5]", ["no code is loaded"]),
        ("v_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[6:9], v10", ["v_smfmac_f32_16x16x32_f16 is not implemented"]),
        (".long 0xffffffff", ["no gfx950 instruction"]),
    ],
)  # fmt: skip
def test_faults_name_kernel_instruction_and_reason(body, words):
    bench = Bench()
    a = bench.array(np.zeros(4, np.uint32))
    bench.submit(f"{body}\ns_endpgm", [a.ctypes.data], lds=1024, name="culprit")
    with pytest.raises(RuntimeError, match="culprit") as e:
        bench.run()
    for w in ["workgroup (0, 0, 0)", "wave 0", "pc 0x", *words]:
        assert w in str(e.value)
    with pytest.raises(RuntimeError, match="culprit"):  # sticky
        bench.run()


# ------------------------------------------------------------------ scheduling
LOCK = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_mov_b32_e32 v1, 0
v_mov_b32_e32 v2, 1
s_waitcnt lgkmcnt(0)
s_mov_b64 exec, 1
TRY: v_mov_b32_e32 v4, 1
v_mov_b32_e32 v5, 0
global_atomic_cmpswap v3, v1, v[4:5], s[4:5] sc0
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s6, v3
s_cmp_lg_u32 s6, 0
s_cbranch_scc1 TRY
global_load_dword v6, v1, s[4:5] offset:4 sc0 sc1
s_waitcnt vmcnt(0)
v_add_u32_e32 v6, 1, v6
global_store_dword v1, v6, s[4:5] offset:4 sc0 sc1
s_waitcnt vmcnt(0)
global_store_dword v1, v1, s[4:5] sc0 sc1
s_endpgm
"""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": "random", "seed": 1},
        {"order": "random", "seed": 2, "slice": 7},
        {"order": "rank_delayed", "delayed_rank": 1},
    ],
)
def test_a_spin_lock_between_workgroups_and_ranks_makes_progress(options):
    bench = Bench(**options)
    a = bench.array(np.zeros(2, np.uint32))
    for rank in range(2):
        bench.submit(
            LOCK,
            [a.ctypes.data],
            grid=(40,),
            block=(256,),
            device=rank,
            base=0x10_0000_0000 + rank * 0x1000_0000,
        )
    bench.run()
    assert a[1] == 2 * 40 * 4
    assert a[0] == 0


def test_more_workgroups_than_fit_at_once():
    bench = Bench()
    a = bench.array(np.zeros(3000, np.uint32))
    source = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_mov_b32_e32 v1, s2\nv_lshlrev_b32_e32 v1, 2, v1\nv_mov_b32_e32 v2, s2\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[4:5]\ns_endpgm"
    bench.submit(source, [a.ctypes.data], grid=(3000,), lds=100_000)
    bench.run()
    assert (a == np.arange(3000)).all()


def test_watchdog_names_what_is_polled():
    bench = Bench()
    a = bench.array(np.full(1, 41, np.uint32))
    bench.submit(
        "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_mov_b32_e32 v1, 0\ns_waitcnt lgkmcnt(0)\nL: global_load_dword v2, v1, s[4:5] sc0 sc1\ns_waitcnt vmcnt(0)\ns_branch L",
        [a.ctypes.data],
        name="stuck",
    )
    bench.machine.run(10000)
    report = bench.machine.watchdog_report()
    for w in ("stuck", f"polls {hex(a.ctypes.data)}", "saw 0x29", "wave 0"):
        assert w in report


def test_work_item_ids_and_partial_waves():
    bench = Bench()
    a = bench.array(np.zeros(128, np.uint32))
    source = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_and_b32_e32 v1, 0x3ff, v0\nv_bfe_u32 v2, v0, 10, 10\nv_lshl_add_u32 v1, v2, 4, v1\nv_lshlrev_b32_e32 v1, 2, v1\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v0, s[4:5]\ns_endpgm"
    bench.submit(source, [a.ctypes.data], block=(16, 5), rsrc2=0x84 | 1 << 11)
    bench.run()
    assert (a[:80] == [x | y << 10 for y in range(5) for x in range(16)]).all()
    assert (a[80:] == 0).all()
