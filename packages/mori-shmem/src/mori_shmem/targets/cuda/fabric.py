"""One communicator's share of the GPU: signals, waits, barriers and queues.

How the host waits is told in targets/gpu_fabric.py. What is in GPU memory is reached

  signal    on the caller's stream: after what that stream has stored, as a release has to be
  read      by a copy to pinned memory on a stream of our own, so a busy GPU does not hold it up; a signal
            that this rank has sent before is waited for first
  wait      as `read`, again and again
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from mori_shmem.core import native
from mori_shmem.deadline import Deadline
from mori_shmem.targets.cuda import lowering
from mori_shmem.targets.cuda.devices import check_connections
from mori_shmem.targets.cuda.queue import Queue
from mori_shmem.targets.fault_record import BARRIER, FaultRecord
from mori_shmem.targets.gpu_fabric import GpuFabric

if TYPE_CHECKING:
    import torch

    from mori_shmem.targets.cuda.memory import CudaWindow, Group

_NOTHING_TO_DO = contextlib.nullcontext()
_WORDS_BYTES = 8 * 1024  # of the most ranks that there can be
# The control window: the ranks' words of the device barrier, my count of barriers, words for the probe.
_COUNT_AT = _WORDS_BYTES
PROBE_AT = _COUNT_AT + 256
CONTROL_BYTES = PROBE_AT + _WORDS_BYTES


class Fabric(GpuFabric):
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

        super().__init__(control, record, timeout_s)
        self._torch: Any = torch
        self.device, self.group = device, group
        self.calls, self.kernels = calls, kernels
        self.words: CudaWindow | None = None  # for the device barrier
        self._connections = connections
        self._queues: dict[tuple[int, int], Queue] = {}
        self._reader = _Reader(calls, landing)
        self._windows: list[CudaWindow] = []
        self._signalled: int = calls.new_event()  # the newest signal that this rank has sent
        self._lock = threading.Lock()

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

    def signals_are_out(self) -> bool:
        return bool(self.calls.has_happened(self._signalled))

    def look(self, where: int, deadline: Deadline) -> int | None:
        return self._reader.read(where, deadline)

    # ---- barriers and other waits of the host ----

    def await_callers_work(self, timeout_s: float) -> None:
        with self.on_device():
            event = self.calls.new_event()
            try:
                self.calls.record(event, self.callers_stream())
                self.await_idle(lambda: self.calls.has_happened(event), timeout_s, what="barrier")
            finally:
                self.calls.drop_event(event)

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
