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
            b.machine.agent_observed("sdma 0", 0, bell.ctypes.data, int(bell[0]))
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


def two_ringers(seed, drop=None):
    """Two workgroups ring one doorbell, in turns: the second waits for the word that the first stores behind it."""
    b = bench(seed)
    bell, turn = (
        b.array(np.zeros(64, np.uint32), uncached=True),
        b.array(np.zeros(64, np.uint32), uncached=True),
    )
    b.machine.engine_pointer(bell.ctypes.data)
    steps = [
        ("one lane", ONLY_LANE_0),
        ("ring", "global_store_dword v3, v4, s[4:5] sc0 sc1"),
        ("wait doorbell", "s_waitcnt vmcnt(0)"),
        ("pass on", "global_store_dword v3, v4, s[6:7] sc1"),
    ]
    second = f"""{ONLY_LANE_0}
POLL:
global_load_dword v6, v3, s[6:7] sc1
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s13, v6
s_sleep 1
s_cmp_eq_u32 s13, 0
s_cbranch_scc1 POLL
global_store_dword v3, v4, s[4:5] sc0 sc1"""
    b.submit(
        two_workgroups(program(steps, drop), second), [bell.ctypes.data, turn.ctypes.data, 0, 0], grid=(2,)
    )
    b.run()
    return b


@pytest.mark.parametrize("seed", SEEDS)
def test_rule_e_a_doorbell_rung_in_turns_passes(seed):
    assert two_ringers(seed).machine.reports() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_rule_e_a_doorbell_that_may_go_back_is_reported(seed):
    assert rules(two_ringers(seed, "wait doorbell")) == {"e"}


def test_what_an_engine_may_fetch_must_be_there_and_may_be_overwritten():
    """A possible fetch is held against the write pointer, and is nothing that anybody has to wait for."""
    possible = "ring, which it may fetch whenever it looks at the write pointer"
    assert "e" in rules(engine_reads(0, program(RING, "wait packet"), uncached=True, what=possible))
    for what, reported in (("ring packets", {"order"}), (possible, set())):
        b = bench(0)
        ring = b.array(np.zeros(128, np.uint32), uncached=True)
        b.machine.agent_reads("sdma 0", 0, ring.ctypes.data, ring.nbytes, what)
        b.submit(
            one_workgroup("global_store_dword v1, v0, s[4:5]"), [ring.ctypes.data, 0, 0, 0], block=(128,)
        )
        b.machine.agent_reads("sdma 0", 0, ring.ctypes.data, ring.nbytes, what)
        b.run()
        assert rules(b) == reported


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("drop", "reported"), [(None, set()), ("wait stores", {"d"}), ("barrier", {"d"})])
def test_uncached_data_needs_its_flag(drop, reported, seed):
    """Nothing of it is in a cache, but a load that nothing orders after the store may come before it."""
    b = bench(seed)
    data, out = b.array(np.zeros(128, np.uint32), uncached=True), b.array(np.zeros(128, np.uint32))
    flag = b.array(np.zeros(64, np.uint32), uncached=True)
    steps = [s for s in producer("sc0 sc1", "sc0 sc1") if s[0] not in ("write back", "wait write back")]
    consume = program(consumer("sc0 sc1", "sc0 sc1"), "invalidate")
    arguments = [data.ctypes.data, flag.ctypes.data, out.ctypes.data, 0]
    b.submit(two_workgroups(program(steps, drop), consume), arguments, grid=(2,), block=(128,))
    b.run()
    assert rules(b) == reported


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("drop", "reported"), [(None, set()), *((d, {"a"}) for d in PRODUCER_OMISSIONS)])
def test_what_a_polled_word_announces_may_be_copied(drop, reported, seed):
    """A queue that stands at a POLL, and a kernel that stores data and then the word."""
    b = bench(seed)
    data, flag = b.array(np.zeros(128, np.uint32)), b.array(np.zeros(64, np.uint32), uncached=True)
    text = one_workgroup(program(producer("sc0 sc1", "sc0 sc1"), drop))
    b.submit(text, [data.ctypes.data, flag.ctypes.data, 0, 0], block=(128,))
    b.machine.agent_observed("sdma 0", 0, b.array(np.zeros(64, np.uint32), uncached=True).ctypes.data, 0)
    met = False
    while (state := b.machine.run(16)) == "running" or not met:
        assert state != "fault", b.machine.fault()
        if flag[0] and not met:
            met = True
            b.machine.agent_polled("sdma 0", 0, flag.ctypes.data, 4)
            b.machine.agent_reads("sdma 0", 0, data.ctypes.data, data.nbytes, "COPY source")
    assert rules(b) == reported


def test_reading_a_clock_needs_no_register():
    """s_memrealtime has no address: it does not read s[0:1], into which a load is outstanding here."""
    b = bench(0)
    body = "s_mov_b64 s[14:15], s[0:1]\ns_load_dwordx2 s[0:1], s[14:15], 0x0\ns_memrealtime s[16:17]\ns_waitcnt lgkmcnt(0)"
    b.submit(one_workgroup(body), [0, 0, 0, 0])
    b.run()
    assert b.machine.reports() == []


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
@pytest.mark.parametrize(
    ("drop", "shared", "reported"),
    [(None, True, False), ("invalidate", True, True), ("invalidate", False, False)],
)
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


# ------------------------------------------------------------------ a buffer reused before the copy out of it is over
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drop", [None, "poll", "wait poll"])
def test_a_store_over_what_an_engine_still_reads_is_reported(drop, late, seed):
    """The kernel rings the bell, waits for the engine's signal, and fills the source again. The engine reads at
    once, or as late as it can."""
    fill = "v_add_u32_e32 v5, 7, v0\nglobal_store_dword v1, v5, s[4:5] sc0 sc1"
    steps = [
        ("fill", fill),
        ("wait fill", "s_waitcnt vmcnt(0)"),
        ("bell", "global_store_dword v3, v4, s[6:7] sc0 sc1"),
        ("poll", "POLL:\nglobal_load_dword v6, v3, s[8:9] sc0 sc1"),
        ("wait poll", "s_waitcnt vmcnt(0)"),
        ("test", "v_readfirstlane_b32 s13, v6\ns_sleep 1\ns_cmp_eq_u32 s13, 0\ns_cbranch_scc1 POLL"),
        ("refill", fill),
    ]
    text = program(steps, drop, {"test": ""} if drop == "poll" else None)
    b = bench(seed)
    data, bell, signal = (
        b.array(np.zeros(64, np.uint32)),
        b.array(np.zeros(64, np.uint32)),
        b.array(np.zeros(64, np.uint32)),
    )
    b.submit(one_workgroup(text), [data.ctypes.data, bell.ctypes.data, signal.ctypes.data, 0])
    while not bell[0]:
        assert b.machine.run(1) != "fault", b.machine.fault()
    if late:
        b.machine.run(200)
    b.machine.agent_observed("sdma 0", 0, bell.ctypes.data, int(bell[0]))
    b.machine.agent_reads("sdma 0", 0, data.ctypes.data, data.nbytes, "COPY source")
    signal[0] = 1
    b.machine.agent_writes("sdma 0", 0, signal.ctypes.data, 8, "ATOMIC")
    b.run()
    found = rules(b)
    if drop is None:
        assert found == set()
    elif drop == "poll":
        assert found == ({"a"} if late else {"order"})
    else:
        assert "wait" in found


# ------------------------------------------------------------------ what the end of a kernel publishes
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("publishes", [True, False])
@pytest.mark.parametrize("reader", ["kernel", "engine", "signal"])
def test_the_end_of_a_kernel_publishes_what_the_option_says(reader, publishes, home, seed):
    """With agent scope only the device's own memory: what lies on another device needs buffer_wbl2 sc0 sc1."""
    b = Bench(
        strict=True, order="random", seed=seed, xcd_seed=seed, slice=64, end_of_kernel_publishes=publishes
    )
    data, out = b.array(np.zeros(128, np.uint32), home=home), b.array(np.zeros(128, np.uint32), home=1)
    args = [data.ctypes.data, out.ctypes.data, 0, 0]
    b.submit(one_workgroup("global_store_dword v1, v0, s[4:5]"), args, block=(128,))
    b.run()
    if reader == "kernel":
        b.submit(
            one_workgroup("global_load_dword v5, v1, s[4:5]\ns_waitcnt vmcnt(0)"),
            args,
            block=(128,),
            device=1,
        )
    elif reader == "signal":
        b.submit(one_workgroup("global_store_dword v3, v4, s[6:7] sc0 sc1"), args)
    b.run()
    if reader == "engine":
        b.machine.agent_joined("host", 1)
        b.machine.agent_joined("sdma 0", 1)
        b.machine.agent_reads("sdma 0", 0, data.ctypes.data, data.nbytes, "COPY source")
    rule = "a" if reader == "engine" else "c"
    assert rules(b) == (set() if publishes or home == 0 else {rule})


# ------------------------------------------------------------------ options of the machine
def test_the_first_report_can_end_the_run():
    b = Bench(strict=True, stop_at_first_report=True)
    data = b.array(np.zeros(64, np.uint32))
    b.submit(
        one_workgroup("global_load_dword v5, v1, s[4:5]\nv_mov_b32_e32 v6, v5"), [data.ctypes.data, 0, 0, 0]
    )
    with pytest.raises(RuntimeError, match="rule wait"):
        b.run()


@pytest.mark.parametrize(("num_xcds", "expected"), [(1, set()), (2, {"c"})])
def test_workgroups_of_one_xcd_share_its_cache(num_xcds, expected):
    b = Bench(strict=True, num_xcds=num_xcds, cus_per_xcd=2)
    data, flag, out = (b.array(np.zeros(n, np.uint32)) for n in (128, 64, 128))
    text = two_workgroups(program(producer("sc1", "sc1"), "write back"), program(consumer("sc1", "sc1")))
    b.submit(text, [data.ctypes.data, flag.ctypes.data, out.ctypes.data, 0], grid=(2,), block=(128,))
    b.run()
    assert rules(b) == expected
