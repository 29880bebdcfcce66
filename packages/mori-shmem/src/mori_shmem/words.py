"""Several signals of one purpose, one per peer: set together, awaited together.

    ready = comm.words([window.at(offset, p) for p in peers], peers)    # checked once, here
    ready.signal(7)                       # each word = 7, each owner woken
    arrived.wait(7, what="the rows of call 7")   # until all are >= 7; one deadline for all

An op that signals in every call makes these when it is made, and saves the checks of each single word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mori_shmem.core import CoreError
from mori_shmem.errors import ArgumentError
from mori_shmem.window import Ref, check_word
from mori_shmem.wording import worded

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator


class Words:
    """Made by `Communicator.words`."""

    def __init__(self, comm: Communicator, refs: Sequence[Ref], peers: Sequence[int]) -> None:
        if len(refs) != len(peers):
            raise ArgumentError(f"{len(refs)} words for {len(peers)} peers: one each is needed")
        for ref, peer in zip(refs, peers, strict=True):
            check_word(comm, ref, "signal")
            if type(peer) is not int or not 0 <= peer < comm.world_size:
                raise ArgumentError(f"peer {peer!r}: ranks of this communicator are 0..{comm.world_size - 1}")
        self._comm = comm
        self._addresses = [ref.address for ref in refs]
        self.peers = list(peers)  # who writes each word, where they are waited for

    def signal(self, value: int) -> None:
        """Set every word now (release), and wake its owner."""
        try:
            self._comm.core.signal_all(self._addresses, value)
        except CoreError as error:
            raise worded(error, self._comm, "signal") from None

    def wait(self, value: int, *, what: str = "", timeout_s: float | None = None) -> list[int]:
        """Sleep until every word is >= value (acquire); returns what was seen. A peer that dies or leaves
        raises PeerDied, the deadline PeerTimeout, both with the rank concerned."""
        limit = self._comm.checked_timeout(timeout_s)
        try:
            seen: list[int] = self._comm.core.wait_all(
                self._addresses, value, self.peers, self._comm.timeout_s if limit is None else limit
            )
            return seen
        except CoreError as error:
            raise worded(error, self._comm, f"wait for {what}" if what else "wait") from None

    def read(self) -> list[int]:
        """The words' values (acquire)."""
        try:
            return [int(self._comm.core.read(address)) for address in self._addresses]
        except CoreError as error:
            raise worded(error, self._comm, "read") from None
