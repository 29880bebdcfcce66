"""Windows on torch's symmetric memory: allocated by torch, exchanged over our own sockets, mapped by torch.

  1. Each rank allocates its part, zeroes it, and tells the peers that it has (Communicator.alloc).
  2. All enter torch's rendezvous together. It exchanges small records through a "store" and descriptors
     through a datagram socket named after the process, then maps every peer's memory.
  3. Every rank checks what it got: all parts there, no multicast, 256-byte alignment.

Three things about torch's rendezvous are worked around here:
  * Its keys in the store count the rendezvous of the whole process, so ranks that have made a different
    number of windows in other groups would wait for each other's keys for ever. `MeshStore` has no keys:
    what is set is exchanged with the peers at once, with our deadlines, and a dead peer is named.
  * Its socket allows one rendezvous at a time in a process. `_turn` takes the process's turn in the order
    of the ranks' process ids, which is the same order for every group, so no two groups can wait for each
    other.
  * torch's `empty` may hand out a piece of a pool, whose offset the peers' addresses then lack. Here every
    window is an allocation of its own.

NVLink multicast is never used: it is switched off before the first rendezvous, and a window that has it all
the same is refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mori_shmem import descriptors
from mori_shmem.core import core_error
from mori_shmem.deadline import Deadline
from mori_shmem.errors import MoriError, PeerTimeout, TransportInert

if TYPE_CHECKING:
    import torch

    from mori_shmem.mesh import Mesh

ALIGNMENT = 256
NO_MULTICAST = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
_one_rendezvous = threading.Lock()
_abandoned: list[
    object
] = []  # windows that stuck work may still touch: freeing them would wait for that work


class Group:
    """The name under which torch knows the ranks of one communicator."""

    def __init__(self, mesh: Mesh, name: str, deadline: Deadline) -> None:
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory
        from torch.distributed import ProcessGroup

        self.name = name
        self.mesh = mesh
        self.store = _mesh_store(mesh)
        # torch up to 2.10 or so asks the first for rank, size and store, later versions the second.
        _SymmetricMemory.set_group_info(name, mesh.rank, mesh.world_size, self.store)
        self._torch_group = ProcessGroup(self.store, mesh.rank, mesh.world_size)
        _register_process_group(name, self._torch_group)  # type: ignore[arg-type]
        self._pids = [message.value for message in mesh.exchange("group", os.getpid(), deadline)]

    def rendezvous(self, tensor: torch.Tensor, deadline: Deadline) -> Any:
        """torch's handle of everybody's parts. Collective."""
        from torch._C._distributed_c10d import _SymmetricMemory

        with _turn(self.mesh, self._pids, deadline):
            self.store.deadline = deadline
            try:
                return _SymmetricMemory.rendezvous(tensor, self.name)
            except MoriError:
                raise
            except RuntimeError as error:
                raise core_error(
                    "system", call="torch's rendezvous", error=str(error), errno=descriptors.shortage()
                ) from error

    def close(self) -> None:
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self.name)  # type: ignore[arg-type]


def _mesh_store(mesh: Mesh) -> Any:
    """A torch store for one kind of use: every rank sets its own key, then gets everybody's."""
    from torch.distributed import Store  # type: ignore[attr-defined]

    class MeshStore(Store):
        deadline = Deadline(30.0)

        def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
            messages = mesh.exchange("rendezvous of symmetric memory", value, self.deadline)
            self._values = [message.value for message in messages]

        def get(self, key: str) -> bytes:
            return bytes(self._values[int(key.rsplit("/", 1)[1])])  # keys end in the rank

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            """What was set is here already."""

        def check(self, keys: list[str]) -> bool:
            return True

    return MeshStore()


@contextlib.contextmanager
def _turn(mesh: Mesh, pids: list[int], deadline: Deadline) -> Iterator[None]:
    """Collective: every process's turn is taken, the lowest process id first; given back at the end."""
    held = False
    try:
        for pid in sorted(set(pids)):
            if pid == os.getpid():
                held = _one_rendezvous.acquire(timeout=max(deadline.left_s(), 0.001))
            ready = [m.value for m in mesh.exchange("turn", held or pid != os.getpid(), deadline)]
            if not all(ready):
                raise PeerTimeout(
                    f"rank {mesh.rank}: rank {ready.index(False)} is in another rendezvous and was not done "
                    f"with it within {deadline}",
                    rank=mesh.rank,
                    peers=[ready.index(False)],
                )
        yield
    finally:
        if held:
            _one_rendezvous.release()


class Part:
    """This rank's part of a window to be. Nothing of it goes over our sockets but that it is there."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch
        from torch._C._distributed_c10d import _SymmetricMemory

        self.fds: list[int] = []
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        try:
            memory = _SymmetricMemory.empty_strided_p2p([rounded], [1], torch.uint8, device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise core_error(
                "system", call="torch's allocation of symmetric memory", error=str(error)
            ) from error
        memory.zero_()
        torch.cuda.current_stream(device).synchronize()
        self.tensor: torch.Tensor | None = memory

    def close(self) -> None:
        self.tensor = None


class CudaWindow:
    """All ranks' parts of one window in this process: rank r's part lies at addresses[r]."""

    def __init__(self, memory: torch.Tensor, handle: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self.rank, self.world_size = handle.rank, handle.world_size
        self.addresses = tuple(int(pointer) for pointer in handle.buffer_ptrs)
        self.base, self.stride = memory.data_ptr(), 0
        self.table = int(handle.buffer_ptrs_dev)
        self._memory, self._handle = memory, handle
        self._peers: dict[int, torch.Tensor] = {}
        self.closed = False
        self._check()

    def _check(self) -> None:
        if self.addresses[self.rank] != self.base:
            raise core_error(
                "system", call="torch's rendezvous",
                error=f"my part is at {self.base:#x}, torch's table says {self.addresses[self.rank]:#x}",
            )  # fmt: skip
        if any(address % ALIGNMENT for address in self.addresses):
            raise core_error("misaligned", what="a part", address=self.base, alignment=ALIGNMENT)
        if self._handle.multicast_ptr:
            raise TransportInert(
                f"torch gave this window multicast although {'='.join(NO_MULTICAST)} was set"
            )

    def tensor(self, rank: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """Bytes of a rank's part; the mapping lives as long as the tensor."""
        return self._part(rank)[offset_bytes : offset_bytes + nbytes]

    def _part(self, rank: int) -> torch.Tensor:
        if rank == self.rank:
            return self._memory
        part = self._peers.get(rank)
        if part is None:
            import torch

            part = self._handle.get_buffer(rank, [self._memory.numel()], torch.uint8)
            # The mapping goes with torch's handle; a storage keeps its Python attributes as long as it lives.
            part.untyped_storage().mori_keeps = self._handle
            self._peers[rank] = part
        return part

    def close(self) -> None:
        """No more work may be started on it. Unmapped with the last tensor."""
        if not self.closed:
            self.closed = True
            self._peers.clear()
            del self._memory, self._handle

    def abandon(self) -> None:
        """Stuck work may still touch it, and freeing it would wait for that work: keep it till the process
        ends."""
        if not self.closed:
            _abandoned.append((self._memory, self._handle))
