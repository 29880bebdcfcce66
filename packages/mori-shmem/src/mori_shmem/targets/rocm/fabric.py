"""One communicator's share of an AMD GPU: signals, waits, barriers, and the queues of host and kernels.

How the host waits is told in targets/gpu_fabric.py. The host touches GPU memory through copy engines alone,
by two queues of its own which any peer's part can be reached from:

  signals   comm.signal: a packet that stores or adds, after what the caller's stream holds
  reader    comm.read and comm.wait: a packet that copies the word to host memory, and a mark behind it. It
            never waits for a stream, so a busy GPU does not hold it up

Queues that kernels write are made by `device_queues`: one to each rank, in device memory, and the host
leaves them alone afterwards.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mori_shmem.core import CoreError, native
from mori_shmem.deadline import Deadline
from mori_shmem.device import queue_words
from mori_shmem.errors import TransportInert
from mori_shmem.settings import Snapshot
from mori_shmem.targets.fault_record import FaultRecord
from mori_shmem.targets.gpu_fabric import GpuFabric
from mori_shmem.targets.rocm.queue import Queue
from mori_shmem.targets.rocm.sdma import Sdma
from mori_shmem.variables import RING_BYTES, SDMA, TIMEOUT_S

_ROW_BYTES = 8 * 1024  # a word for each of the most ranks that there can be
_SCRATCH_BYTES = 64  # what a probe copies
# The control window: words of the device barrier, words to prove the peers with, a scratch place for each
# rank's probes.
PROVE_AT, _SCRATCH_AT = _ROW_BYTES, 2 * _ROW_BYTES
CONTROL_BYTES = _SCRATCH_AT + _SCRATCH_BYTES * 1024
_COUNT_WORD = 8  # of the record's memory: how many barriers there have been
_RECORD_BYTES = 128
_DRAIN_S = 1.0


@dataclass(frozen=True)
class DeviceQueues:
    """One copy queue to each rank, for kernels: `device.flydsl.queue_address(table, peer)`."""

    table: int
    num_queues: int


def words_of(queue: native.RocmQueue, peer: int, record: int, timeout_s: float) -> bytes:
    """A queue as kernels see it. What its probe has used of the ring counts as used."""
    used = queue.submitted_bytes
    values = {
        queue_words.RING: queue.ring,
        queue_words.RPTR: queue.read_pointer,
        queue_words.WPTR: queue.write_pointer,
        queue_words.DOORBELL: queue.doorbell,
        queue_words.RESERVED: used,
        queue_words.COMMITTED: used,
        queue_words.READ: used,
        queue_words.RING_BYTES: queue.ring_bytes,
        queue_words.RECORD: record,
        queue_words.TIMEOUT: queue_words.ticks(timeout_s),
        queue_words.PEER: peer,
        queue_words.DONE: used // queue_words.PACKET_BYTES,
    }
    offsets = range(0, queue_words.QUEUE_BYTES, 8)
    return struct.pack(f"<{len(offsets)}Q", *(values.get(offset, 0) for offset in offsets))


class Fabric(GpuFabric):
    """Made by `open_fabric`."""

    ends_kernels = True

    def __init__(
        self,
        control: native.Fabric,
        device: native.RocmDevice,
        places: Sequence[tuple[str, int]],
        values: Snapshot,
    ) -> None:
        import torch

        self._record_words = native.RocmWords(device, _RECORD_BYTES, "host")
        memory = torch.frombuffer(self._record_words, dtype=torch.int32)[: len(queue_words.RECORD_FIELDS)]
        memory[1] = control.rank
        super().__init__(control, FaultRecord(memory), values[TIMEOUT_S])
        self._torch: Any = torch
        self._on_hardware = bool(torch.version.hip)
        self.device = device
        self.torch_device = f"cuda:{device.ordinal}" if self._on_hardware else "cpu"
        self.words: native.RocmWindow | None = None
        self.sdma = Sdma(device, places, self.rank, values[SDMA])
        self._ring_bytes = values[RING_BYTES]
        self._queues: dict[tuple[int, int], Queue] = {}
        self._signals: Queue | None = None
        self._reader: native.RocmQueue | None = None
        self._reader_lock = threading.Lock()
        self._lock = threading.Lock()
        self._device_queues: DeviceQueues | None = None
        self._device_queue_memory: list[Any] = []
        self._windows: list[native.RocmWindow] = []

    # ---- where work goes ----

    def callers_stream(self) -> int:
        """The raw handle of torch's current stream; the null stream where torch knows of no GPU."""
        if not self._on_hardware:
            return 0
        return int(self._torch._C._cuda_getCurrentRawStream(self.device.ordinal))

    def is_capturing(self) -> bool:
        return self.device.is_capturing(self.callers_stream())

    def await_callers_work(self, timeout_s: float) -> None:
        stream = self.callers_stream()
        self.await_idle(
            lambda: self.device.is_idle(stream) and self.signals_are_out(), timeout_s, what="barrier"
        )

    # ---- windows and queues ----

    def add_window(self, window: native.RocmWindow) -> native.RocmWindow:
        self._windows = [w for w in self._windows if not w.closed] + [window]
        return window

    def open_signal_queues(self) -> None:
        """The two queues of the host; the first proof that engines run."""
        self._signals = Queue(self, self._open(self.rank, for_kernels=False), self.rank, -1)
        self._reader = self._open(self.rank, for_kernels=False)

    def open_queues(self, peer: int, indices: list[int]) -> list[Queue]:
        self.check_open("communicator")
        with self._lock:
            for index in indices:
                if (peer, index) not in self._queues:
                    core = self._open(peer, for_kernels=False)
                    self._queues[peer, index] = Queue(self, core, peer, index)
            return [self._queues[peer, index] for index in indices]

    def device_queues(self) -> DeviceQueues:
        """The queues of this rank's kernels, one to each rank, itself included. The same ones each time."""
        self.check_open("communicator")
        with self._lock:
            if self._device_queues is None:
                queues = [self._open(peer, for_kernels=True) for peer in range(self.world_size)]
                table = native.RocmWords(self.device, queue_words.QUEUE_BYTES * len(queues), "uncached")
                words = b"".join(
                    words_of(queue, peer, self.record.address, self.timeout_s)
                    for peer, queue in enumerate(queues)
                )
                self.device.write(table.address, words)
                self._device_queue_memory = [table, *queues]
                self._device_queues = DeviceQueues(table.address, len(queues))
            return self._device_queues

    def _open(self, peer: int, *, for_kernels: bool) -> native.RocmQueue:
        assert self.words is not None
        scratch = self.words.base + peer * self.words.stride + _SCRATCH_AT + _SCRATCH_BYTES * self.rank
        return self.sdma.open(
            peer, self._ring_bytes, scratch, for_kernels=for_kernels, timeout_s=self.timeout_s
        )

    # ---- signals ----

    def signal(self, where: int, value: int, op: str = "set") -> None:
        """After what the caller's stream holds."""
        self.check_open("communicator")
        assert self._signals is not None
        self._signals.signal(where, value, op)

    def signals_are_out(self) -> bool:
        assert self._signals is not None
        return not self._signals.is_busy()

    def look(self, where: int, deadline: Deadline) -> int | None:
        reader = self._reader
        assert reader is not None
        with self._reader_lock:
            mark = reader.fetch(where, self.timeout_s)
            for _ in self._looks():
                if reader.reached(mark):
                    return reader.fetched
                if deadline.passed():
                    return None
        return None

    # ---- barriers ----

    def stream_barrier(self, timeout_s: float | None = None) -> None:
        """The caller's stream goes on when all ranks' streams have come here. Returns at once; can be
        captured."""
        self.check_open("communicator")
        assert self.words is not None
        try:
            from mori_shmem.targets.rocm import kernels
        except ImportError as error:
            raise TransportInert(
                f"stream_barrier runs a kernel, and flydsl, which compiles it, cannot be imported ({error}): "
                "install mori-shmem[rocm], or use barrier()"
            ) from error
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        kernels.barrier(self.world_size)(
            self.words.base, self.words.stride, self.rank,
            self._record_words.address + 8 * _COUNT_WORD, self.record.address, queue_words.ticks(limit_s),
            stream=self.callers_stream(),
        )  # fmt: skip

    # ---- the end ----

    def close(self) -> None:
        """Give everything back: queues first, so that no engine touches memory that goes. Signals that stand
        behind work of the caller's stream get a moment to leave; kernels that wait for a rank that died are
        made to end."""
        if self.closed:
            return
        self.closed = True
        if self.give_up_kernels():
            with contextlib.suppress(CoreError):
                stream = self.callers_stream()
                self.await_idle(lambda: self.device.is_idle(stream), _DRAIN_S, what="close")
        with contextlib.suppress(CoreError):
            if self._signals:
                self.await_idle(self.signals_are_out, _DRAIN_S, what="close")
        for queue in [*self._queues.values(), *([self._signals] if self._signals else [])]:
            del queue.core
        self._queues.clear()
        self._signals = self._reader = None
        self._device_queues = None
        self._device_queue_memory.clear()
        if self.words:
            self.words.close()
        self.control.close()
