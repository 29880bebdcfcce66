"""Copy queues of the host: programs with time stamps, pairs, limits, and what a stuck or broken ring says.

What a queue promises on every target stands in test_queue_contract.py.
"""

import time
from typing import Any

import mori_shmem
import pytest
from mori_shmem.errors import ArgumentError, PeerTimeout, QueueFault, QueueLimitError
from mori_shmem.testing import queue_limit


@pytest.fixture(scope="module")
def comm():  # type: ignore[no-untyped-def]
    with mori_shmem.init(rank=0, world_size=1, name="test_queues") as comm:
        yield comm


def test_a_program_is_submitted_again_and_again(comm: mori_shmem.Communicator) -> None:
    import torch

    window = comm.alloc(1 << 16)
    x, y = window.tensor(64, torch.int64), window.tensor(64, torch.int64, 4096)
    go, count, stamp = window.at(8192), window.at(8200), window.at(8208)
    program = mori_shmem.PutProgram()
    program.wait(go, 1)
    program.put(window.at(4096), window.at(0), 512)
    program.put_2d(window.at(16384), window.at(0), 8, 4, 64, 128)
    program.timestamp(stamp)
    program.signal(count, 1, op="add")
    assert len(program) == 5
    queue = comm.queue(0, 1)
    queue.submit(program)
    x.fill_(5)
    time.sleep(0.02)
    assert comm.read(count) == 0  # held back
    before = time.monotonic_ns()
    comm.signal(go, 1)
    comm.wait(count, 1)
    assert y.tolist() == [5] * 64
    assert before <= comm.read(stamp) <= time.monotonic_ns()
    for round_ in range(2, 50):
        x.fill_(round_)
        queue.submit(program)
        comm.wait(count, round_)
        assert y.tolist() == [round_] * 64
    program.signal(window.at(8216), 9)  # a step more: encoded anew
    queue.submit(program)
    comm.wait(window.at(8216), 9)


def test_a_queue_serves_its_pair_only() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            window = comm.alloc(4096)
            if comm.rank == 0:
                queue = comm.queue(1)
                with pytest.raises(ArgumentError, match=r"touches rank 2's part.*use comm.queue\(2\)"):
                    queue.put(window.at(0, 2), window.at(0), 8)
                with pytest.raises(ArgumentError, match=r"use comm.queue\(2\)"):
                    queue.signal(window.at(0, 2), 1)
                program = mori_shmem.PutProgram()
                program.signal(window.at(0, 2), 1)
                with pytest.raises(ArgumentError, match=r"submit it to comm.queue\(2\)"):
                    queue.submit(program)
                queue.put(window.at(0), window.at(64, 1), 8)  # fetching from the peer is its pair, too
                queue.quiet()
            comm.barrier()

    mori_shmem.run_ranks(rank, 3)


def test_a_late_quiet_says_where_the_queue_stands(comm: mori_shmem.Communicator) -> None:
    window = comm.alloc(4096)
    queue = comm.queue(0, 2)
    queue.wait(window.at(0), 1)
    with pytest.raises(
        PeerTimeout, match=r"quiet on queue 2 to rank 0.*stands at a wait .*offset 0 to be >= 1; it is 0"
    ):
        queue.quiet(timeout_s=0.1)
    comm.signal(window.at(0), 1)
    queue.quiet()


def test_a_malformed_packet_stops_the_queue_with_its_dwords() -> None:
    with mori_shmem.init(rank=0, world_size=1, name="malformed") as comm:
        window = comm.alloc(4096)
        queue = comm.queue(0)
        queue.core.submit_raw((0xDEADBEEF).to_bytes(4, "little") * 8)
        with pytest.raises(QueueFault, match=r"(?i)deadbeef"):
            queue.quiet()
        with pytest.raises(QueueFault):
            queue.put(window.at(0), window.at(64), 8)
        comm.queue(0, 1).put(window.at(0), window.at(64), 8)  # another queue goes on
        comm.queue(0, 1).quiet()


# ---- SH-4 ----


def test_SH_4_asking_for_more_queues_than_the_limit_is_one_clear_error() -> None:
    with queue_limit(2):
        with pytest.raises(QueueLimitError) as refused:
            mori_shmem.init(rank=0, world_size=1, name="limit", max_queues=4)
        for part in ("requested=4", "limit=2", "another process that still holds queues", "None was opened"):
            assert part in str(refused.value)
        with mori_shmem.init(rank=0, world_size=1, name="limit", max_queues=2) as comm:
            assert comm.queues == []
            comm.queue(0, 0)
            comm.queue(0, 1)
    with pytest.raises(QueueLimitError, match=r"requested=64 .*limit=8"):
        mori_shmem.init(rank=0, world_size=1, name="limit", max_queues=64)
    with pytest.raises(ArgumentError, match=r"max_queues=0"):
        mori_shmem.init(rank=0, world_size=1, name="limit", max_queues=0)


@pytest.mark.parametrize("index", [8, -1, 1 << 40, "0", None, 1.0])
def test_SH_4_a_queue_that_does_not_exist_is_refused_with_the_valid_range(
    comm: mori_shmem.Communicator, index: Any
) -> None:
    with pytest.raises(ArgumentError, match=r"has 8 queues to each peer, valid are 0\.\.7"):
        comm.queue(0, index)
    with pytest.raises(ArgumentError, match=r"ranks of this communicator are 0\.\.0"):
        comm.queue(1)


def test_a_queue_is_opened_once(comm: mori_shmem.Communicator) -> None:
    assert comm.queue(0, 3) is comm.queue(0, 3)
