"""Copy queues inside kernels: waves write SDMA packets into a ring and ring the engine's doorbell.

A put by one lane, in order (the words are those of queue_words.py):
  1. reserve: an atomic add to RESERVED gives the lane a piece of the ring that is its own. The piece may be
     filled once the engine has read what lay there one turn earlier: the read pointer is above the piece's
     end minus the ring's size. READ holds the newest value that anybody has seen; only when that is too old
     is the engine's own word read, which is slow.
  2. The packets are stored there. The ring is uncached memory: to have arrived is to be published.
  3. commit: wait for my turn (COMMITTED has reached my start: everybody before me has rung; by then my
     packets have arrived), store the write pointer, wait for that store, ring the doorbell, wait for that
     store, and only then pass the turn on. Without the last wait the next lane's doorbell could be
     overtaken by mine, and the engine would be told of less than it had been told before.
Every packet has 32 bytes (a COPY one dword of padding, an ATOMIC none, a FENCE four), and so none lies across
the ring's end. Positions are byte counts that never wrap.

A put's bytes have landed when its signal has arrived: an ATOMIC or FENCE is executed after the copies in
front of it. The read pointer does not say so: it moves when a packet was taken. That is why `quiet` sends a
FENCE that writes its own position (in packets, 32 bits, compared modulo 2^32) to DONE, and waits for that.

An engine that stands still ends in a ring that is full. Whoever finds no room, or not his turn, until the
queue's own timeout writes the fault record and gives up; the turn is not passed on, and the host closes the
queue. Nothing is overwritten and nothing half-written is rung.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from mori_shmem.device import queue_words as words
from mori_shmem.device.flydsl.memory import (
    acquire_fence,
    add_agent,
    load_agent,
    load_system,
    pointer,
    release_fence,
    store16,
    store_agent,
    store_system,
    wait_stores,
)
from mori_shmem.device.flydsl.waits import deadline_after, out_of_time, write_record

PACKET_BYTES, COPY_BYTES = words.PACKET_BYTES, words.COPY_BYTES
_COPY, _FENCE, _ATOMIC = 1, 5, 10
_ADD64 = 47 << 25


@dataclass(frozen=True)
class Queue:
    """What does not change, as DSL values."""

    words: Any
    ring: Any
    mask: Any
    rptr: Any
    wptr: Any
    doorbell: Any
    record: Any
    timeout_ticks: Any
    peer: Any


def open_queue(address):
    """The queue whose words lie at `address`."""

    def field(offset):
        return fx.generic_load(pointer(fx.Int64, address + offset, 8))

    return Queue(
        words=address,
        ring=field(words.RING),
        mask=field(words.RING_BYTES) - 1,
        rptr=field(words.RPTR),
        wptr=field(words.WPTR),
        doorbell=field(words.DOORBELL),
        record=field(words.RECORD),
        timeout_ticks=field(words.TIMEOUT),
        peer=fx.Int32(field(words.PEER)),
    )


# ---- what kernels call ----


@flyc.jit
def put(queue, dst, src, nbytes, signal=None):
    """Copy, then add to a signal. One lane; returns when the engine has been told."""
    num_copies = (fx.Int64(nbytes) + (COPY_BYTES - 1)) >> 29
    num_packets = num_copies if signal is None else num_copies + 1
    start = reserve(queue, num_packets)
    if start >= 0:
        at = start
        for i in range(fx.Int32(num_copies)):
            done = fx.Int64(i) * COPY_BYTES
            left = fx.Int64(nbytes) - done
            at = write_copy(
                queue, at, dst + done, src + done, left if left < COPY_BYTES else fx.Int64(COPY_BYTES)
            )
        if fx.const_expr(signal is not None):
            at = write_add(queue, at, *signal)
        commit(queue, start, at)


@flyc.jit
def signal(queue, address, value):
    """Add to a word after all that this queue was given before."""
    start = reserve(queue, 1)
    if start >= 0:
        commit(queue, start, write_add(queue, start, address, value))


@flyc.jit
def quiet(queue):
    """Wait until all that was committed before has landed; false if the engine stands still."""
    came = fx.Int32(0)
    start = reserve(queue, 1)
    if start >= 0:
        end = start + PACKET_BYTES
        target = fx.Int32(end >> 5)
        _write_packet(queue, start, _FENCE, *_halves(queue.words + words.DONE), target)
        commit(queue, start, end)
        behind = target - load_system(queue.words + words.DONE, fx.Int32)
        over, next_look = fx.Int32(0), fx.Int64(0)
        deadline = deadline_after(queue.timeout_ticks)
        while (behind > 0) & (over == 0):
            over, next_look = out_of_time(queue.record, deadline, next_look)
            fx.rocdl.s_sleep(1)
            behind = target - load_system(queue.words + words.DONE, fx.Int32)
        if behind > 0:
            write_record(queue.record, words.QUEUE_QUIET, queue.peer, 0, target - behind, target)
        came = fx.Int32(behind <= 0)
    acquire_fence("system")
    return came != 0


@flyc.jit
def put_lanes(queue, dst, src, nbytes, signal=None):
    """One copy for each active lane of the wave (1 to COPY_BYTES bytes), then one addition to a signal, with
    one doorbell. `queue` and `signal` are the same for all lanes."""
    before, count = _active_lanes()
    start = fx.Int64(0)
    if before == 0:
        start = reserve(queue, fx.Int64(count) if signal is None else fx.Int64(count) + 1)
    start = _of_first_lane(start)
    if start >= 0:
        write_copy(queue, start + fx.Int64(before) * PACKET_BYTES, dst, src, nbytes)
        if before == 0:
            end = start + fx.Int64(count) * PACKET_BYTES
            if fx.const_expr(signal is not None):
                end = write_add(queue, end, *signal)
            commit(queue, start, end)


# ---- several packets, one doorbell ----


@flyc.jit
def reserve(queue, num_packets):
    """Where `num_packets` packets may be written; negative if the engine did not make room in time."""
    nbytes = fx.Int64(num_packets) * PACKET_BYTES
    start = add_agent(queue.words + words.RESERVED, nbytes)
    must_pass = start + nbytes - (queue.mask + 1)
    read = load_agent(queue.words + words.READ)
    if read <= must_pass:
        read = _wait_for_room(queue, must_pass)
    if read <= must_pass:
        start = fx.Int64(-1)
    return start


@flyc.jit
def _wait_for_room(queue, must_pass):
    read = load_system(queue.rptr)
    over, next_look = fx.Int32(0), fx.Int64(0)
    deadline = deadline_after(queue.timeout_ticks)
    while (read <= must_pass) & (over == 0):
        over, next_look = out_of_time(queue.record, deadline, next_look)
        fx.rocdl.s_sleep(1)
        read = load_system(queue.rptr)
    store_agent(queue.words + words.READ, read)
    if read <= must_pass:
        write_record(queue.record, words.QUEUE_ROOM, queue.peer, 0, read, must_pass)
    return read


def write_copy(queue, at, dst, src, nbytes):
    """A copy of 1 to COPY_BYTES bytes at a reserved position; returns the next position."""
    return _write_packet(queue, at, _COPY, fx.Int32(nbytes) - 1, 0, *_halves(src), *_halves(dst))


def write_add(queue, at, address, value):
    """An addition to a 64-bit word, 8-byte aligned, at a reserved position; returns the next position."""
    return _write_packet(queue, at, _ATOMIC | _ADD64, *_halves(address), *_halves(value))


@flyc.jit
def commit(queue, start, end):
    """Tell the engine of the packets from `start` to `end`, after everybody who reserved before."""
    # The packets have arrived when the first look at the turn has: vmcnt counts both, in the order of issue.
    if _wait_for_turn(queue, start):
        store_system(queue.wptr, end)
        wait_stores()
        store_system(queue.doorbell, end)
        wait_stores()
        store_agent(queue.words + words.COMMITTED, end)


@flyc.jit
def _wait_for_turn(queue, start):
    turn = load_agent(queue.words + words.COMMITTED)
    over, next_look = fx.Int32(0), fx.Int64(0)
    deadline = deadline_after(queue.timeout_ticks)
    while (turn != start) & (over == 0):
        over, next_look = out_of_time(queue.record, deadline, next_look)
        fx.rocdl.s_sleep(1)
        turn = load_agent(queue.words + words.COMMITTED)
    if turn != start:
        write_record(queue.record, words.QUEUE_TURN, queue.peer, 0, turn, start)
    return turn == start


def _write_packet(queue, at, *dwords):
    """At most eight dwords; the rest is zero, which engines skip."""
    place = queue.ring + (at & queue.mask)
    padded = [fx.Int32(dword) for dword in (*dwords, *[0] * (8 - len(dwords)))]
    store16(place, fx.Vector.from_elements(padded[:4], fx.Int32))
    store16(place + 16, fx.Vector.from_elements(padded[4:], fx.Int32))
    return at + PACKET_BYTES


def _halves(value):
    """Low and high dword."""
    value = fx.Int64(value)
    return fx.Int32(value), fx.Int32(fx.Uint64(value) >> 32)


# ---- lanes ----


def _active_lanes():
    """How many active lanes come before this one, and how many there are."""
    active = fx.Int64(fx.rocdl.ballot(fx.Int64.ir_type, fx.Boolean(True).ir_value()))
    low, high = _halves(active)
    i32, zero = fx.Int32.ir_type, fx.Int32(0).ir_value()
    before = fx.rocdl.mbcnt_hi(i32, high.ir_value(), fx.rocdl.mbcnt_lo(i32, low.ir_value(), zero))
    count = fx.Int32(fx.math.ctpop(low)) + fx.Int32(fx.math.ctpop(high))
    return fx.Int32(before), count


def is_first_lane():
    """True in one active lane of the wave."""
    before, _ = _active_lanes()
    return before == 0


def _of_first_lane(value):
    low, high = _halves(value)
    i32 = fx.Int32.ir_type
    low, high = fx.Int32(fx.rocdl.readfirstlane(i32, low)), fx.Int32(fx.rocdl.readfirstlane(i32, high))
    return (fx.Int64(high) << 32) | (fx.Int64(low) & 0xFFFFFFFF)


# ---- a queue for oneself ----


@flyc.jit
def lock_queue(queue):
    """One lane; false if it stayed taken. What the last holder stored in agent scope is visible."""
    word = pointer(fx.Int32, queue.words + words.LOCK, 4)
    taken = fx.atomic_xchg(word, fx.Int32(1), syncscope="agent")
    over, next_look = fx.Int32(0), fx.Int64(0)
    deadline = deadline_after(queue.timeout_ticks)
    while (taken != 0) & (over == 0):
        over, next_look = out_of_time(queue.record, deadline, next_look)
        fx.rocdl.s_sleep(1)
        taken = fx.atomic_xchg(word, fx.Int32(1), syncscope="agent")
    if taken != 0:
        write_record(queue.record, words.QUEUE_LOCK, queue.peer, 0, taken, 0)
    acquire_fence("agent")
    return taken == 0


def unlock_queue(queue):
    """After what this wave stored."""
    release_fence("agent")
    store_agent(queue.words + words.LOCK, 0, fx.Int32)
