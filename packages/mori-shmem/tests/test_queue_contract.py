"""What a copy queue promises on every target: one body each, for the host, for ranks that share a GPU, and
for one GPU a rank. What only one target has stands in test_queues.py and test_cuda.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import mori_shmem
import pytest
from mori_shmem.errors import PeerTimeout

HOST = pytest.param("host", id="host")
SHARING = pytest.param("sharing", marks=pytest.mark.gpu(1), id="sharing a GPU")
SPREAD = pytest.param("spread", marks=pytest.mark.gpu(2), id="a GPU each")


def on(*placements: Any) -> Any:
    return pytest.mark.parametrize("placement", placements)


def run(
    placement: str, world_size: int, fn: Callable[..., Any], *args: object, timeout_s: float = 90
) -> None:
    mori_shmem.run_ranks(_placed, world_size, placement, fn, *args, timeout_s=timeout_s)


def _placed(placement: str, fn: Callable[..., Any], *args: object) -> None:
    os.environ["MORI_SHMEM_BACKEND"] = "host" if placement == "host" else "cuda"
    if placement == "sharing":
        import torch

        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(0)
    fn(*args)


# ---- bytes, rows, words ----


@on(HOST, SHARING)
def test_puts_of_all_small_sizes_and_offsets_are_exact(placement: str) -> None:
    run(placement, 1, small_puts)


def small_puts() -> None:
    import torch

    with mori_shmem.init() as comm:
        window, queue = comm.alloc(1 << 16), comm.queue(0)
        source, landing = (window.tensor(1 << 15, torch.uint8, at) for at in (0, 1 << 15))
        source.copy_(torch.arange(1 << 15) % 251 + 1)
        sizes = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 500, 4097, 20000)
        for nbytes in sizes:
            for to, frm in ((0, 0), (1, 0), (3, 5), (8, 1), (0, 2), (1, 5)):
                landing.zero_()
                queue.put(window.at((1 << 15) + to), window.at(frm), nbytes)
                queue.quiet()
                expected = torch.zeros_like(landing)
                expected[to : to + nbytes] = source[frm : frm + nbytes]
                assert torch.equal(landing, expected), (nbytes, to, frm)


@on(HOST, SHARING)
def test_rows_go_from_pitch_to_pitch(placement: str) -> None:
    run(placement, 1, rows)


def rows() -> None:
    import torch

    with mori_shmem.init() as comm:
        window, queue = comm.alloc(1 << 16), comm.queue(0)
        source = window.tensor((16, 100), torch.uint8)
        source.copy_(torch.randint(1, 255, (16, 100)))
        landing = window.tensor((16, 64), torch.uint8, 1 << 15)
        queue.put_2d(window.at(1 << 15), window.at(10), 40, 16, 64, 100)
        queue.put_2d(window.at((1 << 15) + 48), window.at(0), 0, 16, 64, 100)  # nothing
        queue.quiet()
        assert torch.equal(landing[:, :40], source[:, 10:50])
        assert not landing[:, 40:].any()
        queue.put_2d(window.at(50), window.at(0), 50, 16, 100, 100)  # interleaved rows do not overlap
        queue.quiet()
        assert torch.equal(source[:, 50:], source[:, :50])


@on(HOST, SHARING)
def test_signals_of_64_bits(placement: str) -> None:
    run(placement, 1, words)


def words() -> None:
    with mori_shmem.init() as comm:
        window, queue = comm.alloc(4096), comm.queue(0)
        word, big = window.at(0), (1 << 64) - 3
        queue.signal(word, big)
        assert comm.wait(word, big, "==") == big
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
        for part in (
            "rank 0 of 1",
            "the next step",
            "offset 0",
            ">= 43; it is 42",
            "waited 0.",
            "MORI_TIMEOUT_S",
        ):
            assert part in str(late.value), str(late.value)


@on(HOST, SHARING)
def test_quiet_has_a_limit(placement: str) -> None:
    run(placement, 1, late_quiet)


def late_quiet() -> None:
    with mori_shmem.init() as comm:
        window, queue = comm.alloc(4096), comm.queue(0, 2)
        comm.signal(window.at(0), 0)
        queue.wait(window.at(0), 1)
        with pytest.raises(PeerTimeout, match="quiet on queue 2 to rank 0"):
            queue.quiet(timeout_s=0.1)
        comm.signal(window.at(0), 1)
        queue.quiet()


# ---- SH-5 ----


@on(HOST, SHARING, SPREAD)
def test_SH_5_many_puts_in_order_and_signals_that_count(placement: str) -> None:
    began = time.monotonic()
    run(placement, 2, many_puts, 10_000 if placement == "host" else 3000)
    assert time.monotonic() - began < 90


def many_puts(puts: int) -> None:
    """Put i says i at the start of its slot; every third is signalled, which says that all before it are
    there; a slot is free when the receiver says so. The host's rings are as small as they can be."""
    import torch
    from mori_shmem._core import MIN_RING_BYTES

    os.environ["MORI_SHMEM_RING_BYTES"] = str(MIN_RING_BYTES)
    sizes, slots = (8, 24, 256, 4096, 65536), 64
    with mori_shmem.init(timeout_s=60) as comm:
        window = comm.alloc(2 * slots * 65536 + 4096)
        count, checked = 2 * slots * 65536, 2 * slots * 65536 + 8
        if comm.rank == 0:
            queue = comm.queue(1)
            if comm.backend == "host":
                assert queue.core.ring_bytes == MIN_RING_BYTES
            out = window.tensor((slots, 65536), torch.uint8)
            for i in range(puts):
                if i % slots == 0 and i:
                    queue.join()
                    comm.wait(window.at(checked), i, peer=1)
                slot, nbytes = i % slots, sizes[i % 5]
                out[slot, :nbytes].fill_(i % 251 + 1)
                queue.put(window.at((slots + slot) * 65536, 1), window.at(slot * 65536), nbytes)
                if i % 3 == 0:
                    queue.signal(window.at(count, 1), 1, op="add")
            queue.quiet()
            comm.all_gather("all sent")
            return
        landing = window.tensor((slots, 65536), torch.uint8, slots * 65536)
        for first in range(0, puts, slots):
            last = min(first + slots, puts) - 1
            comm.wait(window.at(count), last // 3 + 1, peer=0)
            signalled = last // 3 * 3 + 1
            seen = landing.cpu()
            for i in range(first, signalled):
                assert (seen[i % slots, : sizes[i % 5]] == i % 251 + 1).all(), i
            for i in range(signalled, last + 1):  # not signalled: they come by themselves
                limit = time.monotonic() + 10
                while not (landing[i % slots, : sizes[i % 5]] == i % 251 + 1).all():
                    assert time.monotonic() < limit, i
            comm.signal(window.at(checked, 0), last + 1)
        comm.all_gather("all sent")
        assert comm.read(window.at(count)) == (puts + 2) // 3


@on(HOST, SHARING)
def test_SH_5_eight_issuers_share_one_queue(placement: str) -> None:
    run(placement, 2, issuers, 1000 if placement == "host" else 250)


def issuers(each: int) -> None:
    """Half of the puts in a program with their signal, half by themselves; none is lost or torn."""
    import torch

    with mori_shmem.init(timeout_s=60) as comm:
        window, peer = comm.alloc(1 << 20), 1 - comm.rank
        queue, count = comm.queue(peer), window.at(1 << 19, peer)

        def issue(who: int) -> None:
            window.tensor(64, torch.uint8, who * 64).fill_(who + 1)
            for i in range(each):
                there, here = window.at(4096 + who * 64, peer), window.at(who * 64)
                if i % 2:
                    program = mori_shmem.PutProgram()
                    program.put(there, here, 64)
                    program.signal(count, 1, op="add")
                    queue.submit(program)
                else:
                    queue.put(there, here, 64)
                    queue.signal(count, 1, op="add")

        threads = [threading.Thread(target=issue, args=(who,)) for who in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        comm.wait(window.at(1 << 19), 8 * each, peer=peer)
        comm.barrier()
        assert comm.read(window.at(1 << 19)) == 8 * each
        for who in range(8):
            assert (window.tensor(64, torch.uint8, 4096 + who * 64) == who + 1).all()


@on(HOST, SPREAD)
def test_SH_5_after_quiet_the_peer_sees_every_byte_whoever_tells_it(placement: str) -> None:
    run(placement, 2, told_over_a_socket, timeout_s=120)


def told_over_a_socket() -> None:
    """200 puts of 64 MiB; the peer is told over a socket and compares all bytes, each other than the time
    before."""
    import torch

    nbytes = 64 << 20
    with mori_shmem.init(timeout_s=60) as comm:
        numbers = torch.arange(nbytes // 8, device=comm.device)
        contents = (numbers, ~numbers)
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
