"""Waits for words that other ranks write, from threads that must also hear of each other's failures.

A wait sleeps in slices and looks between them whether another workgroup has failed, and whether any rank has
died: a launch needs all of them, so the one to name is the one that died, not one that left because of it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import mori_shmem
from mori_shmem.errors import PeerDied, PeerTimeout

from mori_megamoe.targets.host.sdma.crew import Board

SLICE_S = 0.1


class Word(NamedTuple):
    """One writer's word here, and what it should be."""

    where: mori_shmem.Ref
    value: int  # at least
    peer: int  # who writes it
    what: str


def wait_word(comm: mori_shmem.Communicator, board: Board, word: Word) -> None:
    """Until the word is there (acquire); PeerTimeout at the communicator's deadline, PeerDied."""
    end_s = time.monotonic() + limit_s(comm, word)
    while True:
        board.check()
        left_s = end_s - time.monotonic()
        if slept(comm, word, min(SLICE_S, max(left_s, 1e-3))):
            return
        if left_s <= 0:
            raise late(comm, word)


def limit_s(comm: mori_shmem.Communicator, word: Word) -> float:
    """The communicator's deadline. Twice that for a word that this rank itself will write: if it does not,
    that is because another of its workgroups waits for a rank, and that one is to name it."""
    return comm.timeout_s * (2 if word.peer == comm.rank else 1)


def slept(comm: mori_shmem.Communicator, word: Word, slice_s: float) -> bool:
    """One slice of sleep; whether the word is there."""
    try:
        comm.wait(word.where, word.value, peer=word.peer, what=word.what, timeout_s=slice_s)
        return True
    except PeerTimeout:
        check_alive(comm, word.what)
        return False
    except PeerDied:
        check_alive(comm, word.what)
        raise


def check_alive(comm: mori_shmem.Communicator, what: str) -> None:
    """Raise PeerDied naming every rank that has died."""
    dead = [rank for rank, state in enumerate(comm.core.peer_states()) if state == "dead"]
    if dead:
        raise PeerDied(
            f"rank {comm.rank} of {comm.world_size}, in wait for {what}: rank "
            f"{', '.join(map(str, dead))} died",
            rank=comm.rank,
            peers=dead,
        )


def late(comm: mori_shmem.Communicator, word: Word) -> PeerTimeout:
    """The error at the deadline."""
    seen = comm.read(word.where)
    return PeerTimeout(
        f"rank {comm.rank} of {comm.world_size}, in wait for {word.what}: waited "
        f"{limit_s(comm, word):.3g} s (the limit is timeout_s=, or MORI_TIMEOUT_S in the environment) for "
        f"the word to be >= {word.value}; it is {seen}. It is expected from rank {word.peer}",
        rank=comm.rank,
        peers=(word.peer,),
        seen=seen,
        wanted=word.value,
    )
