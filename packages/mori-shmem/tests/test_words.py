"""Signals of one purpose, set and awaited together."""

from __future__ import annotations

import mori_shmem
import pytest
from mori_shmem.errors import ArgumentError, LayoutError, PeerDied, PeerTimeout
from mori_shmem.testing import die, run_ranks_to_the_end


def test_all_are_set_and_all_are_awaited() -> None:
    def rank() -> list[int]:
        with mori_shmem.init() as comm:
            window = comm.alloc(4096)
            others = [p for p in range(comm.world_size) if p != comm.rank]
            ours = comm.words([window.at(8 * comm.rank, p) for p in others], others)
            theirs = comm.words([window.at(8 * p) for p in others], others)
            for call in range(1, 200):
                ours.signal(call)
                seen = theirs.wait(call, what="a call")
                assert all(call <= value <= call + 1 for value in seen)
            return theirs.peers

    assert mori_shmem.run_ranks(rank, 3) == [[1, 2], [0, 2], [0, 1]]


def test_a_deadline_names_what_who_and_both_values() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            window = comm.alloc(4096)
            if comm.rank == 0:
                words = comm.words([window.at(8), window.at(16)], [1, 2])
                comm.signal(window.at(8), 5)
                with pytest.raises(PeerTimeout, match=r"the rows of call 5.*>= 5; it is 0") as late:
                    words.wait(5, what="the rows of call 5", timeout_s=0.2)
                assert late.value.peers == (2,)
            comm.barrier()

    mori_shmem.run_ranks(rank, 3)


def test_a_dead_peer_is_named() -> None:
    def rank() -> tuple[int, ...]:
        comm = mori_shmem.init()
        window = comm.alloc(4096)
        comm.barrier()
        if comm.rank == 1:
            die()
        with pytest.raises(PeerDied) as dead:
            comm.words([window.at(8)], [1]).wait(1)
        return dead.value.peers

    outcomes = run_ranks_to_the_end(rank, 2)
    assert outcomes[0].value == (1,)


def test_words_are_checked_when_they_are_made() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            window = comm.alloc(4096)
            with pytest.raises(LayoutError, match="multiple of 8"):
                comm.words([window.at(4)], [0])
            with pytest.raises(ArgumentError, match="peer 1"):
                comm.words([window.at(8)], [1])
            with pytest.raises(ArgumentError, match="2 words for 1"):
                comm.words([window.at(8), window.at(16)], [0])

    mori_shmem.run_ranks(rank, 1)
