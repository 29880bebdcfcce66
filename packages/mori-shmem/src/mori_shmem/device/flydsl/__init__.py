"""Device helpers for FlyDSL kernels on gfx950: memory in scopes, peers' memory, signals, copy queues.

    import mori_shmem.device.flydsl as dev

    @flyc.kernel
    def exchange(base: fx.Int64, stride: fx.Int64, rank: fx.Int32, queues: fx.Int64, record: fx.Int64,
                 timeout_ticks: fx.Int64, ...):
        window = dev.window(base, stride, rank)              # win.handle.base, .stride, .rank
        there = dev.peer_address(window, peer, offset_bytes)
        queue = dev.open_queue(dev.queue_address(queues, peer))   # comm.core.device_queues().table
        dev.put(queue, there, source, nbytes, signal=(dev.peer_address(window, peer, flag), 1))
        came = dev.wait_at_least(dev.my_address(window, flag), 1, record, what, peer,
                                 dev.deadline_after(timeout_ticks))

Addresses are fx.Int64, sizes fx.Int64 or Python ints. Nothing outside of this folder holds a packet's dwords
or a cache bit. It imports flydsl, and needs no GPU to be imported.

memory.py  what is stored and loaded, and for whom
    pointer(dtype, address, alignment)              for everything below fx itself
    load16(address)  store16(address, vector)       16 bytes as a Vector of four Int32, cached
    store16_through(address, vector)                past all caches: visible to engines and peers after
                                                    wait_stores(); needs no release_fence
    load16_fresh(*addresses)                        past all caches; one Vector for each address, one wait
    load_system, load_agent (address, dtype=Int64)  a flag's value. agent: only kernels of this GPU store it
    store_system, store_agent (address, value)      after nothing: put a release_fence or wait_stores before
    store_release_system, store_release_agent       after all that this wave has stored
    add_agent, add_system (address, value) -> old   order nothing
    release_fence(scope), acquire_fence(scope)      "agent" or "system"
    wait_stores()                                   until what this wave stored has arrived where it goes

window.py
    window(base, stride, rank)  peer_address(window, peer, offset_bytes)  my_address(window, offset_bytes)

waits.py   flags only grow; a wait ends at its deadline
    clock()  deadline_after(timeout_ticks)          mori_shmem.device.queue_words.ticks(seconds) on the host
    wait_at_least(address, value, record, what, peer, deadline, index=0, scope="system") -> Boolean
                                                    true: it came, and what was stored before it is visible
                                                    to the lanes that called. false: late; the record says so
    has_failed(record)                              an earlier wait of this rank was late

queue.py   COPY and ATOMIC packets to the copy engine, in order, from any number of waves
    open_queue(address) -> Queue                    loads what does not change: once per kernel
    put(queue, dst, src, nbytes, signal=None)       signal: (address, value): value is added to the 64-bit
                                                    word after the bytes have landed, here or at a peer
    signal(queue, address, value)                   the addition alone, after all earlier puts of the queue
    quiet(queue) -> Boolean                         all earlier puts have landed, visible to who called
    put_lanes(queue, dst, src, nbytes, signal=None) one put for each active lane, one signal behind them
    start = reserve(queue, num_packets)             several packets with one doorbell: fill exactly as many
    at = write_copy(queue, at, dst, src, nbytes)    as were reserved, beginning at start; nbytes at most
    at = write_add(queue, at, address, value)       COPY_BYTES. start < 0: the queue is stuck, leave it
    commit(queue, start, at)
    is_first_lane()                                 of the active lanes of this wave
    lock_queue(queue) -> Boolean, unlock_queue(queue)

barrier.py
    all_ranks_meet(window, words, count, record, what, deadline, world_size) -> Boolean
                                                    one wave of each rank; `words`: offset of a row of words

put, signal, quiet, reserve, commit: by one lane, or by lanes that have a queue each. Lanes that share a queue
take put_lanes, or `if is_first_lane():`; else they would wait for each other for ever.
A wait is the business of the lanes that call it. Where one lane waits (or is quiet) for others, fx.barrier()
belongs behind it, in a workgroup of one wave as well: the compiler may run the other lanes first.
No more packets at a time than the ring holds, less one: MORI_SHMEM_RING_BYTES / 32 - 1 (8191 unless set).
What a put copies must have left the caches first: every wave `wait_stores()`, fx.barrier(), then one wave
`release_fence("system")`; or store16_through and wait_stores().
"""

from mori_shmem.device.flydsl.barrier import all_ranks_meet
from mori_shmem.device.flydsl.memory import (
    acquire_fence,
    add_agent,
    add_system,
    load16,
    load16_fresh,
    load_agent,
    load_system,
    pointer,
    release_fence,
    store16,
    store16_through,
    store_agent,
    store_release_agent,
    store_release_system,
    store_system,
    wait_stores,
)
from mori_shmem.device.flydsl.queue import (
    Queue,
    commit,
    is_first_lane,
    lock_queue,
    open_queue,
    put,
    put_lanes,
    quiet,
    reserve,
    signal,
    unlock_queue,
    write_add,
    write_copy,
)
from mori_shmem.device.flydsl.waits import clock, deadline_after, has_failed, wait_at_least
from mori_shmem.device.flydsl.window import Window, my_address, peer_address, window
from mori_shmem.device.queue_words import COPY_BYTES, queue_address

__all__ = [
    "COPY_BYTES",
    "Queue",
    "Window",
    "acquire_fence",
    "add_agent",
    "add_system",
    "all_ranks_meet",
    "clock",
    "commit",
    "deadline_after",
    "has_failed",
    "is_first_lane",
    "load16",
    "load16_fresh",
    "load_agent",
    "load_system",
    "lock_queue",
    "my_address",
    "open_queue",
    "peer_address",
    "pointer",
    "put",
    "put_lanes",
    "queue_address",
    "quiet",
    "release_fence",
    "reserve",
    "signal",
    "store16",
    "store16_through",
    "store_agent",
    "store_release_agent",
    "store_release_system",
    "store_system",
    "unlock_queue",
    "wait_at_least",
    "wait_stores",
    "window",
    "write_add",
    "write_copy",
]
