"""The flags of one op on this rank: set at all peers at once, awaited from all that are not masked.

A flag's value is the number of a call in its high half and something about that call in its low half
(layout.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import mori_shmem
from mori_shmem.errors import PeerError
from mori_shmem.words import Words

from mori_ep.layout import CALL_SHIFT, Layout

_LOG = logging.getLogger("mori_ep")
LOW_HALF = (1 << CALL_SHIFT) - 1


class Flags:
    """What one rank sets and waits for. With `elastic`, a rank that does not come in time, or has ended, is
    masked where it was waited for; without, that raises."""

    def __init__(
        self, comm: mori_shmem.Communicator, window: mori_shmem.Window, layout: Layout, *, elastic: bool
    ) -> None:
        self._comm, self._window, self._layout = comm, window, layout
        self._elastic = elastic
        self._peers = [p for p in range(comm.world_size) if p != comm.rank]
        self._set = {name: self._at_peers(name) for name in ("entered", "arrived", "staged", "finished")}
        self.masked = [False] * comm.world_size
        self._rebuild()

    def _at_peers(self, name: str) -> Words:
        offset = self._offset(name, self._comm.rank, 0)
        return self._comm.words([self._window.at(offset, p) for p in self._peers], self._peers)

    def _offset(self, name: str, source: int, queue: int) -> int:
        region = self._layout.regions()[name]
        if name in ("entered", "returned"):
            return self._layout.queue_flag(region, source, queue)
        return self._layout.flag(region, source)

    def _rebuild(self) -> None:
        """What is waited for, after the masks have changed."""
        self._awaited = {
            name: self._from(name, self._layout.num_queues if name in ("entered", "returned") else 1)
            for name in ("entered", "arrived", "staged", "finished", "returned")
        }

    def _from(self, name: str, queues: int) -> Words:
        ends = [(p, q) for p in self._peers if not self.masked[p] for q in range(queues)]
        refs = [self._window.at(self._offset(name, p, q)) for p, q in ends]
        return self._comm.words(refs, [p for p, _ in ends])

    def mask(self, ranks: Iterable[int], value: bool = True) -> None:
        """Leave ranks out of all waits, or take them in again."""
        for rank in ranks:
            self.masked[rank] = value
        self._rebuild()

    def set(self, name: str, call: int, low: int = 0) -> None:
        """At every peer, the masked ones too: one that was only late must not wait for us in its turn."""
        self._set[name].signal(call << CALL_SHIFT | low)

    def set_at(self, name: str, rank: int, call: int, low: int) -> None:
        """At one rank, which may be this one."""
        where = self._window.at(self._offset(name, self._comm.rank, 0), rank)
        self._comm.signal(where, call << CALL_SHIFT | low)

    def wait(self, name: str, call: int, of: str) -> None:
        """Until the flag of every rank that is not masked has come to this call."""
        while True:
            try:
                self._awaited[name].wait(call << CALL_SHIFT, what=f"`{name}` of {of} {call}")
                return
            except PeerError as error:
                if not self._elastic or not error.peers:
                    raise
                _LOG.warning(
                    "rank %d leaves out rank %s from now on: %s",
                    self._comm.rank,
                    ", ".join(map(str, error.peers)),
                    error,
                )
                self.mask(error.peers)

    def read(self, name: str) -> list[tuple[int, int, int]]:
        """(peer, call, low half) of the flag of every peer that is not masked."""
        words = self._awaited[name]
        return [
            (peer, seen >> CALL_SHIFT, seen & LOW_HALF)
            for peer, seen in zip(words.peers, words.read(), strict=True)
        ]

    def read_of(self, name: str, rank: int) -> tuple[int, int]:
        """(call, low half) of one rank's flag, this one's own too."""
        seen = self._comm.read(self._window.at(self._offset(name, rank, 0)))
        return seen >> CALL_SHIFT, seen & LOW_HALF
