"""The vendor libraries through ctypes, as a C program would call them; a code other than 0 raises."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

UNCACHED = 0x40000000
PINNED = 1
GRANULE = 2 << 20


class HipError(RuntimeError):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {code} {library.hipGetErrorName(code).decode()}")
        self.code = code


library = ctypes.CDLL("libamdhip64.so.7")
library.hipGetErrorName.restype = ctypes.c_char_p


def call(name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise HipError(name, code)


def code_of(name: str, *arguments: Any) -> int:
    return int(getattr(library, name)(*arguments))


def malloc(nbytes: int, uncached: bool = False) -> int:
    out = c_void_p()
    call("hipExtMallocWithFlags", byref(out), c_size_t(nbytes), c_uint32(3 if uncached else 0))
    return out.value or 0


def free(address: int) -> None:
    call("hipFree", c_void_p(address))


def view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def stream() -> c_void_p:
    out = c_void_p()
    call("hipStreamCreateWithFlags", byref(out), c_uint32(1))
    return out


def event() -> c_void_p:
    out = c_void_p()
    call("hipEventCreateWithFlags", byref(out), c_uint32(0))
    return out


class Window:
    """VMM: one reservation with `ranks` slots of nbytes; my slot is mine, the others are imported."""

    def __init__(self, nbytes: int, rank: int, ranks: int, device: int, uncached: bool) -> None:
        self.nbytes, self.rank, self.ranks, self.device = nbytes, rank, ranks, device
        flat = c_void_p()
        call(
            "hipMemAddressReserve",
            byref(flat),
            c_size_t(nbytes * ranks),
            c_size_t(GRANULE),
            None,
            c_uint64(0),
        )
        self.base = flat.value or 0
        kind = UNCACHED if uncached else PINNED
        properties = struct.pack("<iiiiQBBHi", kind, 1, 1, device, 0, 0, 0, 0, 0)
        self.handles = [c_void_p() for _ in range(ranks)]
        call("hipMemCreate", byref(self.handles[rank]), c_size_t(nbytes), properties, c_uint64(0))
        self.map(rank)

    def at(self, rank: int, offset: int = 0) -> int:
        return self.base + rank * self.nbytes + offset

    def map(self, rank: int) -> None:
        call(
            "hipMemMap",
            c_void_p(self.at(rank)),
            c_size_t(self.nbytes),
            c_size_t(0),
            self.handles[rank],
            c_uint64(0),
        )
        access = struct.pack("<iii", 1, self.device, 3)
        call("hipMemSetAccess", c_void_p(self.at(rank)), c_size_t(self.nbytes), access, c_size_t(1))

    def export(self) -> int:
        fd = c_int(-1)
        call("hipMemExportToShareableHandle", byref(fd), self.handles[self.rank], c_int(1), c_uint64(0))
        return fd.value

    def bring_in(self, rank: int, fd: int) -> None:
        call("hipMemImportFromShareableHandle", byref(self.handles[rank]), c_void_p(fd), c_int(1))
        self.map(rank)

    def close(self) -> None:
        for rank, handle in enumerate(self.handles):
            if handle:
                call("hipMemUnmap", c_void_p(self.at(rank)), c_size_t(self.nbytes))
                call("hipMemRelease", handle)
        call("hipMemAddressFree", c_void_p(self.base), c_size_t(self.nbytes * self.ranks))


class KernelModule:
    def __init__(self, image: bytes | Path) -> None:
        self.handle = c_void_p()
        if isinstance(image, Path):
            call("hipModuleLoad", byref(self.handle), str(image).encode())
        else:
            call("hipModuleLoadData", byref(self.handle), image)

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: int,
        *arguments: Any,
        queue: Any = None,
        lds: int = 0,
    ) -> None:
        """`arguments` are ctypes values, one for each explicit argument."""
        function = c_void_p()
        call("hipModuleGetFunction", byref(function), self.handle, name.encode())
        pointers = (c_void_p * max(1, len(arguments)))(*[ctypes.addressof(a) for a in arguments])
        call("hipModuleLaunchKernel", function, *grid, block, 1, 1, lds, queue, pointers, None)


def synchronize() -> None:
    call("hipDeviceSynchronize")


class _QueueResource(ctypes.Structure):
    _fields_ = [
        ("id", c_uint64),
        ("doorbell", POINTER(c_uint64)),
        ("wptr", POINTER(c_uint64)),
        ("rptr", POINTER(c_uint64)),
        ("error", c_void_p),
    ]


class KmtError(RuntimeError):
    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call}: status {status}")
        self.status = status


def kmt_call(name: str, *arguments: Any) -> None:
    status = getattr(kmt, name)(*arguments)
    if status != 0:
        raise KmtError(name, status)


kmt = ctypes.CDLL("libhsakmt.so.1")


def open_kmt() -> None:
    if kmt.hsaKmtOpenKFD() not in (0, 22):
        raise KmtError("hsaKmtOpenKFD", 1)


def recommended_engines(device: int, peer: int, devices: int) -> int:
    """The mask of the link from one device to another."""
    links = (c_uint32 * (13 * devices))()
    kmt_call("hsaKmtGetNodeIoLinkProperties", c_uint32(device + 1), c_uint32(devices), links)
    for i in range(devices):
        if links[13 * i + 4] == peer + 1:
            return links[13 * i + 11]
    raise LookupError(f"no link from device {device} to {peer}")


class SdmaQueue:
    """A user-mode queue written by the host: packets are lists of dwords; NOPs pad the ring's end."""

    FLAGS = 1 | 1 << 6 | 1 << 16 | 1 << 12 | 1 << 17

    def __init__(self, device: int, engine: int, nbytes: int = 4096, ring: int = 0) -> None:
        """`ring`: memory of ring_memory; it stays the caller's."""
        self.nbytes, self.owned = nbytes, not ring
        self.ring = ring or self.ring_memory(device, nbytes)
        self.resource = _QueueResource()
        kmt_call(
            "hsaKmtCreateQueueExt",
            c_uint32(device + 1),
            c_int(6),
            c_uint32(100),
            c_int(3),
            c_uint32(engine),
            c_void_p(self.ring),
            c_uint64(nbytes),
            None,
            byref(self.resource),
        )
        self.written = 0

    @classmethod
    def ring_memory(cls, device: int, nbytes: int = 4096) -> int:
        memory, nbytes = c_void_p(), max(nbytes, 4096)
        kmt_call(
            "hsaKmtAllocMemory", c_uint32(device + 1), c_uint64(nbytes), c_uint32(cls.FLAGS), byref(memory)
        )
        kmt_call("hsaKmtMapMemoryToGPU", memory, c_uint64(nbytes), byref(c_uint64()))
        return memory.value or 0

    @property
    def read(self) -> int:
        return self.resource.rptr[0]

    def post(self, *packets: list[int]) -> None:
        for packet in packets:
            room = self.nbytes - self.written % self.nbytes
            if room < 4 * len(packet):
                self.put([0] * (room // 4))
            self.put(packet)
        self.resource.wptr[0] = self.written
        self.resource.doorbell[0] = self.written

    def put(self, dwords: list[int]) -> None:
        while self.written + 4 * len(dwords) - self.read >= self.nbytes:
            pass
        ctypes.memmove(
            self.ring + self.written % self.nbytes, struct.pack(f"<{len(dwords)}I", *dwords), 4 * len(dwords)
        )
        self.written += 4 * len(dwords)

    def close(self) -> None:
        kmt_call("hsaKmtDestroyQueue", c_uint64(self.resource.id))
        if self.owned:
            free_ring(self.ring)


def free_ring(memory: int) -> None:
    kmt_call("hsaKmtFreeMemory", c_void_p(memory), c_uint64(0))


def halves(value: int) -> list[int]:
    return [value & 0xFFFFFFFF, value >> 32]


def copy_packet(to: int, source: int, nbytes: int) -> list[int]:
    return [1, nbytes - 1, 0, *halves(source), *halves(to)]


def add64_packet(where: int, value: int) -> list[int]:
    return [10 | 0x2F << 25, *halves(where), *halves(value), 0, 0, 0]


def fence_packet(where: int, value: int) -> list[int]:
    return [5, *halves(where), value]


def poll_packet(where: int, value: int) -> list[int]:
    return [8 | 5 << 28 | 1 << 31, *halves(where), value, 0xFFFFFFFF, 4 | 0xFFF << 16]
