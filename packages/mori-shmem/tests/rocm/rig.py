"""Two devices and their kernels in one process, so that strict mode sees both sides of every exchange.

Ranks of a communicator are processes, and what one process's checker sees of another's is its signals only.
Here the memory of both devices lies in one reservation, each device has its queues to both, and the same
kernels run on both at once. No communicator: the parts it is made of.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kernels
import torch
from bed import pattern_of
from mori_shmem.core import native
from mori_shmem.device import queue_words
from mori_shmem.targets.rocm.fabric import words_of

WORLD = 2
RING_BYTES = 512
_SCRATCH = 60 * 1024  # in the flags' window
_READ_WRITE = (ctypes.c_int * 3)(1, 1, 3)  # device 1, read and write
hip = ctypes.CDLL("libamdhip64.so.7")


class Memory:
    """A window whose parts lie on device 0 and device 1, open to both."""

    def __init__(self, devices: list[native.RocmDevice], nbytes: int, uncached: bool) -> None:
        self.parts = [native.RocmWindow(d, rank, WORLD, nbytes, uncached) for rank, d in enumerate(devices)]
        whole, other = self.parts
        whole.import_peers([-1, other.export_fd()])
        self.base, self.stride, self.nbytes = whole.base, whole.stride, nbytes
        size = ctypes.c_size_t(WORLD * self.stride)
        code = hip.hipMemSetAccess(ctypes.c_void_p(self.base), size, _READ_WRITE, ctypes.c_size_t(1))
        assert code == 0, code

    def tensor(self, rank: int) -> torch.Tensor:
        return torch.frombuffer(self.parts[0].span(rank, 0, self.nbytes), dtype=torch.uint8)

    def at(self, rank: int) -> int:
        return self.base + rank * self.stride


class Rig:
    """`timeout_s` is short: a changed helper may wait for what never comes."""

    def __init__(self, timeout_s: float = 3.0) -> None:
        self.timeout_s = timeout_s
        self._kept: list[Any] = []
        self.devices = [native.RocmDevice(0), native.RocmDevice(1)]
        self.data = Memory(self.devices, 2 * WORLD * kernels.SLOT, False)
        self.flags = Memory(self.devices, 64 * 1024, False)  # cached: the helpers have to get past that
        self.out = Memory(self.devices, WORLD * kernels.SLOT, False)
        self.counter = Memory(self.devices, 4096, False)
        self.ranks = [_Rank(self, rank, device) for rank, device in enumerate(self.devices)]

    def run(self, factory: Callable[..., Any], dev: ModuleType, *parameters: Any) -> list[str]:
        """A kernel on both devices, twice. What went wrong, in words: late waits, and what `out` shows."""
        launch = factory(dev, WORLD, *parameters)
        self._kept.append(
            launch
        )  # its code keeps its place, so that a report about it is not taken for an old one
        found = []
        for round_ in (1, 2):
            for rank in self.ranks:
                rank.start(launch, round_)
            limit = time.monotonic() + 6 * self.timeout_s
            while not all(rank.device.is_idle(0) for rank in self.ranks):
                assert time.monotonic() < limit, "the kernels do not end"
                time.sleep(0.0005)
            found += [f"late: {fields}" for rank in self.ranks if (fields := rank.take_record())]
            if found:
                break
        return found

    def wrong_rows(self, round_: int, num_kib: int) -> int:
        """Bytes of `out` that are not what the senders stored."""
        wrong = 0
        for receiver in range(WORLD):
            out = self.out.tensor(receiver)
            for sender in range(WORLD):
                row = out[sender * kernels.SLOT :][: num_kib * 1024]
                wrong += int((row != pattern_of(sender, receiver, round_, num_kib)).sum())
        return wrong


class _Rank:
    """What a kernel of one device is started with."""

    def __init__(self, rig: Rig, rank: int, device: native.RocmDevice) -> None:
        self.rig, self.rank, self.device = rig, rank, device
        self._record = native.RocmWords(device, 64, "host")
        self._args = native.RocmWords(device, 128, "uncached")
        self._table = native.RocmWords(device, queue_words.QUEUE_BYTES * WORLD, "uncached")
        self._queues = [self._queue(peer) for peer in range(WORLD)]
        words = b"".join(
            words_of(queue, peer, self._record.address, rig.timeout_s)
            for peer, queue in enumerate(self._queues)
        )
        device.write(self._table.address, words)

    def _queue(self, peer: int) -> native.RocmQueue:
        queue = native.RocmQueue(self.device, "hsakmt", 2 + peer, RING_BYTES, True)
        queue.probe(self.rig.flags.at(peer) + _SCRATCH + 64 * self.rank, 5.0)
        return queue

    def start(self, launch: Any, round_: int) -> None:
        rig = self.rig
        words = (
            rig.data.base, rig.data.stride, self.rank, self._table.address, self._record.address,
            queue_words.ticks(rig.timeout_s), rig.out.at(self.rank), round_,
            rig.flags.base, rig.flags.stride, rig.counter.at(self.rank),
        )  # fmt: skip
        self.device.write(self._args.address, struct.pack(f"<{len(words)}Q", *words))
        native.rocm_set_device(self.rank)
        launch(self._args.address)

    def take_record(self) -> dict[str, int]:
        record = torch.frombuffer(self._record, dtype=torch.int32)[: len(queue_words.RECORD_FIELDS)]
        if record[0] == 0:
            return {}
        fields = dict(zip(queue_words.RECORD_FIELDS, record.tolist(), strict=True))
        record.zero_()
        return fields
