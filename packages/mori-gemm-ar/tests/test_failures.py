"""Something is missing: a rank, an agreement, the engines. Never a hang, never a wrong sum."""

import time

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.options import MODES
from mori_gemm_ar.testing import gx
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    CollectiveMismatch,
    MoriError,
    PeerDied,
    PeerTimeout,
    QueueLimitError,
    TransportInert,
)
from mori_shmem.testing import allowing_for_load, die, faults, run_ranks_to_the_end

N, K = 136, 128


def operands(m, comm):
    g = gx(m, N, K, comm.rank, "blockscale")
    return g.a, g.b, g.a_scale, g.b_scale


def die_in_the_middle(mode, step, victim):
    """The victim kills itself at a step of its third call; the others tell what they saw, and how late."""
    comm = mori_shmem.init("host", timeout_s=30)
    clock = comm.alloc(8)
    op = GemmAllReduce(comm, n=N, k=K, m_max=200, mode=mode)
    args = operands(200, comm)
    for _ in range(2):
        op(*args)

    def last_words(now):
        if now == step and comm.rank == victim:
            for peer in range(comm.world_size):
                comm.signal(clock.at(0, peer), time.monotonic_ns())
            die()

    op._runner.on_step = last_words
    try:
        op(*args)
    except PeerDied as died:
        late_s = (time.monotonic_ns() - comm.read(clock.at(0))) / 1e9
        try:
            op(*args)
        except MoriError as unusable:
            text = str(unusable)
        op.close()
        comm.close()
        return died.peers, late_s, text
    return "the call returned"


@pytest.mark.parametrize(
    ("mode", "step", "world_size"),
    [
        ("fused-sdma", "band", 8),
        ("fused-sdma", "reduce", 4),
        ("split-sdma", "scatter", 4),
        ("split-lsa", "drain", 4),
        ("fused-lsa", "pull", 4),
    ],
)
def test_SH_7_a_rank_killed_in_the_middle_of_a_call_is_named_within_two_seconds(mode, step, world_size):
    victim = 2
    outcomes = run_ranks_to_the_end(die_in_the_middle, world_size, mode, step, victim, timeout_s=60)
    assert outcomes[victim].error.exit_code == -9
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, outcome.error
            peers, late_s, text = outcome.value
            assert peers == (victim,)
            assert late_s < allowing_for_load(2.0)  # 30 where nobody noticed
            assert "cannot be used any more since call" in text
            assert "PeerDied" in text


def one_rank_stays_away(limit_s):
    comm = mori_shmem.init("host", timeout_s=limit_s)
    op = GemmAllReduce(comm, n=N, k=K, m_max=200)
    if comm.rank == 2:
        time.sleep(2.5 * limit_s)
        comm.close()
        return None
    try:
        op(*operands(200, comm))
    except PeerTimeout as late:
        op.close()
        return late.peers, str(late)
    finally:
        comm.close()


def test_SH_6_a_rank_that_does_not_come_is_named_with_what_it_owes():
    by_rank = mori_shmem.run_ranks(one_rank_stays_away, 3, allowing_for_load(1.0), timeout_s=60)
    for peers, text in by_rank[:2]:
        assert peers == (2,)
        assert "rank 2's partial sums" in text
        assert "MORI_TIMEOUT_S" in text


def different_m():
    texts = []
    for mode in MODES[1:]:
        with mori_shmem.init("host", timeout_s=20) as comm:
            op = GemmAllReduce(comm, n=N, k=K, m_max=200, mode=mode)
            try:
                op(*operands(129 + comm.rank, comm))
            except CollectiveMismatch as mismatch:
                texts.append(str(mismatch))
            comm.barrier()
    return texts


def test_ranks_called_with_different_m_find_out():
    for rank, texts in enumerate(mori_shmem.run_ranks(different_m, 2, timeout_s=60)):
        assert len(texts) == len(MODES[1:])
        for text in texts:
            assert f"rank {rank} called with M={129 + rank}, rank {1 - rank} with M={130 - rank}" in text


DIFFERENCES = {
    "n": (128, 256),
    "k": (128, 256),
    "m_max": (64, 65),
    "quant": ("ptpc", "mxfp8"),
    "mode": ("split-lsa", "fused-lsa"),
    "gather_dtype": ("fp8", "bf16"),
    "pull_blocks": (8, 9),
    "self_test": (True, False),
}


def different_arguments():
    texts = {}
    with mori_shmem.init("host", timeout_s=20) as comm:
        for name, values in DIFFERENCES.items():
            given = {"n": N, "k": K, "m_max": 64, "mode": "split-lsa", name: values[comm.rank]}
            try:
                GemmAllReduce(comm, **given)
            except ArgumentError as refusal:
                texts[name] = str(refusal)
        GemmAllReduce(comm, n=N, k=K, m_max=64)(*operands(64, comm))  # nothing was harmed
    return texts


def test_ranks_made_with_different_arguments_are_told_both():
    for texts in mori_shmem.run_ranks(different_arguments, 2, timeout_s=60):
        for name, values in DIFFERENCES.items():
            assert f"{name} is {values[0]!r} on rank 0, {values[1]!r} on rank 1" in texts[name]


INERT = {
    "split-sdma": {},
    "fused-sdma": {},
    "split-lsa": {"gather_transport": "sdma"},
    "fused-lsa": {"gather_transport": "sdma", "gather_dtype": "fp8"},
}


def with_inert_engines():
    found = {}
    with mori_shmem.init("host", timeout_s=5) as comm, faults(comm, drop_every=1 if comm.rank == 1 else 0):
        for mode, options in INERT.items():
            try:
                GemmAllReduce(comm, n=N, k=K, m_max=64, mode=mode, **options)
            except TransportInert as inert:
                found[mode] = str(inert)
        with GemmAllReduce(comm, n=N, k=K, m_max=64, mode="fused-lsa"):
            found["no engine in its way"] = "made"
    return found


def test_GA_6_engines_that_do_nothing_are_found_out_when_the_op_is_made():
    for found in mori_shmem.run_ranks(with_inert_engines, 3, timeout_s=60):
        for mode in INERT:
            assert f"self_test of mode='{mode}' on the host backend failed" in found[mode]
            assert "elements are not 6" in found[mode]
        assert found["no engine in its way"] == "made"


def self_test_left_out():
    with (
        mori_shmem.init("host", timeout_s=5) as comm,
        faults(comm, drop_every=1),
        GemmAllReduce(comm, n=N, k=K, m_max=64, self_test=False) as op,
    ):
        try:
            op.self_test()
        except TransportInert as inert:
            return str(inert)


def test_GA_6_the_self_test_can_be_left_out_and_called_later():
    assert all("self_test" in text for text in mori_shmem.run_ranks(self_test_left_out, 2, timeout_s=60))


def more_queues_than_there_are():
    with mori_shmem.init("host", timeout_s=5, max_queues=2) as comm:
        try:
            GemmAllReduce(comm, n=N, k=K, m_max=64, sdma_queues=4)
        except (QueueLimitError, ArgumentError) as refusal:
            with GemmAllReduce(comm, n=N, k=K, m_max=64, sdma_queues=2) as op:
                op(*operands(64, comm))
            return str(refusal)


def test_SH_4_more_queues_than_there_are_is_refused_and_leaves_nothing_behind():
    for text in mori_shmem.run_ranks(more_queues_than_there_are, 2, timeout_s=60):
        assert "sdma_queues=4: this communicator has 2 to each peer" in text


def rings_that_are_too_small():
    import os

    os.environ["MORI_SHMEM_RING_BYTES"] = "4096"
    with mori_shmem.init("host", timeout_s=5) as comm:
        try:
            GemmAllReduce(comm, n=N, k=K, m_max=8192, chunks=64)
        except ArgumentError as refusal:
            with GemmAllReduce(comm, n=N, k=K, m_max=64) as op:
                op(*operands(64, comm))
            return str(refusal)


def test_programs_that_no_ring_could_hold_are_refused_when_the_op_is_made():
    for text in mori_shmem.run_ranks(rings_that_are_too_small, 2, timeout_s=60):
        assert "64 chunks or bands per peer need" in text
        assert "it has 4096: raise MORI_SHMEM_RING_BYTES" in text


def after_close():
    with mori_shmem.init("host", timeout_s=5) as comm:
        op = GemmAllReduce(comm, n=N, k=K, m_max=64)
        out = op(*operands(64, comm))
        before = out.clone()
        op.close()
        op.close()
        try:
            op(*operands(64, comm))
        except ClosedError as closed:
            return str(closed), torch.equal(out, before)


def test_SH_3_a_closed_op_says_so_and_views_stay_readable():
    for text, same in mori_shmem.run_ranks(after_close, 2, timeout_s=60):
        assert "closed" in text
        assert same


def after_the_communicator_was_closed():
    texts = []
    with mori_shmem.init("host", timeout_s=5) as comm:
        args = operands(64, comm)
        op = GemmAllReduce(comm, n=N, k=K, m_max=64)
    for call in (lambda: op(*args), op.self_test):
        try:
            call()
        except ClosedError as closed:
            texts.append(str(closed))
    op.close()
    return texts


def test_SH_3_an_op_whose_communicator_is_closed_says_that():
    for rank, texts in enumerate(mori_shmem.run_ranks(after_the_communicator_was_closed, 2, timeout_s=60)):
        assert texts == [f"rank {rank}: the communicator is closed"] * 2


def many_ops():
    from mori_shmem.testing import open_fds

    with mori_shmem.init("host", timeout_s=20) as comm:
        counts = []
        for turn in range(60):
            gather = ("sdma", "lsa")[
                turn % 2
            ]  # closed at once: the queues must be past the last flag by then
            with GemmAllReduce(comm, n=N, k=K, m_max=64, gather_transport=gather) as op:
                op(*operands(64, comm))
            counts.append(len(open_fds()))
        return counts[5], counts[-1]


def test_SH_3_making_and_closing_ops_leaves_nothing_open():
    for early, late in mori_shmem.run_ranks(many_ops, 3, timeout_s=100):
        assert late <= early + 2


def two_threads():
    import threading

    with mori_shmem.init("host", timeout_s=20) as comm, GemmAllReduce(comm, n=N, k=K, m_max=64) as op:
        inside, go, told = threading.Event(), threading.Event(), []

        def hold(step):
            inside.set()
            go.wait(10)

        op._runner.on_step = hold
        first = threading.Thread(target=lambda: op(*operands(64, comm)))
        first.start()
        inside.wait(10)
        try:
            op(*operands(64, comm))
        except MoriError as busy:
            told.append(str(busy))
        go.set()
        first.join()
        op._runner.on_step = lambda step: None
        op(*operands(64, comm))
        return told


def test_GA_8_a_call_from_a_second_thread_is_refused_and_harms_nothing():
    for told in mori_shmem.run_ranks(two_threads, 2, timeout_s=60):
        assert len(told) == 1
        assert "another thread" in told[0]
