"""The strict mode: for each publishing rule a right program passes and each single omission is reported.

Programs are lists of (name, assembly) steps; a variant drops or replaces one step. Each runs under ten random schedules
and ten workgroup-to-XCD mappings: a report must not depend on luck.

Producer and consumer are two workgroups (hence on two XCDs) of one launch, or launches on two devices; copy engines are
played by the test, which tells the checker what an engine would.
"""
# ruff: noqa: E501  (one instruction, one line)

import numpy as np
import pytest
from asm950 import Bench

SEEDS = range(10)

# s[4:5] data, s[6:7] flag, s[8:9] output, s[10:11] second argument of the engine tests
SETUP = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx4 s[8:11], s[0:1], 0x10
v_lshlrev_b32_e32 v1, 2, v0
v_lshrrev_b32_e32 v2, 6, v0
v_mov_b32_e32 v3, 0
v_mov_b32_e32 v4, 1
s_nop 0
v_readfirstlane_b32 s12, v2
s_waitcnt lgkmcnt(0)
"""
ONLY_WAVE_0 = "s_cmp_lg_u32 s12, 0\ns_cbranch_scc1 END"
ONLY_LANE_0 = "s_mov_b64 exec, 1"


def program(steps: list[tuple[str, str]], drop: str | None = None, swap: dict[str, str] | None = None) -> str:
    swap = swap or {}
    names = [n for n, _ in steps]
    assert drop is None or drop in names
    assert set(swap) <= set(names)
    return "\n".join(swap.get(n, text) for n, text in steps if n != drop)


def producer(scope: str, flag_scope: str) -> list[tuple[str, str]]:
    """Two waves store 512 bytes; wave 0 publishes for both."""
    return [
        ("store", "v_add_u32_e32 v5, 7, v0\nglobal_store_dword v1, v5, s[4:5]"),
        ("wait stores", "s_waitcnt vmcnt(0)"),
        ("barrier", "s_barrier"),
        ("leader", ONLY_WAVE_0),
        ("write back", f"buffer_wbl2 {scope}"),
        ("wait write back", "s_waitcnt vmcnt(0)"),
        ("one lane", ONLY_LANE_0),
        ("flag", f"global_store_dword v3, v4, s[6:7] {flag_scope}"),
    ]


def consumer(scope: str, poll_scope: str) -> list[tuple[str, str]]:
    """Both waves poll, then read."""
    return [
        ("poll", f"POLL:\nglobal_load_dword v6, v3, s[6:7] {poll_scope}"),
        ("wait poll", "s_waitcnt vmcnt(0)"),
        ("test", "v_readfirstlane_b32 s13, v6\ns_sleep 1\ns_cmp_eq_u32 s13, 0\ns_cbranch_scc1 POLL"),
        ("invalidate", f"buffer_inv {scope}"),
        ("read", "global_load_dword v7, v1, s[4:5]"),
        ("wait read", "s_waitcnt vmcnt(0)"),
        ("out", "global_store_dword v1, v7, s[8:9]"),
    ]


def two_workgroups(produce: str, consume: str) -> str:
    return f"{SETUP}\ns_cmp_eq_u32 s2, 1\ns_cbranch_scc1 CONSUMER\n{produce}\ns_endpgm\nCONSUMER:\n{consume}\nEND:\ns_endpgm"


def one_workgroup(body: str) -> str:
    return f"{SETUP}\n{body}\nEND:\ns_endpgm"


def bench(seed: int) -> Bench:
    return Bench(strict=True, order="random", seed=seed, xcd_seed=seed, slice=64)


def rules(b: Bench) -> set[str]:
    return {r[0] for r in b.machine.reports()}


# ------------------------------------------------------------------ two XCDs of one device, rules c and d
def same_device(seed, produce, consume):
    b = bench(seed)
    data, flag, out = (
        b.array(np.zeros(128, np.uint32)),
        b.array(np.zeros(64, np.uint32)),
        b.array(np.zeros(128, np.uint32)),
    )
    b.submit(
        two_workgroups(produce, consume),
        [data.ctypes.data, flag.ctypes.data, out.ctypes.data, 0],
        grid=(2,),
        block=(128,),
    )
    b.run()
    return b, out


@pytest.mark.parametrize("seed", SEEDS)
def test_right_program_on_one_device_passes(seed):
    b, out = same_device(seed, program(producer("sc1", "sc1")), program(consumer("sc1", "sc1")))
    assert b.machine.reports() == []
    assert np.array_equal(out, np.arange(128) + 7)


PRODUCER_OMISSIONS = ["wait stores", "barrier", "write back", "wait write back"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drop", PRODUCER_OMISSIONS)
def test_producer_omission_on_one_device(drop, seed):
    b, _ = same_device(seed, program(producer("sc1", "sc1"), drop), program(consumer("sc1", "sc1")))
    assert rules(b) & {"c", "d", "order"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("drop", "swap", "rule"),
    [
        ("invalidate", None, "d"),
        ("wait poll", None, "wait"),
        (None, {"poll": "POLL:\nglobal_load_dword v6, v3, s[6:7]"}, "d"),
        (None, {"invalidate": "buffer_inv sc0"}, "d"),
        ("wait read", None, "wait"),
    ],
)
def test_consumer_omission_on_one_device(drop, swap, rule, seed):
    b, _ = same_device(seed, program(producer("sc1", "sc1")), program(consumer("sc1", "sc1"), drop, swap))
    assert rule in rules(b)


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_flag_store_is_reported(seed):
    b, _ = same_device(seed, program(producer("sc1", "")), program(consumer("sc1", "sc1")))
    assert "c" in rules(b)


# ------------------------------------------------------------------ another device's memory, rules c and d
def two_devices(seed, produce, consume, uncached=False):
    b = bench(seed)
    data = b.array(np.zeros(128, np.uint32), home=1, uncached=uncached)
    flag, out = b.array(np.zeros(64, np.uint32), home=1), b.array(np.zeros(128, np.uint32), home=1)
    args = [data.ctypes.data, flag.ctypes.data, out.ctypes.data, 0]
    b.submit(one_workgroup(consume), args, block=(128,), device=1, name="consumer")
    b.submit(one_workgroup(produce), args, block=(128,), device=0, name="producer", base=0x20_0000_0000)
    b.run()
    return b, out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["cached", "uncached", "write-through"])
def test_right_program_on_two_devices_passes(kind, seed):
    steps, drop, swap = producer("sc0 sc1", "sc0 sc1"), None, {}
    if kind != "cached":
        drop = "write back"
    if kind == "write-through":
        swap = {"store": "v_add_u32_e32 v5, 7, v0\nglobal_store_dword v1, v5, s[4:5] sc0 sc1"}
    b, out = two_devices(
        seed, program(steps, drop, swap), program(consumer("sc0 sc1", "sc0 sc1")), uncached=kind == "uncached"
    )
    assert b.machine.reports() == []
    assert np.array_equal(out, np.arange(128) + 7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("drop", "swap"),
    [
        *[(d, None) for d in PRODUCER_OMISSIONS],
        (None, {"write back": "buffer_wbl2 sc1"}),
        (None, {"store": "v_add_u32_e32 v5, 7, v0\nglobal_store_dword v1, v5, s[4:5] sc1", "write back": ""}),
    ],
)
def test_producer_omission_on_two_devices(drop, swap, seed):
    b, _ = two_devices(
        seed, program(producer("sc0 sc1", "sc0 sc1"), drop, swap), program(consumer("sc0 sc1", "sc0 sc1"))
    )
    assert rules(b) & {"c", "d", "order"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drop", PRODUCER_OMISSIONS)
def test_unpublished_peer_store_is_reported_where_the_signal_is_sent(drop, seed):
    """The reader may be another process: the producer alone must be enough, unless nothing orders the waves at all."""
    b = bench(seed)
    data, flag = b.array(np.zeros(128, np.uint32), home=1), b.array(np.zeros(64, np.uint32), home=1)
    b.submit(
        one_workgroup(program(producer("sc0 sc1", "sc0 sc1"), drop)),
        [data.ctypes.data, flag.ctypes.data, 0, 0],
        block=(128,),
    )
    b.run()
    assert drop == "barrier" or "c" in rules(b)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("drop", "swap", "rule"),
    [("invalidate", None, "d"), ("wait poll", None, "wait"), (None, {"invalidate": "buffer_inv sc1"}, "d"),
     (None, {"poll": "POLL:\nglobal_load_dword v6, v3, s[6:7]"}, "d")],
)  # fmt: skip
def test_consumer_omission_on_two_devices(drop, swap, rule, seed):
    b, _ = two_devices(
        seed, program(producer("sc0 sc1", "sc0 sc1")), program(consumer("sc0 sc1", "sc0 sc1"), drop, swap)
    )
    assert rule in rules(b)


def test_scopes_that_cannot_reach_are_reported():
    b = bench(0)
    peer = b.array(np.zeros(64, np.uint32), home=1)
    b.submit(
        one_workgroup(
            ONLY_LANE_0
            + "\nglobal_atomic_add v3, v4, s[4:5]\nglobal_store_short v3, v4, s[4:5] offset:8 sc0 sc1"
        ),
        [peer.ctypes.data, 0, 0, 0],
    )
    b.run()
    assert [r[0] for r in b.machine.reports()] == ["scope", "scope"]


# ------------------------------------------------------------------ copy engines, rules a, b and e
def engine_reads(seed, produce, uncached=False, what="copy source"):
    """A kernel stores data and rings a doorbell; the engine then reads the data. A second kernel keeps the first's end open."""
    b = bench(seed)
    data = b.array(np.zeros(128, np.uint32), uncached=uncached)
    bell = b.array(np.zeros(64, np.uint32), uncached=True)
    b.submit(one_workgroup(produce), [data.ctypes.data, bell.ctypes.data, 0, 0], block=(128,))
    state = "running"
    rung = False
    while state == "running" or not rung:
        state = b.machine.run(16)
        assert state != "fault", b.machine.fault()
        if bell[0] and not rung:
            rung = True
            b.machine.agent_observed("sdma 0", 0, bell.ctypes.data, 8)
            b.machine.agent_reads("sdma 0", 0, data.ctypes.data, data.nbytes, what)
    return b


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scope", ["sc1", "sc0 sc1"])
def test_rule_a_right_program_passes(scope, seed):
    assert engine_reads(seed, program(producer(scope, "sc0 sc1"))).machine.reports() == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drop", PRODUCER_OMISSIONS)
def test_rule_a_omission(drop, seed):
    assert "a" in rules(engine_reads(seed, program(producer("sc0 sc1", "sc0 sc1"), drop)))


RING = [
    ("leader", ONLY_WAVE_0),
    ("packet", "global_store_dword v1, v0, s[4:5]"),
    ("wait packet", "s_waitcnt vmcnt(0)"),
    ("one lane", ONLY_LANE_0),
    ("doorbell", "global_store_dword v3, v4, s[6:7] sc0 sc1"),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_rule_e_right_program_passes(seed):
    assert engine_reads(seed, program(RING), uncached=True, what="ring packets").machine.reports() == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("drop", "uncached"), [("wait packet", True), (None, False)])
def test_rule_e_omission(drop, uncached, seed):
    assert "e" in rules(engine_reads(seed, program(RING, drop), uncached=uncached, what="ring packets"))


def engine_writes(seed, consume, grid=(1,)):
    """The engine copies data in and adds to a signal while the kernel polls."""
    b = bench(seed)
    data, flag, out = (
        b.array(np.zeros(128, np.uint32)),
        b.array(np.zeros(64, np.uint32)),
        b.array(np.zeros(128, np.uint32)),
    )
    b.submit(
        one_workgroup(consume),
        [data.ctypes.data, flag.ctypes.data, out.ctypes.data, 0],
        block=(128,),
        grid=grid,
    )
    b.machine.run(200)
    data[:] = np.arange(128) + 7
    b.machine.agent_writes("sdma 0", 0, data.ctypes.data, data.nbytes, "copy destination")
    flag[0] = 1
    b.machine.agent_writes("sdma 0", 0, flag.ctypes.data, 8, "atomic")
    b.run()
    return b, out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reads", ["after buffer_inv", "with scope bits"])
def test_rule_b_right_program_passes(reads, seed):
    steps = consumer("sc0 sc1", "sc0 sc1")
    text = (
        program(steps)
        if reads == "after buffer_inv"
        else program(steps, "invalidate", {"read": "global_load_dword v7, v1, s[4:5] sc0 sc1"})
    )
    b, out = engine_writes(seed, text)
    assert b.machine.reports() == []
    assert np.array_equal(out, np.arange(128) + 7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("drop", "swap", "rule"),
    [("invalidate", None, "b"), (None, {"invalidate": "buffer_inv sc1"}, "b"), ("wait poll", None, "wait"),
     (None, {"poll": "POLL:\nglobal_load_dword v6, v3, s[6:7]"}, "b")],
)  # fmt: skip
def test_rule_b_omission(drop, swap, rule, seed):
    b, _ = engine_writes(seed, program(consumer("sc0 sc1", "sc0 sc1"), drop, swap))
    assert rule in rules(b)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("drop", "shared", "reported"), [(None, True, False), ("invalidate", True, True), ("invalidate", False, False)])
def test_signals_of_other_processes(drop, shared, reported, seed):
    """Data and flag change without the checker being told, as a peer's process does it. Own memory needs no acquire."""
    b = bench(seed)
    data, out = b.array(np.zeros(128, np.uint32), shared=shared), b.array(np.zeros(128, np.uint32))
    flag = b.array(np.zeros(64, np.uint32), shared=True)
    steps = program(consumer("sc0 sc1", "sc0 sc1"), drop)
    b.submit(one_workgroup(steps), [data.ctypes.data, flag.ctypes.data, out.ctypes.data, 0], block=(128,))
    b.machine.run(100)
    data[:], flag[0] = 3, 1
    b.run()
    assert rules(b) == ({"d"} if reported else set())


def test_kernel_end_publishes_and_start_invalidates():
    b = bench(0)
    data, out = b.array(np.zeros(128, np.uint32)), b.array(np.zeros(128, np.uint32))
    b.submit(one_workgroup("global_store_dword v1, v0, s[4:5]"), [data.ctypes.data, 0, 0, 0], block=(128,))
    b.run()
    b.submit(
        one_workgroup(program(consumer("", "")[4:])),
        [data.ctypes.data, 0, out.ctypes.data, 0],
        block=(128,),
        grid=(3,),
    )
    b.run()
    assert b.machine.reports() == []


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


def test_lds_dma_needs_wait_then_barrier_for_other_waves():
    body = [("dma", "s_lshl_b32 m0, s12, 8\nglobal_load_lds_dword v1, s[4:5]"), ("wait", "s_waitcnt vmcnt(0)"), ("barrier", "s_barrier"),
            ("read", "v_xor_b32_e32 v2, 256, v1\nds_read_b32 v5, v2\ns_waitcnt lgkmcnt(0)")]  # fmt: skip
    for drop in (None, "wait", "barrier"):
        found = []
        for seed in SEEDS:
            b = bench(seed)
            data = b.array(np.zeros(256, np.uint32))
            b.submit(one_workgroup(program(body, drop)), [data.ctypes.data, 0, 0, 0], lds=1024, block=(128,))
            b.run()
            found.append(rules(b))
        if drop is None:
            assert not any(found)
        elif drop == "wait":
            assert all(f == {"wait"} for f in found)
        else:  # without the barrier a wave may also come before the other's DMA was issued at all
            assert any(found)
