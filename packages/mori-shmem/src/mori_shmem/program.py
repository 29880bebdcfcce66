"""A put program: steps for a copy queue, written down once and submitted as often as wanted.

    program = PutProgram()
    program.wait(go, 1)                       # the queue stands still until go >= 1 ...
    program.put(dst, src, nbytes)             # ... then copies ...
    program.signal(arrived, 1, op="add")      # ... then signals: the peer sees the data before the signal
    queue.submit(program)

A submitted program is published as one batch, between the steps of other threads and not among them. It is
encoded at its first submit; adding a step afterwards encodes it anew. Nothing of a program is copied but
addresses: the memory must hold what is wanted when the queue gets there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mori_shmem import steps
from mori_shmem.errors import ArgumentError
from mori_shmem.window import Ref

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator


class PutProgram:
    """Steps for any queue of one communicator (that of the windows it names)."""

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._steps: list[steps.Step] = []
        self._ranks: set[int] = set()  # whose parts the steps touch
        self._encoded: Any = None

    def put(self, dst: Ref, src: Ref, nbytes: int) -> None:
        """Copy `nbytes` from src to dst; either may be the peer's part."""
        self._add(steps.put(self._comm_of(dst), dst, src, nbytes), dst, src)

    def put_2d(
        self, dst: Ref, src: Ref, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
    ) -> None:
        """Copy rows whose starts are dst_pitch and src_pitch bytes apart."""
        comm = self._comm_of(dst)
        self._add(steps.put_2d(comm, dst, src, row_bytes, num_rows, dst_pitch, src_pitch), dst, src)

    def signal(self, where: Ref, value: int, op: str = "set") -> None:
        """Set or add to a 64-bit word after all copies before it are visible, and wake its owner."""
        self._add(steps.signal(self._comm_of(where), where, value, op), where)

    def wait(self, where: Ref, value: int, cmp: str = ">=") -> None:
        """Hold the queue until the low 32 bits of the word compare."""
        self._add(steps.wait(self._comm_of(where), where, value, cmp), where)

    def timestamp(self, where: Ref) -> None:
        """Write the time (CLOCK_MONOTONIC, ns) when the queue gets there."""
        self._add(steps.timestamp(self._comm_of(where), where), where)

    def __len__(self) -> int:
        return len(self._steps)

    def _comm_of(self, ref: Ref) -> Communicator:
        if self._comm is None:
            if type(ref) is not Ref:
                raise ArgumentError(
                    f"{ref!r}: an address in a window is needed, as window.at(offset, peer) gives"
                )
            self._comm = ref.window.comm
        return self._comm

    def _add(self, step: steps.Step, *refs: Ref) -> None:
        self._steps.append(step)
        self._ranks.update(ref.rank for ref in refs)
        self._encoded = None

    def encoded_for(self, comm: Communicator, peer: int) -> Any:
        """The native program, for the queue from `comm`'s rank to `peer`."""
        if self._comm is not None and self._comm is not comm:
            raise ArgumentError("the program's windows belong to another communicator than the queue")
        strangers = self._ranks - {peer, comm.rank}
        if strangers:
            raise ArgumentError(
                f"the program touches the part of rank {min(strangers)}: submit it to "
                f"comm.queue({min(strangers)}), not to the queue from rank {comm.rank} to rank {peer}"
            )
        if self._encoded is None:
            self._encoded = comm.encode(self._steps)
        return self._encoded
