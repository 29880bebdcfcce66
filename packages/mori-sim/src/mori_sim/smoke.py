"""A proof that an installed package works, without FlyDSL: `mori-sim run -- python -m mori_sim.smoke`.

Two devices, memory on both, and one SDMA queue that copies from one to the other and then sets a flag.
"""

import ctypes
import struct
import time
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

DEADLINE_S = 20


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise SystemExit(f"{name} failed with {code}")


def main() -> None:
    hip, kmt = ctypes.CDLL("libamdhip64.so.7"), ctypes.CDLL("libhsakmt.so.1")
    source, target, flag, ring = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    call(hip, "hipMalloc", byref(source), c_size_t(4096))
    call(hip, "hipExtMallocWithFlags", byref(flag), c_size_t(64), c_uint32(3))
    call(hip, "hipMalloc", byref(ring), c_size_t(4096))
    call(hip, "hipDeviceEnablePeerAccess", c_int(1), c_uint32(0))
    call(hip, "hipSetDevice", c_int(1))
    call(hip, "hipMalloc", byref(target), c_size_t(4096))
    call(hip, "hipMemset", flag, c_int(0), c_size_t(64))
    call(hip, "hipMemset", source, c_int(0x5A), c_size_t(4096))
    call(kmt, "hsaKmtOpenKFD")
    queue = (c_uint64 * 5)()  # id, doorbell, write pointer, read pointer, error
    call(
        kmt,
        "hsaKmtCreateQueueExt",
        c_uint32(1),
        c_int(6),
        c_uint32(100),
        c_int(3),
        c_uint32(2),
        ring,
        c_uint64(4096),
        None,
        byref(queue),
    )
    copy_and_fence = struct.pack("<7I", 1, 4095, 0, *halves(source), *halves(target))
    copy_and_fence += struct.pack("<4I", 5, *halves(flag), 1)
    ctypes.memmove(ring, copy_and_fence, len(copy_and_fence))
    for pointer in (queue[2], queue[1]):
        c_uint64.from_address(pointer).value = len(copy_and_fence)
    end = time.monotonic() + DEADLINE_S
    while c_uint32.from_address(flag.value or 0).value != 1:
        if time.monotonic() > end:
            raise SystemExit("the copy engine did not answer")
    if ctypes.string_at(target, 4096) != b"\x5a" * 4096:
        raise SystemExit("the copy engine copied wrong bytes")
    print("mori-sim works: two devices, one SDMA queue, 4096 bytes moved")


def halves(address: c_void_p) -> tuple[int, int]:
    value = address.value or 0
    return value & 0xFFFFFFFF, value >> 32


if __name__ == "__main__":
    main()
