"""alias.py bare|fenced: one memory at two addresses, stored to by one, read by the other. For `mori-sim run`.

A workgroup stores and raises a flag; a workgroup of another XCD waits for the flag and reads what was stored
by the second address. Without a write-back (bare) that is a broken rule, as it is by the first address.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from ctypes import byref, c_size_t, c_uint64, c_void_p

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev
import mori_sim
import torch

MIB, FENCED = 1 << 20, sys.argv[1] == "fenced"


@flyc.kernel
def hand_over(first: fx.Int64, second: fx.Int64, flag: fx.Int64, record: fx.Int64, out: fx.Int64):
    offset = fx.Int64(fx.thread_idx.x) * 16
    if fx.block_idx.x == 0:
        dev.store16(first + offset, fx.Vector.filled(4, 7, fx.Int32))
        dev.wait_stores()
        if fx.const_expr(FENCED):
            dev.release_fence("agent")
        dev.store_system(flag, 1)
    else:
        dev.wait_at_least(flag, 1, record, 1, 0, dev.deadline_after(2_000_000_000))
        dev.store16(out + offset, dev.load16(second + offset))


@flyc.jit
def launch(
    first: fx.Int64, second: fx.Int64, flag: fx.Int64, record: fx.Int64, out: fx.Int64,
    stream: fx.Stream = fx.Stream(None),
):  # fmt: skip
    hand_over(first, second, flag, record, out).launch(grid=(2, 1, 1), block=(64, 1, 1), stream=stream)


def mapped_twice() -> list[int]:
    """The second mapping is of a handle that was had back from the first."""
    hip, places, handle = ctypes.CDLL("libamdhip64.so.7"), [], c_void_p()
    wanted = struct.pack("<iiiiQBBHi", 1, 1, 1, 0, 0, 0, 0, 0, 0)
    assert hip.hipMemCreate(byref(handle), c_size_t(2 * MIB), wanted, c_uint64(0)) == 0
    for _ in range(2):
        place = c_void_p()
        assert hip.hipMemAddressReserve(byref(place), c_size_t(2 * MIB), 0, None, c_uint64(0)) == 0
        assert hip.hipMemMap(place, c_size_t(2 * MIB), c_size_t(0), handle, c_uint64(0)) == 0
        assert hip.hipMemSetAccess(place, c_size_t(2 * MIB), struct.pack("<iii", 1, 0, 3), c_size_t(1)) == 0
        assert hip.hipMemRetainAllocationHandle(byref(handle), place) == 0
        places.append(place.value or 0)
    return places


def main() -> None:
    first, second = mapped_twice()
    flag, record = (mori_sim.zeros(8, dtype=torch.int64, uncached=True) for _ in range(2))
    out = mori_sim.zeros(256, dtype=torch.int32)
    launch(first, second, flag.data_ptr(), record.data_ptr(), out.data_ptr())
    mori_sim.synchronize()
    print("ok", "read" if out.tolist() == [7] * 256 else "other")


if __name__ == "__main__":
    main()
