"""What strict mode remembers of memory changes together with memory; else right programs are blamed."""

import re

import numpy as np
import pytest
from coherence_programs import (
    ONLY_LANE_0,
    SEEDS,
    bench,
    consumer,
    one_workgroup,
    producer,
    rules,
    two_workgroups,
)
from coherence_programs import program as steps_of

RIGHT = (
    "memory_that_was_a_queue",
    "pointers_that_were_a_queues",
    "host_after_kernel",
    "stream_opens",
    "stream_copy_opens",
    "graph_opens",
    "host_opens",
    "kernel_opens",
    "kernels_and_engine_count",
    "first_launched_ends_last",
    "many_queues_one_after_the_other",
    "half_of_a_handle_beside_another",
)
WRONG = {
    "hasty_ring": ("e", "ring_nops"),
    "another_stream_opens": ("a", "fill"),
    "half_of_a_handle_at_two_addresses": ("a", "fill"),
    "copy_across_two_mappings": ("a", "fill"),
}


DELAYS_US = ("0", "3000")  # with one, whatever is not changed together with its record is seen in between


def run(program, names, delay_us):
    options = ("--devices", "1", "--coherence", "strict")
    return program("records.py", *names, options=options, MORI_SIM_RECORD_DELAY_US=delay_us)


@pytest.fixture(scope="module", params=DELAYS_US)
def right(request, program, examples):
    return run(program, RIGHT, request.param)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_ends_well(right, name):
    assert name in right.ok(), right.output


def test_right_programs_are_not_blamed(right):
    assert "rule" not in right.output
    assert right.code == 0, right.output


@pytest.mark.parametrize("delay_us", DELAYS_US)
def test_wrong_ones_are(program, examples, delay_us):
    outcome = run(program, WRONG, delay_us)
    assert outcome.ok() == set(WRONG), outcome.output
    told = re.findall(r"^mori-sim: rule (\w+): .* stored by (\w+)_0", outcome.output, re.M)
    assert sorted(told) == sorted(WRONG.values()), outcome.output


# ------------------------------------------------------------------ the checker alone
def test_memory_that_is_given_back_has_no_history_and_its_neighbours_keep_theirs():
    b = bench(0)
    data = b.array(np.zeros(128, np.uint32))
    b.submit(one_workgroup("global_store_dword v1, v0, s[4:5]"), [data.ctypes.data, 0, 0, 0], block=(128,))
    b.run()
    first, last = data.ctypes.data + 4, data.ctypes.data + data.nbytes - 4
    b.machine.memory_released(first, last - first)
    b.machine.agent_reads("sdma 0", 0, first, last - first, "COPY source")
    assert rules(b) == set()
    for place, name in ((first - 4, "sdma 1"), (last, "sdma 2")):
        b.machine.clear_reports()
        b.machine.agent_reads(name, 0, place, 4, "COPY source")
        assert rules(b) == {"a"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("drop", "reported"), [(None, False), ("wait stores", True), ("write back", True)])
def test_what_was_announced_before_an_engine_added_to_the_word_holds(drop, reported, seed):
    """Waves and an engine count in one word; who has seen the sum may rely on what the waves had stored."""
    b = bench(seed)
    data, out = b.array(np.zeros(128, np.uint32)), b.array(np.zeros(128, np.uint32))
    count = b.array(np.zeros(64, np.uint32), uncached=True)
    add, enough = "global_atomic_add v3, v4, s[6:7] sc1", "s_cmp_lt_u32 s13, 2"
    waits = {"test": dict(consumer("", ""))["test"].replace("s_cmp_eq_u32 s13, 0", enough)}
    b.submit(
        two_workgroups(
            steps_of(producer("sc0 sc1", "sc0 sc1"), drop, {"flag": add}),
            steps_of(consumer("sc0 sc1", "sc0 sc1"), swap=waits),
        ),
        [data.ctypes.data, count.ctypes.data, out.ctypes.data, 0],
        grid=(2,),
        block=(128,),
    )
    while not count[0]:
        assert b.machine.run(16) != "fault", b.machine.fault()
    b.machine.agent_reads("sdma 0", 0, count.ctypes.data, 4, "ATOMIC")
    count[0] += 1
    b.machine.agent_writes("sdma 0", 0, count.ctypes.data, 4, "ATOMIC")
    b.run()
    assert bool(rules(b) & {"c", "d", "order"}) == reported, b.machine.reports()


@pytest.mark.parametrize("seed", SEEDS)
def test_waves_may_add_to_a_word_that_an_engine_adds_to(seed):
    b = bench(seed)
    count = b.array(np.zeros(64, np.uint32), uncached=True)
    body = f"{ONLY_LANE_0}\n" + "global_atomic_add v3, v4, s[4:5] sc1\n" * 8
    b.submit(one_workgroup(body), [count.ctypes.data, 0, 0, 0], grid=(4,))
    while b.machine.run(8) == "running":
        b.machine.agent_reads("sdma 0", 0, count.ctypes.data, 4, "ATOMIC")
        b.machine.agent_writes("sdma 0", 0, count.ctypes.data, 4, "ATOMIC")
    assert b.machine.reports() == []
