"""The rocm target: windows are HIP virtual memory, copy queues are SDMA queues of our own.

One put of the host, from the call to the peer:
  1. `queue.put(dst, src, n)` is checked (steps.py) and becomes packets, the same that the host target
     executes in software (csrc/host/program.h).
  2. They go into the queue's ring (csrc/rocm/queue.h); where the caller's stream holds work, behind a
     packet that waits for it. Then the doorbell: from here on the engine works alone.
  3. The engine moves the bytes into the peer's part, which is mapped here (csrc/rocm/window.h).
  4. `queue.signal` is a packet behind the copy: the peer's kernels and host see the value after the bytes.
A put of a kernel skips the host: it writes the same packets into a queue that belongs to kernels alone
(device/flydsl; `Fabric.device_queues`).

Which engine serves which peer is told in engines.py, how a queue is asked for and proved in sdma.py.

The functions are those of every target; host.py says what each is for. Torch is the ROCm torch on hardware.
On the software node of mori-sim it is the CPU torch, and windows are CPU tensors over the same bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mori_shmem import descriptors
from mori_shmem.core import native
from mori_shmem.deadline import Deadline
from mori_shmem.mesh import Mesh
from mori_shmem.settings import Snapshot
from mori_shmem.targets import host
from mori_shmem.targets.gpu_fabric import prove_peers
from mori_shmem.targets.rocm import devices
from mori_shmem.targets.rocm.fabric import CONTROL_BYTES, PROVE_AT, Fabric
from mori_shmem.targets.rocm.queue import Program, Queue
from mori_shmem.targets.rocm.tensors import tensor_at

if TYPE_CHECKING:
    import torch


def open_fabric(mesh: Mesh, values: Snapshot, num_queues: int, deadline: Deadline) -> Fabric:
    """Choose a GPU, map the control words, open the queues that signals use, and prove that every peer can
    be written to."""
    try:
        devices.check_environment()
        device = devices.open_device(mesh.rank)
        mine = (device.bus_id, device.ordinal)
        told = [message.value for message in mesh.exchange("devices", mine, deadline)]
        devices.check_devices(mesh.rank, [bus_id for bus_id, _ in told])
        control = host.open_fabric(mesh, values, num_queues, deadline)
    except native.CoreError as error:
        raise devices.cannot_start(mesh.rank, error) from error
    try:
        fabric = Fabric(control, device, told, values)
        part = create_part(fabric, CONTROL_BYTES, "signals")
        messages = mesh.exchange("control", None, deadline, part.fds)
        fds = [fd for message in messages for fd in message.fds]
        try:
            descriptors.check_all_came(f"rank {mesh.rank} of {mesh.world_size}, in init", messages)
            fabric.words = map_window(fabric, part, fds, CONTROL_BYTES, deadline)
        finally:
            part.close()
            for fd in fds:
                os.close(fd)
        fabric.open_signal_queues()
        prove_peers(fabric, [address + PROVE_AT for address in addresses_of(fabric.words)])
    except native.CoreError as error:
        control.close()
        raise devices.cannot_start(mesh.rank, error) from error
    except BaseException:
        control.close()
        raise
    return fabric


def device_of(fabric: Fabric) -> str:
    """The GPU of this rank; "cpu" on the software node."""
    return fabric.torch_device


class Part:
    """This rank's memory of a window, zeroed and mapped here; its descriptor is this rank's until
    `close`."""

    def __init__(self, window: native.RocmWindow) -> None:
        self.window = window
        self.fds = [window.export_fd()]

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def create_part(fabric: Fabric, nbytes: int, kind: str) -> Part:
    """This rank's part, owned by the caller. "signals" is memory that no cache holds."""
    window = native.RocmWindow(fabric.device, fabric.rank, fabric.world_size, nbytes, kind == "signals")
    return Part(window)


def map_window(
    fabric: Fabric, part: Part, fds: list[int], nbytes: int, deadline: Deadline
) -> native.RocmWindow:
    """All ranks' parts in this process; `fds` are everybody's descriptors in rank order."""
    part.window.import_peers(fds)
    return fabric.add_window(part.window)


def import_part(fabric: Fabric, address: int, nbytes: int) -> ImportedPart:
    """This rank's part of a window of memory that torch has allocated. CoreError "not_importable"."""
    return ImportedPart(native.RocmPieces(fabric.device, address, nbytes))


class ImportedPart:
    """The allocations that hold a tensor; their descriptors are this rank's until `close`."""

    def __init__(self, pieces: native.RocmPieces) -> None:
        self.pieces = pieces
        self.fds = pieces.export_fds()

    @property
    def place(self) -> tuple[int, list[int]]:
        """What the peers need to know: where the tensor begins in the first, and how large all are."""
        return self.pieces.lead, list(self.pieces.sizes)

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def map_imported(
    fabric: Fabric, part: ImportedPart, places: list[tuple[int, list[int]]], fds: list[list[int]]
) -> native.RocmWindow:
    """All ranks' tensors in this process, side by side."""
    ranks = [(lead, sizes, theirs) for (lead, sizes), theirs in zip(places, fds, strict=True)]
    return fabric.add_window(native.RocmWindow.imported(fabric.device, fabric.rank, part.pieces, ranks))


def addresses_of(window: native.RocmWindow) -> tuple[int, ...]:
    """Where each rank's part starts: one stride after the other."""
    return tuple(window.base + rank * window.stride for rank in range(window.world_size))


def tensor_of(window: native.RocmWindow, rank: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
    """Bytes of a rank's part."""
    return tensor_at(window.span(rank, offset_bytes, nbytes))


def new_program(fabric: Fabric) -> Program:
    """An empty program: packets."""
    return Program(fabric)


def is_busy(queue: Queue) -> bool:
    """Whether something that was submitted is not done."""
    return queue.is_busy()


def join(queue: Queue) -> None:
    """The caller's stream goes on after all that was submitted."""
    queue.join()


def stream_barrier(fabric: Fabric, timeout_s: float | None) -> None:
    """A kernel on the caller's stream; what it finds late goes into the fault record."""
    fabric.stream_barrier(timeout_s)


def check(fabric: Fabric) -> None:
    """Raise what kernels of this rank have left in the fault record."""
    fabric.check()
