"""imported.py RANKS: memory that "torch" has allocated as windows; prints `ok NAME`. For `mori-sim run`.

Torch's allocator is played by `Segment`: a reservation into which pieces of memory are mapped one after the
other, as expandable segments are. Tensors lie anywhere in it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any

import mori_shmem
import pytest
import torch
from mori_shmem import errors

MIB = 1 << 20
U8 = torch.uint8


def hip(call: str, *arguments: Any) -> None:
    """One call of the vendor's library, which ranks cannot be handed by value."""
    assert (code := getattr(ctypes.CDLL("libamdhip64.so.7"), call)(*arguments)) == 0, (call, code)


class Segment:
    """`pieces` of MiB in one range of addresses, on a device."""

    def __init__(self, device: int, pieces: tuple[int, ...], *, exportable: bool = True) -> None:
        self.nbytes, self.at, self.handles = sum(pieces) * MIB, c_void_p(), []
        hip("hipMemAddressReserve", byref(self.at), c_size_t(self.nbytes), 0, None, c_uint64(0))
        assert self.at.value
        place = self.at.value
        for mib in pieces:
            handle = c_void_p()
            wanted = struct.pack("<iiiiQBBHi", 1, int(exportable), 1, device, 0, 0, 0, 0, 0)
            hip("hipMemCreate", byref(handle), c_size_t(mib * MIB), wanted, c_uint64(0))
            hip("hipMemMap", c_void_p(place), c_size_t(mib * MIB), c_size_t(0), handle, c_uint64(0))
            self.handles.append((place, mib * MIB, handle))
            place += mib * MIB
        access = struct.pack("<iii", 1, device, 3)
        hip("hipMemSetAccess", self.at, c_size_t(self.nbytes), access, c_size_t(1))

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.at.value + offset), dtype=U8)

    def free(self) -> None:
        for place, nbytes, handle in self.handles:
            hip("hipMemUnmap", c_void_p(place), c_size_t(nbytes))
            hip("hipMemRelease", handle)
        hip("hipMemAddressFree", self.at, c_size_t(self.nbytes))


def device_of(comm: mori_shmem.Communicator) -> int:
    return int(comm.core.device.ordinal)


def refused(comm: mori_shmem.Communicator, tensor: Any, match: str) -> None:
    with pytest.raises(errors.LayoutError, match=match):
        comm.import_tensor(tensor)


def a_tensor_is_put_to_and_read_in_place(comm: mori_shmem.Communicator) -> None:
    """It lies across three pieces, and begins in another one of them on each rank."""
    to, source = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    segment = Segment(device_of(comm), (4, 2, 6) if comm.rank else (2, 4, 2, 4))
    mine = segment.tensor((4 - 2 * (comm.rank % 2)) * MIB + 512, 6 * MIB)
    mine.copy_((torch.arange(6 * MIB) * 7 + comm.rank) % 251)
    window, flags = comm.import_tensor(mine), comm.alloc(64, kind="signals")
    assert window.nbytes == 6 * MIB
    comm.barrier()
    there = window.peer(to).tensor(6 * MIB, U8)
    assert torch.equal(there, ((torch.arange(6 * MIB) * 7 + to) % 251).to(U8))
    comm.barrier()
    data = comm.alloc(2 * MIB)
    data.tensor(2 * MIB, U8).fill_(200 + comm.rank)
    comm.queue(to).put(window.at(3 * MIB + 8, to), data.at(0), 2 * MIB)
    comm.queue(to).signal(flags.at(0, to), 1)
    comm.wait(flags.at(0), 1, peer=source)
    assert bool((mine[3 * MIB + 8 : 5 * MIB + 8] == 200 + source).all())  # by torch's own address
    assert int(mine[3 * MIB + 7]) == ((3 * MIB + 7) * 7 + comm.rank) % 251
    with pytest.raises(errors.LayoutError, match="do not fit"):
        comm.queue(to).put(window.at(5 * MIB, to), data.at(0), 2 * MIB)
    comm.barrier()
    window.close()
    assert bool((mine[3 * MIB + 8 : 5 * MIB + 8] == 200 + source).all())  # the tensor is as it was
    comm.barrier()
    segment.free()


def kernels_use_both_addresses(comm: mori_shmem.Communicator) -> None:
    """A kernel stores by torch's address; an engine reads by the window's, and another kernel what came."""
    import kernels
    import mori_shmem.device.flydsl as dev
    from bed import Bed, pattern_of

    to, source = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    bed, segment = Bed(comm, dev), Segment(device_of(comm), (2, 2))
    mine = segment.tensor(0, 4 * MIB)
    window, flags = comm.import_tensor(mine), comm.alloc(64, kind="signals")
    for round_ in (1, 2, 3):
        bed.start(kernels.slow_pattern, round_)
        comm.queue(comm.rank).put(window.at(0), bed.data.at(comm.rank * kernels.SLOT), 1024)
        comm.queue(comm.rank).join()
        comm.queue(comm.rank).quiet()
        comm.queue(to).put(window.at(2 * MIB, to), window.at(0), 1024)
        comm.queue(to).signal(flags.at(0, to), round_)
        comm.wait(flags.at(0), round_, peer=source)
        assert torch.equal(mine[2 * MIB : 2 * MIB + 1024], pattern_of(source, source, round_, 1))
        comm.barrier()
    window.close()
    comm.barrier()


def what_cannot_be_imported_is_refused_everywhere(comm: mori_shmem.Communicator) -> None:
    device, last = device_of(comm), comm.world_size - 1
    segment = Segment(device, (4,))
    mine = segment.tensor(0, 2 * MIB)
    refused(comm, mine[: MIB + comm.rank * 512], "all must be of one size")
    refused(comm, mine[comm.rank * 512 :][:MIB], "begin .* in rank order")
    refused(comm, mine.view(1024, -1)[:, ::2] if comm.rank == last else mine[:MIB], "not contiguous")
    refused(comm, mine[:0] if comm.rank == last else mine[:MIB], "the tensor is empty")
    refused(comm, "a name" if comm.rank == last else mine[:MIB], f"rank {last}: str is no tensor")
    ordinary = comm.alloc(MIB).tensor(MIB, U8).clone()
    refused(comm, ordinary if comm.rank == last else mine[:MIB], f"rank {last}: it is not memory of a GPU")
    plain = c_void_p()
    hip("hipMalloc", byref(plain), c_size_t(MIB))
    unmapped = torch.frombuffer((ctypes.c_uint8 * MIB).from_address(plain.value or 0), dtype=U8)
    refused(comm, unmapped if comm.rank == last else mine[:MIB], "expandable_segments:True")
    elsewhere = Segment((device + 1) % comm.world_size, (2,)).tensor(0, MIB)
    refused(comm, elsewhere if comm.rank == last else mine[:MIB], f"rank {last}: it lies on device")
    closed = Segment(device, (2,), exportable=False).tensor(0, MIB)
    refused(comm, closed if comm.rank == last else mine[:MIB], "hipMemExportToShareableHandle")
    window = comm.import_tensor(mine)  # nothing was harmed
    comm.barrier()
    window.close()


def the_same_tensor_twice_and_memory_that_outlives_it(comm: mori_shmem.Communicator) -> None:
    to = (comm.rank + 1) % comm.world_size
    segment = Segment(device_of(comm), (2,))
    mine = segment.tensor(256, MIB)
    mine.fill_(comm.rank)
    first, second = comm.import_tensor(mine), comm.import_tensor(mine)
    assert first.handle.base != second.handle.base
    comm.barrier()
    if comm.rank == 0:
        first.peer(to).tensor(8, U8, 16).fill_(99)
    comm.barrier()
    if comm.rank == 1:
        assert second.tensor(8, U8, 16).tolist() == [99] * 8 == mine[16:24].tolist()
    first.close()
    assert int(second.peer(to).tensor(1, U8)) == to
    comm.barrier()
    del mine
    segment.free()  # the handles of the window hold the memory
    comm.barrier()
    assert int(second.peer(to).tensor(1, U8)) == to
    comm.barrier()
    second.close()
    with pytest.raises(errors.ClosedError):
        second.tensor(1, U8)


def descriptors_run_out(comm: mori_shmem.Communicator) -> None:
    """On the last rank: too few for the pieces of its own tensor, or for the peers' as well."""
    pieces = 12
    segment = Segment(device_of(comm), (2,) * pieces)
    mine = segment.tensor(0, 2 * pieces * MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for more, what in (
        (pieces // 2, "no file descriptor"),
        (pieces + 3, "descriptors of shared memory came"),
    ):
        held = os.listdir("/proc/self/fd")
        if comm.rank == comm.world_size - 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, held)) + more, hard))
        with pytest.raises(errors.DescriptorLimitError, match=f"{what}.*ulimit -n") as told:
            comm.import_tensor(mine)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert f"import_tensor failed on rank {comm.world_size - 1}" in str(told.value)
        assert len(os.listdir("/proc/self/fd")) == len(held)
    window = comm.import_tensor(mine)
    comm.barrier()
    window.close()
    comm.barrier()
    segment.free()


CHECKS = (
    a_tensor_is_put_to_and_read_in_place,
    kernels_use_both_addresses,
    what_cannot_be_imported_is_refused_everywhere,
    descriptors_run_out,
    the_same_tensor_twice_and_memory_that_outlives_it,
)


def checks() -> list[str]:
    with mori_shmem.init("rocm") as comm:
        for one in CHECKS:
            one(comm)
    return [one.__name__ for one in CHECKS]


if __name__ == "__main__":
    for name in mori_shmem.run_ranks(checks, int(sys.argv[1]))[0]:
        print("ok", name)
