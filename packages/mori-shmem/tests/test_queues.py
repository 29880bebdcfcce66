"""Copy queues: what they move, in which order, how many there are, and what they refuse."""

import threading
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


def test_puts_of_all_small_sizes_and_offsets_are_exact(comm: mori_shmem.Communicator) -> None:
    import torch

    window = comm.alloc(4096)
    source = window.tensor(1024, torch.uint8)
    source.copy_(torch.arange(1024) % 251 + 1)
    landing = window.tensor(1024, torch.uint8, 2048)
    queue = comm.queue(0)
    for nbytes in (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 500):
        for to in (0, 1, 3, 8):
            for frm in (0, 1, 2, 5):
                landing.zero_()
                queue.put(window.at(2048 + to), window.at(frm), nbytes)
                queue.quiet()
                expected = torch.zeros(1024, dtype=torch.uint8)
                expected[to : to + nbytes] = source[frm : frm + nbytes]
                assert torch.equal(landing, expected), (nbytes, to, frm)


def test_rows_go_from_pitch_to_pitch(comm: mori_shmem.Communicator) -> None:
    import torch

    window = comm.alloc(1 << 16)
    source = window.tensor((16, 100), torch.uint8)
    source.copy_(torch.randint(1, 255, (16, 100)))
    landing = window.tensor((16, 64), torch.uint8, 1 << 15)
    comm.queue(0).put_2d(window.at(1 << 15), window.at(10), 40, 16, 64, 100)
    comm.queue(0).put_2d(window.at((1 << 15) + 48), window.at(0), 0, 16, 64, 100)  # nothing
    comm.queue(0).quiet()
    assert torch.equal(landing[:, :40], source[:, 10:50])
    assert not landing[:, 40:].any()
    # Interleaved rows of one region do not overlap.
    comm.queue(0).put_2d(window.at(50), window.at(0), 50, 16, 100, 100)
    comm.queue(0).quiet()
    assert torch.equal(source[:, 50:], source[:, :50])


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


def test_signals_of_64_bits(comm: mori_shmem.Communicator) -> None:
    window = comm.alloc(4096)
    word, queue = window.at(0), comm.queue(0)
    big = (1 << 64) - 3
    queue.signal(word, big)
    comm.wait(word, big, "==")
    queue.signal(word, 5, op="add")  # wraps at 64 bits, as hardware does
    queue.quiet()
    assert comm.read(word) == 2
    comm.signal(word, 10)
    comm.signal(word, 32, op="add")
    assert comm.read(word) == 42
    for cmp, value in ((">=", 42), ("==", 42), ("<=", 42), ("<", 43), (">", 41), ("!=", 0)):
        assert comm.wait(word, value, cmp, timeout_s=1) == 42
    with pytest.raises(PeerTimeout) as late:
        comm.wait(word, 43, what="the next step", timeout_s=0.1)
    assert (late.value.seen, late.value.wanted, late.value.rank) == (42, 43, 0)
    for part in ("rank 0 of 1", "the next step", "offset 0", ">= 43; it is 42", "0.1 s", "MORI_TIMEOUT_S"):
        assert part in str(late.value)


def test_quiet_has_a_limit(comm: mori_shmem.Communicator) -> None:
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


# ---- SH-5 ----


def test_SH_5_ten_thousand_puts_through_the_smallest_ring() -> None:
    def rank() -> None:
        import os

        import torch
        from mori_shmem._core import MIN_RING_BYTES

        os.environ["MORI_SHMEM_RING_BYTES"] = str(MIN_RING_BYTES)
        sizes = (4, 20, 256, 4096, 65536)
        slots = 64  # puts in flight before the receiver has to have looked
        with mori_shmem.init(timeout_s=60) as comm:
            assert comm.queue(1 - comm.rank).core.ring_bytes == MIN_RING_BYTES
            window = comm.alloc(2 * slots * 65536 + 4096)
            count = 2 * slots * 65536  # offset of the signal counter
            checked = count + 8
            if comm.rank == 0:
                queue = comm.queue(1)
                out = window.tensor((slots, 65536), torch.uint8)
                for i in range(10_000):
                    if i % slots == 0 and i:
                        comm.wait(window.at(checked), i, peer=1)
                    nbytes = sizes[i % 5]
                    out[i % slots, :nbytes].fill_(i % 251 + 1)
                    queue.put(window.at((slots + i % slots) * 65536, 1), window.at(i % slots * 65536), nbytes)
                    if i % 3 == 0:
                        queue.signal(window.at(count, 1), 1, op="add")
                queue.quiet()
                comm.all_gather("all sent")
            else:
                landing = window.tensor((slots, 65536), torch.uint8, slots * 65536)
                for first in range(0, 10_000, slots):
                    last = min(first + slots, 10_000) - 1
                    # Puts 0, 3, 6, ... are signalled: the last of them says that all before it are there.
                    comm.wait(window.at(count), last // 3 + 1, peer=0)
                    for i in range(first, last // 3 * 3 + 1):
                        assert (landing[i % slots, : sizes[i % 5]] == i % 251 + 1).all(), i
                    for i in range(last // 3 * 3 + 1, last + 1):  # not signalled: they come by themselves
                        limit = time.monotonic() + 10
                        while not (landing[i % slots, : sizes[i % 5]] == i % 251 + 1).all():
                            assert time.monotonic() < limit, i
                    comm.signal(window.at(checked, 0), last + 1)
                comm.all_gather("all seen")
                assert comm.read(window.at(count)) == 3334

    began = time.monotonic()
    mori_shmem.run_ranks(rank, 2, timeout_s=60)
    assert time.monotonic() - began < 60


def test_SH_5_eight_issuers_share_one_queue() -> None:
    def rank() -> None:
        import torch

        with mori_shmem.init(timeout_s=60) as comm:
            window = comm.alloc(1 << 20)
            peer = 1 - comm.rank
            queue = comm.queue(peer)
            count = window.at(1 << 19, peer)

            def issue(who: int) -> None:
                window.tensor(64, torch.uint8, who * 64).fill_(who + 1)
                for i in range(1000):
                    program = mori_shmem.PutProgram()
                    program.put(window.at(4096 + who * 64, peer), window.at(who * 64), 64)
                    program.signal(count, 1, op="add")
                    if i % 2:
                        queue.submit(program)
                    else:
                        queue.put(window.at(4096 + who * 64, peer), window.at(who * 64), 64)
                        queue.signal(count, 1, op="add")

            threads = [threading.Thread(target=issue, args=(who,)) for who in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            comm.wait(window.at(1 << 19), 8000, peer=peer)
            comm.barrier()
            assert comm.read(window.at(1 << 19)) == 8000
            for who in range(8):
                assert (window.tensor(64, torch.uint8, 4096 + who * 64) == who + 1).all()

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


def test_SH_5_after_quiet_the_peer_sees_every_byte_whoever_tells_it() -> None:
    """200 puts of 64 MiB; the peer is told over a socket and compares all bytes, each other than the time
    before."""

    def rank() -> None:
        import torch

        nbytes = 64 << 20
        numbers = torch.arange(nbytes // 8)
        contents = (numbers, ~numbers)
        with mori_shmem.init(timeout_s=60) as comm:
            window = comm.alloc(2 * nbytes)
            if comm.rank == 0:
                for i in (0, 1):
                    window.tensor(nbytes // 8, torch.int64, i * nbytes).copy_(contents[i])
            landing = window.tensor(nbytes // 8, torch.int64)
            for i in range(200):
                if comm.rank == 0:
                    comm.queue(1).put(window.at(0, 1), window.at(i % 2 * nbytes), nbytes)
                    comm.queue(1).quiet()
                comm.all_gather("it is done")
                if comm.rank == 1:
                    assert torch.equal(landing, contents[i % 2]), i
                comm.barrier()

    mori_shmem.run_ranks(rank, 2, timeout_s=120)
