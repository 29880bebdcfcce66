"""One communicator's share of the GPU: signals, waits, barriers and queues.

Between processes it leans on the host target: control pages, the host barrier, and the pidfds that tell
when a peer has died are those of a native fabric that owns no memory and no queues. What is in GPU memory
is reached

  signal    on the caller's stream: after what that stream has stored, as a release has to be
  read      by a copy to pinned memory on a stream of our own, so a busy GPU does not hold it up; a signal
            that this rank has sent before is waited for first
  wait      as `read`, again and again, with pauses that grow to a millisecond

A wait of the host ends at its deadline, when a peer it needs has died, or when a kernel of this rank has
left a fault record: then the call that the kernel belongs to has failed, and its error says so.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mori_shmem.core import core_error, native
from mori_shmem.deadline import Deadline
from mori_shmem.errors import ArgumentError
from mori_shmem.targets.cuda import lowering
from mori_shmem.targets.cuda.devices import check_connections
from mori_shmem.targets.cuda.fault_record import BARRIER, FaultRecord
from mori_shmem.targets.cuda.queue import Queue

if TYPE_CHECKING:
    import torch

    from mori_shmem.targets.cuda.memory import CudaWindow, Group

_NOTHING_TO_DO = contextlib.nullcontext()
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq,
    "!=": operator.ne, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
_PAUSE_S = (20e-6, 1e-3)  # first and longest pause between two looks
_SPIN_S = 100e-6  # looks without a pause
_DEATH_EVERY_S = 0.01  # how often the peers' processes are looked at
_DEATH_GRACE_S = 0.25  # work that needs no peer gets this long to finish after one has died
_WORDS_BYTES = 8 * 1024  # of the most ranks that there can be
# The control window: the ranks' words of the device barrier, my count of barriers, words for the probe.
_COUNT_AT = _WORDS_BYTES
PROBE_AT = _COUNT_AT + 256
CONTROL_BYTES = PROBE_AT + _WORDS_BYTES


class Fabric:
    """Made by `open_fabric`. `calls` and `kernels` are what tests replace."""

    def __init__(
        self,
        control: native.Fabric,
        device: torch.device,
        group: Group,
        calls: Any,
        kernels: Any,
        *,
        timeout_s: float,
        connections: int,
        record: FaultRecord,
        landing: torch.Tensor,
    ) -> None:
        import torch

        self._torch: Any = torch
        self.rank, self.world_size = control.rank, control.world_size
        self.queues_per_peer = control.queues_per_peer
        self.timeout_s = timeout_s
        self.control, self.device, self.group = control, device, group
        self.calls, self.kernels, self.record = calls, kernels, record
        self.words: CudaWindow | None = None  # for the device barrier
        self._connections = connections
        self._queues: dict[tuple[int, int], Queue] = {}
        self._reader = _Reader(calls, landing)
        self._windows: list[CudaWindow] = []
        self._signalled: int = calls.new_event()  # the newest signal that this rank has sent
        self._lock = threading.Lock()
        self._next_death_look = 0.0
        self._known_dead: list[int] = []
        self.closed = False

    # ---- where work goes ----

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """The device of this fabric is current, and so is its context."""
        if self._torch._C._cuda_getDevice() == self.device.index:
            self.calls.use_context(self.device.index)
            return _NOTHING_TO_DO
        guard: contextlib.AbstractContextManager[Any] = self._torch.cuda.device(self.device)
        return guard

    def callers_stream(self) -> int:
        """The raw handle of torch's current stream. (torch.cuda.current_stream makes an object each time.)"""
        return int(self._torch._C._cuda_getCurrentRawStream(self.device.index))

    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured in a graph."""
        return bool(self._torch.cuda.is_current_stream_capturing())

    def refuse_in_capture(self, what: str, instead: str) -> None:
        if self.is_capturing():
            raise ArgumentError(
                f"{what} is a wait of the host and cannot be captured in a CUDA graph: {instead}"
            )

    def check_open(self, what: str) -> None:
        if self.closed:
            raise core_error("closed", what=what)

    # ---- windows and queues ----

    def add_window(self, window: CudaWindow) -> CudaWindow:
        self._windows = [w for w in self._windows if not w.closed] + [window]
        return window

    def open_queues(self, peer: int, indices: list[int]) -> list[Queue]:
        self.check_open("communicator")
        with self._lock, self.on_device():
            for index in indices:
                if (peer, index) not in self._queues:
                    check_connections(len(self._queues) + 1, self._connections)
                    self._queues[peer, index] = Queue(self, peer, index)
            return [self._queues[peer, index] for index in indices]

    # ---- signals ----

    def signal(self, where: int, value: int, op: str = "set") -> None:
        """On the caller's stream, after what it holds."""
        self.check_open("communicator")
        operations = lowering.signal(where, value, op)
        with self._lock, self.on_device():
            stream = self.callers_stream()
            if capturing := self.is_capturing():
                lowering.check_replayable(operations)
            for name, arguments in operations:
                if name == "add":
                    self.kernels.launch("add", stream, *arguments)
                else:
                    self.calls.write(stream, *arguments)
            if not capturing:
                self.calls.record(self._signalled, stream)

    def signal_all(self, where: Sequence[int], value: int) -> None:
        for word in where:
            self.signal(word, value)

    def wait_all(self, where: Sequence[int], value: int, peers: Sequence[int], timeout_s: float) -> list[int]:
        deadline = Deadline(timeout_s)
        return [
            self.wait(word, value, ">=", peer=peer, timeout_s=max(deadline.left_s(), 0.0))
            for word, peer in zip(where, peers, strict=True)
        ]

    def read(self, where: int) -> int:
        self.check_open("communicator")
        self.refuse_in_capture("read", "a kernel can read the word")
        self.await_idle(lambda: self.calls.has_happened(self._signalled), None, what="read")
        seen = self._reader.read(where, Deadline(self.timeout_s))
        if seen is None:
            raise core_error("timeout", what="read", waited_s=self.timeout_s)
        return seen

    def wait(
        self, where: int, value: int, cmp: str = ">=", *, peer: int = -1, timeout_s: float | None = None
    ) -> int:
        self.check_open("communicator")
        self.refuse_in_capture("wait", "a queue's wait, or a kernel's, can be captured")
        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        compare, seen = _COMPARE[cmp], None
        for _ in self._looks():
            latest = self._reader.read(where, deadline)
            seen = seen if latest is None else latest
            if latest is not None and compare(latest, value):
                return latest
            facts = {
                "what": "signal",
                "address": where,
                "seen": seen,
                "wanted": value,
                "cmp": cmp,
                "peer": peer,
            }
            self._raise_if_gone(peer, facts)
            if deadline.passed():
                raise core_error("timeout", waited_s=deadline.timeout_s, **facts)
        raise AssertionError("looks do not end")

    # ---- barriers and other waits of the host ----

    def barrier(self, timeout_s: float | None = None) -> None:
        """All that the caller's stream holds is done on every rank."""
        self.refuse_in_capture("barrier", "stream_barrier() can be captured")
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(limit)
        with self.on_device():
            event = self.calls.new_event()
            try:
                self.calls.record(event, self.callers_stream())
                self.await_idle(lambda: self.calls.has_happened(event), limit, what="barrier")
            finally:
                self.calls.drop_event(event)
        self.control.barrier(max(deadline.left_s(), 0.001))

    def stream_barrier(self, timeout_s: float | None = None) -> None:
        """The caller's stream goes on when all ranks' streams have come here. Returns at once; can be
        captured."""
        self.check_open("communicator")
        assert self.words is not None
        limit_ns = int((self.timeout_s if timeout_s is None else timeout_s) * 1e9)
        with self.on_device():
            self.kernels.launch(
                "barrier", self.callers_stream(),
                self.words.table, self.words.base + _COUNT_AT, limit_ns, self.record.address,
                self.rank, BARRIER, block=self.world_size,
            )  # fmt: skip

    def check(self) -> None:
        """Raise what a kernel of this rank has left in the fault record."""
        if (fault := self.record.take()) is not None:
            raise fault

    def await_idle(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None,
        *,
        what: str,
        peer: int = -1,
        index: int = -1,
    ) -> None:
        """Return when `ready`: work on a stream of ours or the caller's is done."""
        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        death_seen = False
        for _ in self._looks():
            done = ready()
            self.check()
            if done:
                return
            facts = {"what": what, "peer": peer, "index": index}
            if not death_seen and self._dead():
                death_seen = True
                grace = min(_DEATH_GRACE_S, max(deadline.left_s(), 0.001))
                deadline = Deadline(grace)
            elif deadline.passed():
                if death_seen:
                    raise core_error("peer_died", ranks=self._dead(), **facts)
                raise core_error("timeout", waited_s=deadline.timeout_s, **facts)

    def _looks(self) -> Iterator[None]:
        """When to look: at once, then often, then with pauses. For ever."""
        spin_until = time.monotonic() + _SPIN_S
        pause_s, longest_s = _PAUSE_S
        while True:
            yield
            if time.monotonic() > spin_until:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, longest_s)

    def _states(self) -> list[str]:
        return list(self.control.peer_states())

    def _dead(self) -> list[int]:
        now = time.monotonic()
        if now >= self._next_death_look:
            self._next_death_look = now + _DEATH_EVERY_S
            self._known_dead = [rank for rank, state in enumerate(self._states()) if state == "dead"]
        return self._known_dead

    def _raise_if_gone(self, peer: int, facts: dict[str, Any]) -> None:
        """With a peer, its death or leaving ends the wait; without one, anybody's death."""
        self.check()
        dead = self._dead()
        if dead and peer in (-1, *dead):
            raise core_error("peer_died", ranks=dead, **facts)
        if peer not in (-1, self.rank) and self._states()[peer] == "left":
            raise core_error("peer_left", ranks=[peer], **facts)

    def peer_states(self) -> list[str]:
        return self._states()

    # ---- the end ----

    def close(self) -> None:
        """Give everything back. What stuck work may still touch is kept until the process ends."""
        if self.closed:
            return
        self.closed = True
        with self.on_device():
            stuck = any(queue.is_busy() for queue in self._queues.values())
            for queue in self._queues.values():
                queue.close()
            self._reader.close()
            self.calls.drop_event(self._signalled)
        windows = [*self._windows, *([self.words] if self.words else [])]
        for window in windows:
            if stuck:
                window.abandon()
        if self.words:
            self.words.close()
        self.group.close()
        self.control.close()


class _Reader:
    """Reads words of GPU memory on a stream of its own."""

    def __init__(self, calls: Any, landing: torch.Tensor) -> None:
        self._calls, self._landing = calls, landing  # one pinned word
        self._stream: int = calls.new_stream()
        self._lock = threading.Lock()
        self._given_up = False

    def read(self, address: int, deadline: Deadline) -> int | None:
        """The word's value; None if it did not come in time."""
        with self._lock:
            if self._given_up:  # an earlier read that was given up is still under way
                if not self._done_by(deadline):
                    return None
                self._given_up = False
            self._calls.fetch(self._stream, self._landing.data_ptr(), address, 8)
            if not self._done_by(deadline):
                self._given_up = True
                return None
            return int(self._landing.item()) % (1 << 64)

    def _done_by(self, deadline: Deadline) -> bool:
        while not self._calls.is_idle(self._stream):
            if deadline.passed():
                return False
        return True

    def close(self) -> None:
        self._calls.drop_stream(self._stream)
