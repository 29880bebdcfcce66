"""The strict mode inside a workgroup: waits before results are used, and LDS that waves share."""
# ruff: noqa: E501  (one instruction, one line)

import numpy as np
import pytest
from coherence_programs import ONLY_LANE_0, SEEDS, bench, one_workgroup, program, rules


# ------------------------------------------------------------------ missing waits
@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("global_load_dword v5, v1, s[4:5]\nv_add_u32_e32 v6, 1, v5", "vmcnt(0)"),
        (
            "global_load_dword v5, v1, s[4:5]\nglobal_load_dword v6, v1, s[4:5]\nv_add_u32_e32 v7, 1, v5",
            "vmcnt(1)",
        ),
        (
            "global_load_dword v5, v1, s[4:5]\nglobal_load_dword v6, v1, s[4:5]\ns_waitcnt vmcnt(1)\nv_add_u32_e32 v7, 1, v6",
            "vmcnt(0)",
        ),
        ("s_load_dword s14, s[4:5], 0x0\ns_add_u32 s15, s14, 1", "lgkmcnt(0)"),
        ("ds_read_b32 v5, v1\nv_add_u32_e32 v6, 1, v5", "lgkmcnt(0)"),
        ("global_load_dwordx4 v[8:11], v1, s[4:5]\nv_mov_b32_e32 v10, 0", "overwrites v10"),
        (
            "s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[4:5]\nds_read_b32 v5, v1\ns_waitcnt lgkmcnt(0)",
            "LDS",
        ),
    ],
)
def test_missing_wait_is_reported(body, what):
    b = bench(0)
    data = b.array(np.zeros(256, np.uint32))
    b.submit(one_workgroup(body), [data.ctypes.data, 0, 0, 0], lds=1024)
    b.run()
    found = b.machine.reports()
    assert [r[0] for r in found] == ["wait"]
    assert what in found[0][1]


# ------------------------------------------------------------------ LDS shared by the waves of a workgroup
OTHER = "v_xor_b32_e32 v2, 256, v1"  # the same item of the other of two waves


def lds_program(
    put: str, wait: str, get: str = "ds_read_b32 v5, v2\ns_waitcnt lgkmcnt(0)"
) -> list[tuple[str, str]]:
    """Two waves fill their halves, read each other's, and fill their own again."""
    return [
        ("address", OTHER), ("fill", put), ("wait fill", wait), ("barrier", "s_barrier"),
        ("get", get), ("barrier before refill", "s_barrier"), ("refill", put), ("wait refill", wait),
    ]  # fmt: skip


LDS_PROGRAMS = {
    "dma": lds_program("s_lshl_b32 m0, s12, 8\nglobal_load_lds_dword v1, s[4:5]", "s_waitcnt vmcnt(0)"),
    "ds_write_b32": lds_program("ds_write_b32 v1, v0", "s_waitcnt lgkmcnt(0)"),
    "ds_write_b8": lds_program("ds_write_b8 v1, v0", "s_waitcnt lgkmcnt(0)", "ds_read_u8 v5, v2\ns_waitcnt lgkmcnt(0)"),
    "ds_write2_b32": lds_program("ds_write2_b32 v1, v0, v0 offset1:128", "s_waitcnt lgkmcnt(0)", "ds_read2_b32 v[6:7], v2 offset1:128\ns_waitcnt lgkmcnt(0)"),
    "ds_add_u32": lds_program("ds_add_u32 v1, v4", "s_waitcnt lgkmcnt(0)"),
    "flat": lds_program("v_mov_b32_e32 v10, v1\ns_mov_b64 s[14:15], src_shared_base\nv_mov_b32_e32 v11, s15\nflat_store_dword v[10:11], v0", "s_waitcnt vmcnt(0) lgkmcnt(0)"),
}  # fmt: skip


def lds_rules(seed: int, text: str, waves: int = 2) -> set[str]:
    b = bench(seed)
    data = b.array(np.zeros(256, np.uint32))
    b.submit(one_workgroup(text), [data.ctypes.data, 0, 0, 0], lds=2048, block=(64 * waves,))
    b.run()
    return rules(b)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", LDS_PROGRAMS)
def test_right_sharing_of_lds_passes(kind, seed):
    assert lds_rules(seed, program(LDS_PROGRAMS[kind])) == set()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("drop", "rule"), [("wait fill", "wait"), ("barrier", "lds"), ("barrier before refill", "lds")]
)
@pytest.mark.parametrize("kind", LDS_PROGRAMS)
def test_every_omission_in_sharing_lds_is_reported(kind, drop, rule, seed):
    assert rule in lds_rules(seed, program(LDS_PROGRAMS[kind], drop))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", [0, 1])
def test_a_reader_and_a_writer_without_a_barrier_are_reported_whichever_comes_first(late, seed):
    """Wave 0 reads, wave 1 writes, once; one of them runs when the other has ended."""
    wait = f"s_cmp_lg_u32 s12, {late}\ns_cbranch_scc1 NOW\n" + "s_sleep 1\n" * 200 + "NOW:\n"
    body = "s_cmp_eq_u32 s12, 0\ns_cbranch_scc1 READ\nds_write_b32 v1, v0\ns_branch END\nREAD:\nds_read_b32 v5, v2"
    assert lds_rules(seed, OTHER + "\n" + wait + body) == {"lds"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_of_lds_must_be_over_before_the_barrier_that_lets_others_write(seed):
    late = {"get": "ds_read_b32 v5, v2", "wait refill": "s_waitcnt lgkmcnt(0)"}
    assert lds_rules(seed, program(LDS_PROGRAMS["ds_write_b32"], None, late)) == {"wait"}


@pytest.mark.parametrize("seed", SEEDS)
def test_waves_that_write_the_same_place_in_lds_are_reported(seed):
    assert lds_rules(seed, "ds_write_b32 v3, v0\ns_waitcnt lgkmcnt(0)") == {"lds"}


@pytest.mark.parametrize("seed", SEEDS)
def test_narrow_writes_side_by_side_in_a_dword_are_no_race(seed):
    assert (
        lds_rules(
            seed,
            "v_lshl_add_u32 v2, v0, 1, s12\nv_and_b32_e32 v2, 126, v2\nv_or_b32_e32 v2, s12, v2\nds_write_b8 v2, v0",
        )
        == set()
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_by_atomics_are_no_race(seed):
    assert (
        lds_rules(seed, "ds_add_u32 v3, v4\nds_add_rtn_u32 v5, v3, v4\ns_waitcnt lgkmcnt(0)", waves=4)
        == set()
    )


FLAG = [
    ("which", "s_cmp_lg_u32 s12, 0\ns_cbranch_scc1 TAKE"),
    ("data", "ds_write_b32 v1, v0"),
    ("wait data", "s_waitcnt lgkmcnt(0)"),
    ("give", ONLY_LANE_0 + "\nds_add_u32 v3, v4 offset:1024\ns_branch END"),
    ("poll", "TAKE:\nv_mov_b32_e32 v8, 0\nPOLL:\n" + ONLY_LANE_0 + "\nds_add_rtn_u32 v6, v3, v8 offset:1024"),
    ("wait poll", "s_waitcnt lgkmcnt(0)"),
    (
        "test",
        "v_readfirstlane_b32 s13, v6\ns_sleep 1\ns_cmp_eq_u32 s13, 0\ns_cbranch_scc1 POLL\ns_mov_b64 exec, -1",
    ),
    ("take", OTHER + "\nds_read_b32 v5, v2\ns_waitcnt lgkmcnt(0)"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("drop", "expected"), [(None, set()), ("wait data", {"lds"})])
def test_an_atomic_flag_in_lds_orders_what_was_waited_for(drop, expected, seed):
    assert lds_rules(seed, program(FLAG, drop)) == expected
