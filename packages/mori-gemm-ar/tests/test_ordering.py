"""Slow ranks, slow engines, calls back to back: nothing may be read before it is there, or after it is gone.

Every call has another B (`turn`) and another M than the one before, so that whatever is read too early or too
late is wrong. After each call the result is overwritten with NaN at once: a peer that still needed it would
show.
"""

import random
import time

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.options import MODES
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.problem import Problem
from mori_gemm_ar.testing import gx, gx_want
from mori_shmem.testing import faults

N, K = 136, 128
ROWS = (200, 3, 129, 0, 64, 1)
WIRES = {
    "bf16": {},
    "bf16 other way": {"gather_transport": "other"},
    "fp8 lsa": {"gather_dtype": "fp8"},
    "fp8 sdma": {"gather_dtype": "fp8", "gather_transport": "sdma"},
    "pushed": {"gather_transport": "sdma", "fuse_reduce_push": True},
}
CASES = [(mode, wire) for mode in MODES[1:] for wire in WIRES]


def made(comm, mode, wire, **more):
    options = {**WIRES[wire], **more}
    if options.get("gather_transport") == "other":
        options["gather_transport"] = "lsa" if mode.endswith("sdma") else "sdma"
    return GemmAllReduce(comm, n=N, k=K, m_max=200, mode=mode, self_test=False, **options)


class Work:
    """Operands and right answers for (m, turn), made before the ranks race."""

    def __init__(self, comm, rows=ROWS, turns=7):
        self.rank, self.world_size = comm.rank, comm.world_size
        self.operands = {
            (m, t): gx(m, N, K, comm.rank, "blockscale", turn=t) for m in rows for t in range(turns)
        }
        self.want = {
            (m, t, dtype): gx_want(m, N, K, comm.world_size, "blockscale", dtype, turn=t)
            for m in rows
            for t in range(turns)
            for dtype in ("bf16", "fp8")
        }

    def wrong(self, op, m, turn):
        operands = self.operands[m, turn]
        out = op(operands.a, operands.b, operands.a_scale, operands.b_scale)
        right = torch.equal(out, self.want[m, turn, op.options.gather_dtype])
        out.fill_(torch.nan)
        return [] if right else [f"rank {self.rank}, m={m}, turn {turn}"]


def with_jitter(cases, world_size):
    """Each rank sleeps now and then, before phases and bands, each in its own rhythm."""
    comm = mori_shmem.init("host", timeout_s=20)
    work, found = Work(comm), {}
    for case in cases:
        rhythm = random.Random(f"{case} {comm.rank}")

        def pause(step, rhythm=rhythm):
            if rhythm.random() < 0.3:
                time.sleep(rhythm.random() * 0.004)

        with made(comm, *case) as op:
            op._runner.on_step = pause
            found[case] = [w for call in range(14) for w in work.wrong(op, ROWS[call % 6], call % 7)]
    comm.close()
    return found


def with_one_slow_step(cases, world_size):
    """In turn every rank is late at every single phase, by far more than a call takes."""
    comm = mori_shmem.init("host", timeout_s=20)
    work, found = Work(comm), {}
    for case in cases:
        with made(comm, *case) as op:
            steps = [*Plan(Problem(200, N, K, world_size), op.options, 64).phases, "band"]
            found[case] = []
            for turn, (slow, late) in enumerate((rank, step) for rank in range(world_size) for step in steps):
                op._runner.on_step = lambda step, late=late, slow=slow: (
                    time.sleep(0.01) if step == late and comm.rank == slow else None
                )
                for m in (200, 129):
                    found[case] += work.wrong(op, m, turn % 7)
    comm.close()
    return found


def with_slow_engines(cases, world_size):
    """The copy engines of one rank take their time before each copy."""
    comm = mori_shmem.init("host", timeout_s=20)
    work, found = Work(comm), {}
    for case in cases:
        with made(comm, *case) as op, faults(comm, delay_us=3000 if comm.rank == 1 else 0):
            found[case] = [w for call in range(8) for w in work.wrong(op, ROWS[call % 6], call % 7)]
    comm.close()
    return found


@pytest.mark.parametrize("disturbance", [with_jitter, with_one_slow_step, with_slow_engines])
def test_slow_ranks_and_engines_change_nothing(disturbance):
    by_rank = mori_shmem.run_ranks(disturbance, 3, CASES, 3, timeout_s=200)
    for case in CASES:
        assert [text for rank in by_rank for text in rank[case]] == [], case


def many_calls(world_size, calls):
    comm = mori_shmem.init("host", timeout_s=20)
    work, found = Work(comm, rows=(1, 17, 5, 64, 0, 33)), []
    rows = (1, 17, 5, 64, 0, 33)
    for mode in MODES[1:]:
        with made(comm, mode, "bf16") as op:
            found += [f"{mode}: {w}" for i in range(calls) for w in work.wrong(op, rows[i % 6], i % 7)]
    comm.close()
    return found


def test_a_thousand_small_calls_of_alternating_size():
    assert mori_shmem.run_ranks(many_calls, 3, 3, 250, timeout_s=200) == [[], [], []]


def two_ops_in_turns(world_size):
    """Two ops on one communicator share its queues, not their flags."""
    comm = mori_shmem.init("host", timeout_s=20)
    work = Work(comm)
    with made(comm, "fused-sdma", "bf16") as one, made(comm, "split-sdma", "fp8 sdma") as two:
        found = [
            w for call in range(30) for op in (one, two) for w in work.wrong(op, ROWS[call % 6], call % 7)
        ]
    comm.close()
    return found


def test_two_ops_on_one_communicator():
    assert mori_shmem.run_ranks(two_ops_in_turns, 3, 3, timeout_s=100) == [[], [], []]


def two_groups(world_size):
    """Ranks {0,1} and {2,3} each have an op of their own, at the same time, of different sizes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    comm = mori_shmem.init("host", group=pairs[rank // 2], timeout_s=20)
    m = (129, 17)[rank // 2]
    want = gx_want(m, N, K, 2, "blockscale")
    operands = gx(m, N, K, rank % 2, "blockscale")
    with GemmAllReduce(comm, n=N, k=K, m_max=m) as op:
        wrong = sum(
            not torch.equal(op(operands.a, operands.b, operands.a_scale, operands.b_scale), want)
            for _ in range(50)
        )
    comm.close()
    dist.destroy_process_group()
    return wrong


def test_SH_2_two_groups_at_the_same_time():
    assert mori_shmem.run_ranks(two_groups, 4, 4, timeout_s=60) == [0, 0, 0, 0]


def same_sequence_twice(world_size):
    """The order of the replays, without graphs: new inputs each round, other calls in between."""
    comm = mori_shmem.init("host", timeout_s=20)
    rows, found = (16, 64, 200), []
    work = Work(comm, rows=rows)
    for mode in MODES[1:]:
        for wire in ("bf16", "fp8 lsa"):
            with made(comm, mode, wire) as op:
                for turn in range(10):
                    for m in (200, 16, 64, 16, 200):
                        found += work.wrong(op, m, turn % 7)
                for turn in range(20):
                    found += work.wrong(op, 64, turn % 7)
    comm.close()
    return found


def test_GA_5_sizes_in_any_order_on_one_op():
    assert mori_shmem.run_ranks(same_sequence_twice, 2, 2, timeout_s=200) == [[], []]
