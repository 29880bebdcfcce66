"""What a rank of the tests stands on: a communicator, its windows, and kernels started alike."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kernels
import mori_shmem
import torch
from mori_shmem.core import native
from mori_shmem.device import queue_words

DEADLINE_S = 30.0


def pattern_of(sender: int, receiver: int, round_: int, num_kib: int) -> torch.Tensor:
    """What kernels.store_pattern stores: bytes of `num_kib` KiB."""
    places = torch.arange(num_kib * 256, dtype=torch.int32)
    return (places + ((sender * 8 + receiver) * 64 + round_) * 4096).view(torch.uint8)


class Bed:
    """One rank's."""

    def __init__(self, comm: mori_shmem.Communicator, dev: ModuleType, timeout_s: float = DEADLINE_S) -> None:
        self.comm, self.dev = comm, dev
        self.world, self.rank = comm.world_size, comm.rank
        self.data = comm.alloc(2 * self.world * kernels.SLOT)
        self.flags = comm.alloc(64 * 1024, kind="signals")
        self.timeout_s = timeout_s
        device = comm.core.device
        self._out = comm.alloc(self.world * kernels.SLOT)
        self._args = native.RocmWords(device, 128, "uncached")
        self._spare = native.RocmWords(device, 64, "uncached")
        self._counter = comm.alloc(4096)
        self._launchers: dict[Any, Any] = {}

    @property
    def out(self) -> torch.Tensor:
        return self._out.tensor(self.world * kernels.SLOT, torch.uint8)

    def counter(self) -> torch.Tensor:
        return self._counter.tensor(1, torch.int64)

    def run(
        self, factory: Callable[..., Any], round_: int, *parameters: Any, cached_spare: bool = False
    ) -> None:
        """Start a kernel and wait for its end; errors in its record are raised."""
        self.start(factory, round_, *parameters, cached_spare=cached_spare)
        self.finish()

    def start(
        self, factory: Callable[..., Any], round_: int, *parameters: Any, cached_spare: bool = False
    ) -> None:
        comm = self.comm
        key = (factory, parameters)
        if key not in self._launchers:
            self._launchers[key] = factory(self.dev, self.world, *parameters)
        spare = self._counter.at(0).address if cached_spare else self._spare.address
        words = (
            self.data.handle.base, self.data.handle.stride, self.rank, comm.core.device_queues().table,
            comm.fault_record.data_ptr(), queue_words.ticks(self.timeout_s), self._out.at(0).address, round_,
            self.flags.handle.base, self.flags.handle.stride, spare,
        )  # fmt: skip
        comm.core.device.write(self._args.address, struct.pack(f"<{len(words)}Q", *words))
        self._launchers[key](self._args.address)

    def finish(self) -> None:
        limit = time.monotonic() + 2 * self.timeout_s
        while not self.comm.core.device.is_idle(0):
            assert time.monotonic() < limit, "the kernel does not end"
            time.sleep(0.001)
        self.comm.check()

    def check_rows(self, round_: int, num_kib: int) -> None:
        """Every sender's row has come out whole."""
        for sender in range(self.world):
            row = self.out[sender * kernels.SLOT :][: num_kib * 1024]
            wrong = int((row != pattern_of(sender, self.rank, round_, num_kib)).sum())
            assert not wrong, f"{wrong} wrong bytes from rank {sender} in round {round_}"
