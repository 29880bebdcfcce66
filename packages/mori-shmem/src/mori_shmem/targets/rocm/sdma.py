"""Asking for SDMA queues: the ways, the engines, and the proof that each queue works.

MORI_SHMEM_SDMA names the way, or "auto": rocr, then hsakmt (csrc/rocm/sdma.h); a way whose library is not
there is passed over. For each queue the ways are gone through, and for each way the engines of engines.py.
A queue that the driver hands out is probed at once: a copy to the peer's part and back. An engine that
takes packets and never runs (they exist, fused off but listed) is passed over with a warning.

When no queue comes of it, the error lists every attempt and what was answered:
  QueueLimitError   the driver refused each; most often another process holds the queues
  TransportInert    a queue was there, and did not move its probe
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mori_shmem.core import CoreError, native
from mori_shmem.errors import MoriError, QueueLimitError, TransportInert
from mori_shmem.targets.rocm import engines

_LOG = logging.getLogger("mori_shmem")
WAYS: tuple[native.Way, ...] = ("rocr", "hsakmt")
_PROBE_S = 5.0  # a working engine needs microseconds, and milliseconds on a busy software node


@dataclass(frozen=True)
class Attempt:
    """One queue that was asked for, and why there is none."""

    way: str
    engine: int  # -1: it did not come to that
    answer: str
    inert: bool = False

    def __str__(self) -> str:
        return f"{self.way}{f', engine {self.engine}' * (self.engine >= 0)}: {self.answer}"


class Sdma:
    """How this rank gets its queues."""

    def __init__(
        self, device: native.RocmDevice, places: Sequence[tuple[str, int]], rank: int, setting: str
    ) -> None:
        """`places`: PCI address and ordinal of each rank's GPU."""
        self.device, self.places, self.rank = device, places, rank
        self.ways = [way for way in WAYS if setting in ("auto", way)]
        self.way = ""  # of the last queue that was opened
        self._setting = setting
        self._doubted = False

    def open(
        self, peer: int, ring_bytes: int, scratch: int, *, for_kernels: bool, timeout_s: float
    ) -> native.RocmQueue:
        """A queue for copies to a peer, proved by a copy to `scratch` (64 bytes of the peer's) and back."""
        attempts: list[Attempt] = []
        for way in self.ways:
            try:
                recommended = self.device.recommended_engines(way, self.places[peer][0])
            except CoreError as error:
                attempts.append(Attempt(way, -1, answer_of(error)))
                continue
            self._doubt(recommended, peer)
            tried = engines.candidates(
                recommended, self.rank, peer, len(self.places), for_kernels=for_kernels
            )
            for engine in tried:
                try:
                    queue = native.RocmQueue(self.device, way, engine, ring_bytes, for_kernels)
                    queue.probe(scratch, min(_PROBE_S, timeout_s))
                except CoreError as error:
                    attempts.append(Attempt(way, engine, answer_of(error), error.kind == "inert_queue"))
                    continue
                self._tell(peer, queue, way, attempts)
                return queue
        raise self._no_queue(peer, attempts)

    def _doubt(self, recommended: int, peer: int) -> None:
        """Say once that the driver and the table of the board differ; the driver's choice is used."""
        mine, theirs = self.places[self.rank][1], self.places[peer][1]
        doubt = engines.differs_from_table(recommended, mine, theirs, native.rocm_device_count())
        if doubt and not self._doubted:
            self._doubted = True
            _LOG.warning("rank %d: %s; the driver's are used", self.rank, doubt)

    def _tell(self, peer: int, queue: native.RocmQueue, way: str, attempts: list[Attempt]) -> None:
        self.way = way
        inert = [attempt for attempt in attempts if attempt.inert]
        if inert:
            _LOG.warning(
                "rank %d: the queue to rank %d runs on engine %d, because %s",
                self.rank, peer, queue.engine, "; ".join(map(str, inert)),
            )  # fmt: skip

    def _no_queue(self, peer: int, attempts: list[Attempt]) -> MoriError:
        tried = "; ".join(map(str, attempts))
        who = f"rank {self.rank}: no SDMA queue to rank {peer} (MORI_SHMEM_SDMA={self._setting})"
        if any(attempt.inert for attempt in attempts) or all(attempt.engine < 0 for attempt in attempts):
            return TransportInert(f"{who}: {tried}")
        return QueueLimitError(
            f"{who}: {tried}. The likely cause: another process holds the queues of these engines, or this "
            'one has many communicators open (the kernel log then says "No more SDMA queue to allocate")'
        )


def answer_of(error: CoreError) -> str:
    """The driver's answer in words."""
    info = error.info
    if error.kind == "missing_library":
        return f"{info['library']} cannot be used: {info['tried']}"
    if error.kind == "inert_queue":
        return str(info["how"])
    return f"{info.get('call', error.kind)} answered {info.get('error', info)}"
