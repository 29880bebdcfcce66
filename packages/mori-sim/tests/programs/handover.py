"""A kernel and a copy engine hand data to each other, rightly, or with one step of the protocol left out.

    handover.py NAME ...     each NAME is one of STEPS, or `right`; the first runs on device 0, and so on

One wave fills `source` with plain stores, posts COPY and ATOMIC, waits for the signal, reads `target`, of
which it had an old copy in its cache, and fills `source` again. STEPS names what is left out: the release
before the doorbell (the engine then reads bytes that are still dirty in an L2), the acquire behind the wait
(the wave then reads its old copy), or the wait itself (the copy may then take the second filling).
"""

import sys
import time

import flydsl.compiler as flyc
import flydsl.expr as fx
import hip
import mori_sim
import torch
from device import ORDER, high, low, pointer

LANES, NBYTES = 64, 64 * 16
STEPS = ("release", "acquire", "wait")


def handover(left_out):
    @flyc.kernel
    def hand_over(
        source: fx.Int64,
        target: fx.Int64,
        ring: fx.Int64,
        wptr: fx.Int64,
        doorbell: fx.Int64,
        signal: fx.Int64,
        out: fx.Int64,
    ):
        lane = fx.thread_idx.x
        mine = pointer(fx.Int32, target, 16) + lane * 4
        old = fx.generic_load(mine, count=4)
        fx.generic_store(pointer(fx.Int32, source, 16) + lane * 4, fx.Vector.filled(4, 7, fx.Int32) + old)
        if fx.const_expr(left_out != "release"):
            fx.memory_fence(ordering=ORDER.Release)
        zero = fx.Int32(0)
        copy = [
            fx.Int32(1),
            fx.Int32(NBYTES - 1),
            zero,
            low(source),
            high(source),
            low(target),
            high(target),
            zero,
        ]
        add = [fx.Int32(10 | 47 << 25), low(signal), high(signal), fx.Int32(1), zero, zero, zero, zero]
        if lane == 0:
            for i, dword in enumerate(copy + add):
                fx.generic_store(pointer(fx.Int32, ring, 4) + i, dword)
            fx.rocdl.s_waitcnt(vmcnt=0)
            fx.generic_store(pointer(fx.Int64, wptr, 8), fx.Int64(64), memory_order=ORDER.Monotonic)
            fx.rocdl.s_waitcnt(vmcnt=0)
            fx.generic_store(pointer(fx.Int64, doorbell, 8), fx.Int64(64), memory_order=ORDER.Monotonic)
        if fx.const_expr(left_out != "wait"):
            seen = fx.generic_load(pointer(fx.Int32, signal, 4), memory_order=ORDER.Monotonic)
            while seen < 1:
                fx.rocdl.s_sleep(1)
                seen = fx.generic_load(pointer(fx.Int32, signal, 4), memory_order=ORDER.Monotonic)
        if fx.const_expr(left_out != "acquire"):
            fx.memory_fence(ordering=ORDER.Acquire)
        fx.generic_store(pointer(fx.Int32, out, 16) + lane * 4, fx.generic_load(mine, count=4))
        fx.generic_store(pointer(fx.Int32, source, 16) + lane * 4, fx.Vector.filled(4, 9, fx.Int32))

    @flyc.jit
    def launch(
        source: fx.Int64,
        target: fx.Int64,
        ring: fx.Int64,
        wptr: fx.Int64,
        doorbell: fx.Int64,
        signal: fx.Int64,
        out: fx.Int64,
        stream: fx.Stream = fx.Stream(None),
    ):
        hand_over(source, target, ring, wptr, doorbell, signal, out).launch(
            grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream
        )

    return launch


def run(left_out, device):
    hip.call("hipSetDevice", device)
    queue = hip.SdmaQueue(device, 2)
    words = [hip.ctypes.cast(w, hip.c_void_p).value for w in (queue.resource.wptr, queue.resource.doorbell)]
    source, target, out = (mori_sim.zeros(NBYTES // 4, dtype=torch.int32, device=device) for _ in range(3))
    signal = mori_sim.zeros(1, dtype=torch.int64, device=device, uncached=True)
    launch = handover(left_out)
    launch(
        source.data_ptr(), target.data_ptr(), queue.ring, *words, signal.data_ptr(), out.data_ptr(), stream=0
    )
    mori_sim.synchronize()
    while signal.item() == 0:
        time.sleep(0.001)
    right = (out == 7).all() and (target == 7).all()
    print(f"{'ok' if right else 'wrong data'} {left_out}", flush=True)
    queue.close()


if __name__ == "__main__":
    hip.open_kmt()
    for place, name in enumerate(sys.argv[1:]):
        run(name, place)
