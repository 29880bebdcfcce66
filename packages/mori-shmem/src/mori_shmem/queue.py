"""A copy queue to one peer: copies, signals and waits, done in the order given while the caller goes on.

Order: a signal is visible only after everything that the queue copied before it. Between queues there is no
order. `quiet` returns when all that was submitted is done and visible. Queues may be shared by threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mori_shmem import steps
from mori_shmem.core import CoreError
from mori_shmem.errors import ArgumentError
from mori_shmem.program import PutProgram
from mori_shmem.window import Ref
from mori_shmem.wording import worded

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator


class CopyQueue:
    """Made by `Communicator.queue`."""

    def __init__(self, comm: Communicator, core: Any, peer: int, index: int) -> None:
        self.comm = comm
        self.core = core  # the native queue
        self.peer = peer
        self.index = index

    def put(self, dst: Ref, src: Ref, nbytes: int) -> None:
        """Copy `nbytes` from src to dst; either may be the peer's part. Returns before it is done."""
        self._do(steps.put(self.comm, dst, src, nbytes), dst, src)

    def put_2d(
        self, dst: Ref, src: Ref, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
    ) -> None:
        """Copy rows whose starts are dst_pitch and src_pitch bytes apart."""
        self._do(steps.put_2d(self.comm, dst, src, row_bytes, num_rows, dst_pitch, src_pitch), dst, src)

    def signal(self, where: Ref, value: int, op: str = "set") -> None:
        """Set or add to a 64-bit word after all copies before it are visible, and wake its owner."""
        self._do(steps.signal(self.comm, where, value, op), where)

    def wait(self, where: Ref, value: int, cmp: str = ">=") -> None:
        """Hold the queue (not the caller) until the low 32 bits of the word compare."""
        self._do(steps.wait(self.comm, where, value, cmp), where)

    def timestamp(self, where: Ref) -> None:
        """Write the time (CLOCK_MONOTONIC, ns) when the queue gets there. Hardware counts ticks of its
        own."""
        self._do(steps.timestamp(self.comm, where), where)

    def submit(self, program: PutProgram) -> None:
        """Publish all steps of the program as one batch."""
        if not isinstance(program, PutProgram):
            raise ArgumentError(f"{program!r} is no PutProgram")
        self.comm.check_open()
        encoded = program.encoded_for(self.comm, self.peer)
        try:
            self.core.submit(encoded)
        except CoreError as error:
            raise worded(error, self.comm, self._name("submit")) from None

    def quiet(self, timeout_s: float | None = None) -> None:
        """Wait until all that was submitted before is done and visible to the peer."""
        self.comm.check_open()
        try:
            self.core.quiet(self.comm.checked_timeout(timeout_s))
        except CoreError as error:
            raise worded(error, self.comm, self._name("quiet")) from None

    def _do(self, step: steps.Step, *refs: Ref) -> None:
        verb, arguments = step
        steps.check_ends(verb, self.comm.rank, self.peer, *refs)
        try:
            getattr(self.core, verb)(*arguments)
        except CoreError as error:
            raise worded(error, self.comm, self._name(verb)) from None

    def _name(self, verb: str) -> str:
        return f"{verb} on queue {self.index} to rank {self.peer}"
