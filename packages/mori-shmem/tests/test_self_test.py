"""GA-6: a transport that does not work is noticed and named, whatever way it fails."""

from __future__ import annotations  # a class made in a rank finds no names of this module

import contextlib
import time
from typing import Any

import mori_shmem
import pytest
from mori_shmem.errors import TransportInert
from mori_shmem.testing import faults


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_an_honest_transport_passes_again_and_again(world_size: int) -> None:
    def rank() -> float:
        with mori_shmem.init() as comm:
            for peer in range(comm.world_size):
                comm.queue(peer, 3)
            began = time.monotonic()
            for _ in range(3):
                comm.self_test()
            return time.monotonic() - began

    assert max(mori_shmem.run_ranks(rank, world_size)) < 5


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ({"drop_every": 1}, r"16384 of 16384 bytes never came"),
        ({"drop_every": 2}, r"163\d\d of 16384 bytes never came"),
        ({"reorder": True, "delay_us": 20_000}, r"came after the signal that follows them"),
    ],
    ids=["drop all", "drop every second", "reorder"],
)
def test_GA_6_each_fault_is_noticed_on_all_ranks_and_the_pairs_are_named(
    fault: dict[str, Any], found: str
) -> None:
    def rank(fault: dict[str, Any], found: str) -> None:
        with mori_shmem.init() as comm:
            comm.self_test()
            broken = fault if comm.rank == 1 else {}
            with faults(comm, **broken), pytest.raises(TransportInert, match=found) as inert:
                comm.self_test()
            message = str(inert.value)
            assert "self_test of the host transport between 3 ranks failed" in message
            assert "rank 1 -> rank 0 (queue 0)" in message
            assert "rank 1 -> rank 2 (queue 0)" in message
            assert "rank 0 -> rank" not in message
            assert "rank 2 -> rank" not in message
            comm.self_test()  # and healthy again

    mori_shmem.run_ranks(rank, 3, fault, found)


def test_GA_6_one_broken_queue_among_others_is_named() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            queue = comm.queue(0, 2)
            broken = faults(queue, drop_every=1) if comm.rank == 1 else contextlib.nullcontext()
            with broken, pytest.raises(TransportInert) as inert:
                comm.self_test()
            assert str(inert.value).count("->") == 1
            assert "rank 1 -> rank 0 (queue 2)" in str(inert.value)

    mori_shmem.run_ranks(rank, 2)


def test_copies_that_are_late_but_in_order_are_fine() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, faults(comm, delay_us=5000):
            comm.self_test()

    mori_shmem.run_ranks(rank, 2)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ("queue.signal", "the signal after a put did not come"),
        ("queue.add", "an added signal did not come"),
        ("queue.wait", "the queue does not wait"),
        ("comm.signal", "a direct signal did not come"),
    ],
)
def test_GA_6_lost_signals_and_waits_that_do_not_wait_are_noticed(broken: str, found: str) -> None:
    """These the hooks cannot do; here the steps never reach the core."""

    def rank(broken: str, found: str) -> None:
        from mori_shmem import self_test
        from mori_shmem.program import PutProgram

        class Broken(PutProgram):
            def wait(self, *args: Any) -> None:
                if broken != "queue.wait":
                    super().wait(*args)

            def signal(self, where: Any, value: int, op: str = "set") -> None:
                if broken != ("queue.add" if op == "add" else "queue.signal"):
                    super().signal(where, value, op)

        with mori_shmem.init() as comm:
            self_test._PATIENCE_S = 1.0
            if comm.rank == 0:
                self_test.PutProgram = Broken
                if broken == "comm.signal":
                    direct = comm.signal
                    comm.signal = lambda where, value: direct(where, value) if where.rank == 0 else None
            with pytest.raises(TransportInert, match=found) as inert:
                comm.self_test()
            assert "rank 0 -> rank 1" in str(inert.value)

    mori_shmem.run_ranks(rank, 2, broken, found)
