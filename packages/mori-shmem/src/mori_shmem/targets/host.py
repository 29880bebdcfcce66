"""The host target: memory is memfd, copy engines are threads of the C++ core that execute SDMA packets.

The functions that every target offers:
    open_fabric(...)    collective: address space, control pages, engines
    device_of(fabric)   the torch device that windows of this communicator live on
    create_part(...)    this rank's part of a window; what the peers need of it are descriptors
    map_window(...)     collective: everybody's parts, as this process reaches them
    addresses_of(...)   where each rank's part lies
    tensor_of(...)      bytes of a part as a tensor, which keeps the mapping alive
    new_program(fabric) takes the steps of a put program
    is_busy(queue)      whether work is left in a queue
    join(queue)         what the caller does next comes after all that was submitted
    stream_barrier(...) all ranks meet, in the order of the caller's work
    check(fabric)       raise what kernels have found late
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mori_shmem import descriptors
from mori_shmem.core import native
from mori_shmem.deadline import Deadline
from mori_shmem.errors import TransportInert
from mori_shmem.mesh import Mesh
from mori_shmem.settings import Snapshot
from mori_shmem.variables import ENGINES, RING_BYTES, TIMEOUT_S

if TYPE_CHECKING:
    import torch


def open_fabric(mesh: Mesh, values: Snapshot, num_queues: int, deadline: Deadline) -> native.Fabric:
    """Exchange control pages and pidfds with the peers, then start the engines."""
    mine: list[int] = []
    theirs: list[list[int]] = []
    try:
        mine.append(native.create_memory(native.CONTROL_BYTES, "mori-control"))
        mine.append(os.pidfd_open(os.getpid()))
        messages = mesh.exchange("init", None, deadline, mine)
        theirs = [message.fds for message in messages]
        descriptors.check_all_came(f"rank {mesh.rank} of {mesh.world_size}, in init", messages)
        mesh.pidfds = {peer: os.dup(fds[1]) for peer, fds in enumerate(theirs) if peer != mesh.rank}
        return native.Fabric(
            mesh.rank,
            mesh.world_size,
            [fds[0] for fds in theirs],
            [fds[1] for fds in theirs],
            timeout_s=values[TIMEOUT_S],
            num_engines=values[ENGINES],
            queues_per_peer=num_queues,
            max_queues=num_queues * mesh.world_size,
            ring_bytes=values[RING_BYTES],
        )
    except native.CoreError as error:
        raise TransportInert(f"rank {mesh.rank}: the host transport cannot start: {error}") from error
    finally:
        for fd in [*mine, *(fd for fds in theirs for fd in fds)]:
            os.close(fd)


def device_of(fabric: native.Fabric) -> str:
    """Windows are ordinary memory, whatever the rank."""
    return "cpu"


class Part:
    """Zero-filled shared memory without a name; its descriptor is this rank's until `close`."""

    def __init__(self, nbytes: int) -> None:
        self.fds = [native.create_memory(nbytes, "mori-window")]

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def create_part(fabric: native.Fabric, nbytes: int, kind: str) -> Part:
    """This rank's part of a window, owned by the caller. One kind of memory serves all."""
    return Part(nbytes)


def map_window(
    fabric: native.Fabric, part: Part, fds: list[int], nbytes: int, deadline: Deadline
) -> native.Window:
    """All ranks' parts in this process; `fds` are everybody's descriptors in rank order."""
    return fabric.map_window(fds, nbytes)


def addresses_of(window: native.Window) -> tuple[int, ...]:
    """Where each rank's part starts: one stride after the other."""
    return tuple(window.base + rank * window.stride for rank in range(window.world_size))


def tensor_of(window: native.Window, rank: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
    """Bytes of a rank's part."""
    import torch

    return torch.frombuffer(window.span(rank, offset_bytes, nbytes), dtype=torch.uint8)


def new_program(fabric: native.Fabric) -> native.Program:
    """An empty program: packets."""
    return native.Program(fabric)


def is_busy(queue: native.Queue) -> bool:
    """Whether packets are left."""
    return queue.completed_bytes != queue.submitted_bytes


def join(queue: native.Queue) -> None:
    """The caller's next step is the next thing that this thread does."""
    queue.quiet()


def stream_barrier(fabric: native.Fabric, timeout_s: float | None) -> None:
    """The caller's work is done when its call returns."""
    fabric.barrier(timeout_s)


def check(fabric: native.Fabric) -> None:
    """There are no kernels."""
