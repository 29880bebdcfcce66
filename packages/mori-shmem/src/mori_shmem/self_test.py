"""`Communicator.self_test`: does the transport move bytes, deliver signals and keep their order, between
every pair?

A transport that does nothing looks fine and fast, so nothing is taken on trust. In a scratch window each
rank has, for each peer, a landing row (words and data that this peer writes) and an outgoing row (a gate,
and data for this peer). One round, for each queue index in use, on every rank r and for every peer p, r
itself included:

  send     the queue r -> p is told: wait for the gate, copy r's outgoing row into p's landing row, set
           `arrived`, add 1 to `counted`. While the gate is closed nothing may have arrived; then r opens it.
  receive  wait for p's `arrived`; all bytes must be there at that moment (order), and `counted` right. Then
  answer
           by a direct signal.
  finish   wait for p's answer: its landing row and r's outgoing row are free for the next round.

The data name sender, receiver and round, so old bytes never pass for new ones and nobody's for another's.
What a rank finds wrong it writes down and goes on; at the end the ranks tell each other, and all raise the
same TransportInert.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mori_shmem.deadline import Deadline
from mori_shmem.errors import PeerTimeout, TransportInert
from mori_shmem.program import PutProgram

if TYPE_CHECKING:
    import torch

    from mori_shmem.comm import Communicator
    from mori_shmem.window import Ref, Window

_ROUNDS = 2
_ARRIVED, _COUNTED, _ANSWERED = 0, 8, 16  # words of a landing row
_GATE = 0  # word of an outgoing row
_WORDS_BYTES = 256
_DATA_BYTES = 16 * 1024
_ROW_BYTES = _WORDS_BYTES + _DATA_BYTES
_PATIENCE_S = 5.0  # of a rank for all its peers together; a working transport needs milliseconds
_LATE_S = 0.05  # bytes that are there this much after their signal came late; the rest never came


@dataclass(frozen=True)
class Finding:
    """One thing that did not work on the way from rank `source` to rank `target`."""

    source: int
    target: int
    queue: int
    what: str

    def __str__(self) -> str:
        return f"rank {self.source} -> rank {self.target} (queue {self.queue}): {self.what}"


def self_test(comm: Communicator) -> None:
    """Collective: raise TransportInert on all ranks if anything does not work between any pair."""
    in_use = {0, *(queue.index for queue in comm.queues)}
    indices = sorted(set().union(*comm.all_gather(in_use)))
    window = comm.alloc(2 * comm.world_size * _ROW_BYTES)
    try:
        findings = _Probe(comm, window).run(indices)
        everywhere = [finding for found in comm.all_gather(findings) for finding in found]
    finally:
        window.close()
    if everywhere:
        raise TransportInert(
            f"rank {comm.rank}: self_test of the {comm.backend} transport between {comm.world_size} ranks "
            "failed: " + "; ".join(map(str, everywhere))
        )


class _Probe:
    def __init__(self, comm: Communicator, window: Window) -> None:
        self._comm = comm
        self._window = window
        self._deadline = Deadline(min(_PATIENCE_S, comm.timeout_s))
        self._findings: dict[tuple[int, int, int], Finding] = {}  # the first for each (source, target, queue)

    def run(self, indices: list[int]) -> list[Finding]:
        """All rounds. Every rank runs the same number of them, whatever it finds."""
        rounds = [index for index in indices for _ in range(_ROUNDS)]
        rank, world_size = self._comm.rank, self._comm.world_size
        peers = [(rank + step) % world_size for step in range(1, world_size + 1)]
        for number, index in enumerate(rounds, start=1):
            for peer in peers:
                self._send(peer, index, number)
            for peer in peers:
                self._receive(peer, index, number)
            for peer in peers:
                self._finish(peer, index, number)
        return list(self._findings.values())

    def _send(self, peer: int, index: int, number: int) -> None:
        me = self._comm.rank
        gate, there = self._outgoing(me, peer) + _GATE, self._landing(peer, me)
        self._data(self._outgoing(me, peer)).copy_(_pattern(me, peer, number))
        program = PutProgram()
        program.wait(gate, number)
        program.put(there + _WORDS_BYTES, self._outgoing(me, peer) + _WORDS_BYTES, _DATA_BYTES)
        program.signal(there + _ARRIVED, number)
        program.signal(there + _COUNTED, 1, op="add")
        self._comm.queue(peer, index).submit(program)
        if self._comm.read(there + _ARRIVED) >= number:
            self._found(me, peer, index, "the queue does not wait: its signal came while the gate was closed")
        self._comm.signal(gate, number)

    def _receive(self, peer: int, index: int, number: int) -> None:
        me = self._comm.rank
        here = self._landing(me, peer)
        if self._came(here + _ARRIVED, number, peer, index, "the signal after a put"):
            wrong = self._wrong_bytes(peer, number)
            if wrong:
                time.sleep(_LATE_S)
                never = self._wrong_bytes(peer, number)
                how = "never came" if never else "came after the signal that follows them"
                self._found(peer, me, index, f"{never or wrong} of {_DATA_BYTES} bytes {how}")
            if self._came(here + _COUNTED, number, peer, index, "an added signal"):
                counted = self._comm.read(here + _COUNTED)
                if counted != number:
                    self._found(peer, me, index, f"{number} additions of 1 gave {counted}")
        self._comm.signal(self._landing(peer, me) + _ANSWERED, number)

    def _finish(self, peer: int, index: int, number: int) -> None:
        self._came(self._landing(self._comm.rank, peer) + _ANSWERED, number, peer, index, "a direct signal")

    def _came(self, word: Ref, number: int, peer: int, index: int, what: str) -> bool:
        try:
            patience_s = max(self._deadline.left_s(), 0.01)
            self._comm.wait(word, number, peer=peer, what=f"self_test: {what}", timeout_s=patience_s)
        except PeerTimeout as late:
            self._found(
                peer, self._comm.rank, index, f"{what} did not come (value {late.seen}, not {number})"
            )
            return False
        return True

    def _wrong_bytes(self, peer: int, number: int) -> int:
        me = self._comm.rank
        landed = self._data(self._landing(me, peer))
        return int((landed != _pattern(peer, me, number)).sum())

    def _found(self, source: int, target: int, index: int, what: str) -> None:
        self._findings.setdefault((source, target, index), Finding(source, target, index, what))

    # ---- where things lie in a part: landing rows by sender, then outgoing rows by receiver ----

    def _landing(self, owner: int, sender: int) -> Ref:
        return self._window.at(sender * _ROW_BYTES, owner)

    def _outgoing(self, owner: int, receiver: int) -> Ref:
        return self._window.at((self._comm.world_size + receiver) * _ROW_BYTES, owner)

    def _data(self, row: Ref) -> torch.Tensor:
        import torch

        return self._window.peer(row.rank).tensor(_DATA_BYTES, torch.uint8, row.offset_bytes + _WORDS_BYTES)


def _pattern(sender: int, receiver: int, number: int) -> torch.Tensor:
    """Bytes that no other (sender, receiver, round) has in the same places, none of them zero."""
    import torch

    factor = 2 * ((sender * 1024 + receiver) * 1024 + number) + 1
    steps = torch.arange(1, _DATA_BYTES + 1, dtype=torch.int64)
    return ((steps * factor >> 4) % 255 + 1).to(torch.uint8)
