"""Which ranks take part in the calls of an op, and how the others go on when one does not any more.

A wait in a kernel that passes its deadline ends this rank's waits; its next call raises and masks whoever was
awaited: from then on nothing is sent to that rank or awaited from it. Two things make that right:

  * A rank that stops because another has died is late itself, for whoever has launched one call more. So
    where ranks have died, those are masked, whoever was named; and a record that a call of before left,
    naming a rank that is masked by now, is dropped.
  * Ranks find out at different calls, so that some have counted a call more than others. Masking moves both
    counts of a rank (of dispatches, of combines) on to a multiple of CALLS_A_MASK, as many multiples as ranks
    are masked: those who mask the same ranks are in step again without a word between them. That all have
    come so far, and what they call next, they have to agree on: only the caller knows.

A packet's slot exists twice, by parity of the count, and the first count behind a mask is odd: whoever masks
by hand does so behind a whole pair of calls, whose combine has ended all reading of the dispatch. Counts are
32 bits: an op can mask 255 times.

Taking ranks in again is for all ranks together, the masked ones too: they meet on the host and go on from the
largest count. A captured graph keeps the ranks that took part when it was captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import mori_shmem
import torch
from mori_shmem.errors import PeerDied, PeerError, UnsupportedShape

from mori_ep.targets.cuda.params import EPOCH, GAVE_UP

# Those that go on differ by the few calls that one may launch ahead: a multiple hardly ever lies between.
CALLS_A_MASK_BITS = 24
_ALL_BITS = 0xFFFFFFFF


class Masks:
    """One op's, on this rank."""

    def __init__(self, comm: mori_shmem.Communicator, states: Sequence[torch.Tensor]) -> None:
        """`states`: the words of dispatch and of combine (protocol.cuh), [STATE_WORDS] int32 each."""
        self._comm, self._states = comm, states
        self.alive = (1 << comm.world_size) - 1

    def masked(self) -> list[bool]:
        """By rank."""
        return [not self.alive >> rank & 1 for rank in range(self._comm.world_size)]

    def leave_out(self, ranks: Sequence[int]) -> None:
        """In stream order, after the calls that were launched before."""
        alive = self.alive
        for rank in ranks:
            alive &= ~(1 << rank)
        move_on(self._states, (self.alive ^ alive).bit_count())
        self.alive = alive

    def take_in(self, rank: int) -> None:
        """The last one that was masked: see `take_all_in`."""
        if not self.masked()[rank]:
            return
        others = [r for r, masked in enumerate(self.masked()) if masked and r != rank]
        if others:
            raise UnsupportedShape(
                f"rank {rank} cannot be taken in with {_ranks(others)} masked: on the cuda target all ranks "
                "come back together (clean_mask, called by all of them)"
            )
        self.take_all_in()

    def take_all_in(self) -> None:
        """Collective of all ranks. Waits for the device. A rank that has died is named, and stays masked."""
        counts = [int(words[EPOCH]) & _ALL_BITS for words in self._states]
        everybodys = self._comm.all_gather(counts)
        for words, reached in zip(self._states, zip(*everybodys, strict=True), strict=True):
            most = max(reached)
            words[EPOCH] = most - (1 << 32) if most >> 31 else most
            words[GAVE_UP] = 0
        self.alive = (1 << self._comm.world_size) - 1

    def missing(self, error: PeerError) -> list[int]:
        """Whom an error is about that a kernel has left: to be masked now. Nobody, if they are already."""
        me, masked = self._comm.rank, self.masked()
        states = self._comm.core.peer_states()
        dead = [r for r, state in enumerate(states) if state == "dead" and r != me and not masked[r]]
        return dead or [peer for peer in error.peers if peer != me and not masked[peer]]

    def is_settled(self, error: PeerError) -> bool:
        """Whether it names only ranks that are masked: a call of before has been waiting for them."""
        masked = self.masked()
        return bool(error.peers) and all(masked[peer] for peer in error.peers)


def move_on(states: Sequence[torch.Tensor], num_masked: int) -> None:
    """Waits are taken up again; counts of calls go on from as many multiples as ranks have been masked."""
    for words in states:
        words[GAVE_UP] = 0
        if num_masked:
            words[EPOCH] = ((words[EPOCH] >> CALLS_A_MASK_BITS) + num_masked) << CALLS_A_MASK_BITS


def named(error: PeerError, missing: Sequence[int]) -> PeerError:
    """The error with those in it that are masked now: they may have died while another was waited for."""
    if set(missing) <= set(error.peers):
        return error
    return PeerDied(f"{_ranks(missing)} died: {error}", rank=error.rank, peers=missing)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
