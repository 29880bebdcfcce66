"""The strict mode where copy engines read and write, rules a, b and e: a right program passes and each single
omission is reported. The test plays the engines, and tells the checker what one would.
"""
# ruff: noqa: E501  (one instruction, one line)

import numpy as np
import pytest
from coherence_programs import (
    ONLY_LANE_0,
    ONLY_WAVE_0,
    PRODUCER_OMISSIONS,
    SEEDS,
    bench,
    consumer,
    one_workgroup,
    producer,
    program,
    rules,
    two_workgroups,
)


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
