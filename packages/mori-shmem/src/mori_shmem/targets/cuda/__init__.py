"""The cuda target: windows are torch symmetric memory, copy queues are streams, and the GPU's front end
waits and writes.

One put, from the call to the peer:
  1. `queue.put(dst, src, n)` is checked (steps.py) and lowered to stream operations (lowering.py).
  2. The queue's stream is forked off the caller's stream (queue.py), so it sees what that has produced.
  3. A copy engine moves the bytes into the peer's part, which is mapped here (memory.py).
  4. `queue.signal` becomes a write of the stream's front end: after the copy, fenced, seen by whoever waits
     for it: a kernel of the peer (device/), a queue of the peer, or the peer's host (fabric.py).
No SM takes part, so puts go on behind a kernel that fills the GPU.

The functions are those of every target; host.py says what each is for.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from mori_shmem.deadline import Deadline
from mori_shmem.errors import TransportInert
from mori_shmem.mesh import Mesh
from mori_shmem.settings import Snapshot
from mori_shmem.targets import host
from mori_shmem.targets.cuda import devices, stream_calls
from mori_shmem.targets.cuda.fabric import CONTROL_BYTES, PROBE_AT, Fabric
from mori_shmem.targets.cuda.kernels import kernels_of
from mori_shmem.targets.cuda.memory import CudaWindow, Group, Part
from mori_shmem.targets.cuda.queue import Program, Queue
from mori_shmem.targets.fault_record import FaultRecord
from mori_shmem.targets.gpu_fabric import prove_peers
from mori_shmem.variables import TIMEOUT_S

if TYPE_CHECKING:
    import torch


def open_fabric(mesh: Mesh, values: Snapshot, num_queues: int, deadline: Deadline) -> Fabric:
    """Choose a GPU, agree on the group, map the control words, and prove that every peer can be written
    to."""
    import torch

    connections = devices.prepare_environment()
    device = torch.device("cuda", devices.choose_device(mesh.rank))
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    told = mesh.exchange("devices", (uuid, f"mori-shmem-{secrets.token_hex(8)}"), deadline)
    devices.check_devices(mesh.rank, [message.value[0] for message in told])
    torch.cuda.init()  # type: ignore[no-untyped-call]
    _check_driver(device)
    control = host.open_fabric(mesh, values, num_queues, deadline)
    try:
        with torch.cuda.device(device):
            stream_calls.use_context(device.index)
            fabric = Fabric(
                control,
                device,
                Group(mesh, told[0].value[1], deadline),
                stream_calls,
                kernels_of(device.index),
                timeout_s=values[TIMEOUT_S],
                connections=connections,
                record=FaultRecord(torch.zeros(8, dtype=torch.int32, pin_memory=True)),
                landing=torch.zeros(1, dtype=torch.int64, pin_memory=True),
            )
            part = create_part(fabric, CONTROL_BYTES, "signals")
            fabric.words = map_window(fabric, part, [], CONTROL_BYTES, deadline)
            prove_peers(fabric, [address + PROBE_AT for address in fabric.words.addresses])
    except BaseException:
        control.close()
        raise
    return fabric


def _check_driver(device: torch.device) -> None:
    from torch._C._distributed_c10d import _SymmetricMemory

    if not stream_calls.has_64_bit_memops(device.index):
        raise TransportInert(
            f"{device}: its driver has no 64-bit stream memory operations, which copy queues need"
        )
    backend = _SymmetricMemory.get_backend(device)
    if backend not in (None, "CUDA"):  # None: not chosen yet, and CUDA is the default
        raise TransportInert(
            f"torch's symmetric memory uses {backend!r} here; the cuda target needs 'CUDA': unset "
            f"TORCH_SYMMMEM"
        )


def device_of(fabric: Fabric) -> str:
    """The GPU that this rank uses."""
    return str(fabric.device)


def create_part(fabric: Fabric, nbytes: int, kind: str) -> Part:
    """This rank's part of a window, zeroed. The peers need no descriptors of it: torch hands them over."""
    with fabric.on_device():
        return Part(nbytes, fabric.device)


def map_window(fabric: Fabric, part: Part, fds: list[int], nbytes: int, deadline: Deadline) -> CudaWindow:
    """All ranks' parts in this process."""
    assert part.tensor is not None
    with fabric.on_device():
        handle = fabric.group.rendezvous(part.tensor, deadline)
    return fabric.add_window(CudaWindow(part.tensor, handle, nbytes))


def addresses_of(window: CudaWindow) -> tuple[int, ...]:
    """Where each rank's part starts: wherever the driver put it."""
    return window.addresses


def tensor_of(window: CudaWindow, rank: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
    """Bytes of a rank's part."""
    return window.tensor(rank, offset_bytes, nbytes)


def new_program(fabric: Fabric) -> Program:
    """An empty program: stream operations."""
    return Program()


def is_busy(queue: Queue) -> bool:
    """Whether the stream holds work."""
    return queue.is_busy()


def join(queue: Queue) -> None:
    """The caller's stream goes on after all that was submitted; an edge of the graph in a capture."""
    queue.join()


def stream_barrier(fabric: Fabric, timeout_s: float | None) -> None:
    """A kernel on the caller's stream; what it finds late goes into the fault record."""
    fabric.stream_barrier(timeout_s)


def check(fabric: Fabric) -> None:
    """Raise what kernels of this rank have left in the fault record."""
    fabric.check()
