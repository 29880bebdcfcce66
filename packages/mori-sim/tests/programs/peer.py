"""Kernels that talk: push rows to peers and signal, wait for signals, and post SDMA packets from one lane.

push    a workgroup for each (peer, row): every wave stores its share and releases it, the workgroup meets,
        and one lane then adds to, or sets, the peer's flag of this rank
await   a lane for each sender polls its flag and acquires once it is there
post    COPY_LINEAR and ATOMIC appended to a ring, then the write pointer and the doorbell, each a release
        store
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from device import ORDER, high, low, pointer

ITEMS = 256


def pusher(row_bytes, adds):
    pieces = row_bytes // 16

    @flyc.kernel
    def push_rows(
        x: fx.Int64, slots: fx.Int64, flags: fx.Int64, rank: fx.Int32, slot_bytes: fx.Int64, value: fx.Int32
    ):
        peer, row, item = fx.block_idx.x, fx.block_idx.y, fx.thread_idx.x
        slot = fx.generic_load(pointer(fx.Int64, slots, 8) + peer) + fx.Int64(rank) * slot_bytes
        source = pointer(fx.Int32, x + fx.Int64(row) * row_bytes, 16)
        target = pointer(fx.Int32, slot + fx.Int64(row) * row_bytes, 16)
        for i in range(item, pieces, ITEMS):
            fx.generic_store(target + 4 * i, fx.generic_load(source + 4 * i, count=4), nontemporal=True)
        fx.memory_fence(ordering=ORDER.Release)  # by every wave: the meeting below waits for no store
        fx.barrier()
        if item == 0:
            flag = pointer(fx.Int32, fx.generic_load(pointer(fx.Int64, flags, 8) + peer), 4) + rank
            if fx.const_expr(adds):
                fx.atomic_add(flag, value, ordering=ORDER.Release)
            else:
                fx.generic_store(flag, value, memory_order=ORDER.Release)

    @flyc.jit
    def launch(
        x: fx.Int64,
        slots: fx.Int64,
        flags: fx.Int64,
        rank: fx.Int32,
        slot_bytes: fx.Int64,
        value: fx.Int32,
        peers: fx.Int32,
        rows: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):
        push_rows(x, slots, flags, rank, slot_bytes, value).launch(
            grid=(peers, rows, 1), block=(ITEMS, 1, 1), stream=stream
        )

    return launch


def awaiter(senders):
    @flyc.kernel
    def await_flags(flags: fx.Int64, at_least: fx.Int32, seen: fx.Int64):
        lane = fx.thread_idx.x
        if lane < senders:
            flag = pointer(fx.Int32, flags, 4) + lane
            value = fx.generic_load(flag, memory_order=ORDER.Monotonic)
            while value < at_least:
                fx.rocdl.s_sleep(2)
                value = fx.generic_load(flag, memory_order=ORDER.Monotonic)
            fx.memory_fence(ordering=ORDER.Acquire)
            fx.generic_store(pointer(fx.Int32, seen, 4) + lane, value)

    @flyc.jit
    def launch(flags: fx.Int64, at_least: fx.Int32, seen: fx.Int64, stream: fx.Stream = fx.Stream(None)):
        await_flags(flags, at_least, seen).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


def poster(ring_bytes):
    def append(ring, at, dwords):
        for i, dword in enumerate(dwords):
            slot = low((at + 4 * i) & (ring_bytes - 1)) // 4
            fx.generic_store(pointer(fx.Int32, ring, 4) + slot, dword)
        return at + 4 * len(dwords)

    @flyc.kernel
    def post_put(
        ring: fx.Int64,
        wptr: fx.Int64,
        doorbell: fx.Int64,
        source: fx.Int64,
        target: fx.Int64,
        nbytes: fx.Int32,
        signal: fx.Int64,
    ):
        if fx.thread_idx.x == 0:
            zero = fx.Int32(0)
            at = fx.generic_load(pointer(fx.Int64, wptr, 8), memory_order=ORDER.Monotonic)
            at = append(
                ring,
                at,
                [fx.Int32(1), nbytes - 1, zero, low(source), high(source), low(target), high(target), zero],
            )
            at = append(
                ring,
                at,
                [fx.Int32(10 | 47 << 25), low(signal), high(signal), fx.Int32(1), zero, zero, zero, zero],
            )
            fx.generic_store(pointer(fx.Int64, wptr, 8), at, memory_order=ORDER.Release)
            fx.generic_store(pointer(fx.Int64, doorbell, 8), at, memory_order=ORDER.Release)

    @flyc.jit
    def launch(
        ring: fx.Int64,
        wptr: fx.Int64,
        doorbell: fx.Int64,
        source: fx.Int64,
        target: fx.Int64,
        nbytes: fx.Int32,
        signal: fx.Int64,
        stream: fx.Stream = fx.Stream(None),
    ):
        post_put(ring, wptr, doorbell, source, target, nbytes, signal).launch(
            grid=(1, 1, 1), block=(64, 1, 1), stream=stream
        )

    return launch
