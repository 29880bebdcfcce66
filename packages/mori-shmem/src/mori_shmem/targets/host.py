"""The host target: memory is memfd, copy engines are threads of the C++ core that execute SDMA packets.

The functions that every target offers:
    device_of(rank)     the torch device that windows of this target live on
    open_fabric(...)    collective: address space, control pages, engines
    create_memory(n)    a descriptor of this rank's part of a window
"""

from __future__ import annotations

import os

from mori_shmem.core import native
from mori_shmem.deadline import Deadline
from mori_shmem.mesh import Mesh
from mori_shmem.settings import Snapshot
from mori_shmem.variables import ENGINES, RING_BYTES, TIMEOUT_S


def device_of(rank: int) -> str:
    """Windows are ordinary memory, whatever the rank."""
    return "cpu"


def open_fabric(mesh: Mesh, values: Snapshot, num_queues: int, deadline: Deadline) -> native.Fabric:
    """Exchange control pages and pidfds with the peers, then start the engines."""
    mine = [native.create_memory(native.CONTROL_BYTES, "mori-control"), os.pidfd_open(os.getpid())]
    theirs: list[list[int]] = []
    try:
        theirs = [message.fds for message in mesh.exchange("init", None, deadline, mine)]
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
    finally:
        for fd in [*mine, *(fd for fds in theirs for fd in fds)]:
            os.close(fd)


def create_memory(nbytes: int) -> int:
    """A descriptor of zero-filled shared memory without a name, owned by the caller."""
    return native.create_memory(nbytes, "mori-window")
