"""A copy queue as a stream: what is submitted runs after what the caller's stream held at that moment.

    caller's stream   ── produce x ── submit ────────── kernel ── join ── consume
                                         │                          │
    the queue's stream                   └─ wait ─ copy ─ write ────┘

The fork at `submit` makes the copy see what the caller's stream has produced (nothing is needed between a
kernel and the put of its result). A program that a *running* kernel triggers is therefore submitted before
the kernel is launched. `join` makes the caller's stream go on after all that was submitted: a read of what
a copy fetched, or a kernel that reuses its source, comes after it.

Captured in a graph, fork and join are edges of the graph, and the same calls give the same order. A replay
runs in the place of the stream that launches it, not on the queue: `join` before a replay orders earlier
eager work of the queue before it; work submitted after it comes after it by the fork. Whatever was forked
has to be joined before the capture ends; CUDA refuses the graph otherwise.

A trap: CUDA loads a kernel when it is first launched, and loading may wait until all streams are idle. If
one of them waits for a flag that the very kernel is to write, that is for ever. So launch such a kernel
once, or get its function, before a queue is told to wait for it; `quiet` names the queue where that was
forgotten.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mori_shmem.errors import ArgumentError
from mori_shmem.targets.cuda import lowering
from mori_shmem.targets.cuda.lowering import Faults, Operation

if TYPE_CHECKING:
    from mori_shmem.targets.cuda.fabric import Fabric


class _Verbs(ABC):
    """The verbs of a put program, lowered and handed on."""

    @abstractmethod
    def _take(self, operations: list[Operation]) -> None:
        """What becomes of a verb's operations."""

    def put(self, dst: int, src: int, nbytes: int) -> None:
        self._take(lowering.put(dst, src, nbytes))

    def put_2d(
        self, dst: int, src: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
    ) -> None:
        self._take(lowering.put_2d(dst, src, row_bytes, num_rows, dst_pitch, src_pitch))

    def signal(self, where: int, value: int, op: str = "set") -> None:
        self._take(lowering.signal(where, value, op))

    def wait(self, where: int, value: int, cmp: str = ">=") -> None:
        self._take(lowering.wait(where, value, cmp))

    def timestamp(self, where: int) -> NoReturn:
        raise ArgumentError(
            "timestamp is not part of the cuda target: a stream has no clock that agrees with "
            "CLOCK_MONOTONIC. "
            "Time a span with torch.cuda.Event(enable_timing=True)"
        )


class Program(_Verbs):
    """Steps lowered once, to be submitted as often as wanted."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def _take(self, operations: list[Operation]) -> None:
        self.operations += operations


class Queue(_Verbs):
    """The stream of one (peer, index). Programs of several threads follow one another, never mixed."""

    def __init__(self, fabric: Fabric, peer: int, index: int) -> None:
        self.peer, self.index = peer, index
        self._fabric = fabric
        self._calls = fabric.calls
        self.stream = self._calls.new_stream()
        self._event = self._calls.new_event()
        self._lock = threading.Lock()
        self._faults: Faults | None = None

    def _take(self, operations: list[Operation]) -> None:
        self._run(operations)

    def submit(self, program: Program) -> None:
        self._run(program.operations)

    def _run(self, operations: Sequence[Operation]) -> None:
        fabric, calls, stream = self._fabric, self._calls, self.stream
        fabric.check_open("queue")
        if not operations:
            return
        with self._lock, fabric.on_device():
            if fabric.is_capturing():
                lowering.check_replayable(operations)
            self._fork()
            for name, arguments in self._faults.apply(operations) if self._faults else operations:
                if name in ("add", "delay"):
                    fabric.kernels.launch(name, stream, *arguments)
                else:
                    getattr(calls, name)(stream, *arguments)

    def _fork(self) -> None:
        self._calls.record(self._event, self._fabric.callers_stream())
        self._calls.follow(self.stream, self._event)

    def join(self) -> None:
        """The caller's stream goes on after all that was submitted."""
        self._fabric.check_open("queue")
        with self._lock, self._fabric.on_device():
            if self._fabric.is_capturing():
                # where nothing was submitted in this capture: an event from outside it is refused
                self._fork()
            self._calls.record(self._event, self.stream)
            self._calls.follow(self._fabric.callers_stream(), self._event)

    def quiet(self, timeout_s: float | None = None) -> None:
        """Return when all that was submitted is done and visible. Replays of graphs are not the queue's."""
        self._fabric.check_open("queue")
        self._fabric.refuse_in_capture("quiet", "join() is its counterpart in a graph")
        calls = self._calls
        with self._fabric.on_device():
            event = calls.new_event()
            try:
                calls.record(event, self.stream)
                self._fabric.await_idle(
                    lambda: calls.has_happened(event),
                    timeout_s,
                    what="quiet",
                    peer=self.peer,
                    index=self.index,
                )
            finally:
                calls.drop_event(event)

    def is_busy(self) -> bool:
        """Whether work is left."""
        return not self._calls.is_idle(self.stream)

    def set_faults(self, *, drop_every: int = 0, delay_us: int = 0, reorder: bool = False) -> None:
        """Test hook, as on the host target."""
        with self._lock:
            asked = (drop_every, delay_us, reorder)
            self._faults = Faults(*asked) if any(asked) else None

    def close(self) -> None:
        """Work that waits for ever is left behind: the driver keeps the stream until it ends."""
        self._calls.drop_event(self._event)
        self._calls.drop_stream(self.stream)
