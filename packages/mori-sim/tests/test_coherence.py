"""The strict mode: for each publishing rule a right program passes and each single omission is reported.

Producer and consumer are two workgroups (hence on two XCDs) of one launch, or launches on two devices. With copy
engines: test_coherence_engines.py. Inside a workgroup: test_coherence_waves.py.
"""
# ruff: noqa: E501  (one instruction, one line)

import numpy as np
import pytest
from asm950 import Bench
from coherence_programs import (
    ONLY_LANE_0,
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
