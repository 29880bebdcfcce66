"""Waits inside kernels: for a flag that only grows, until a deadline.

A wait polls with s_sleep between two looks. When the clock passes the deadline the first wait that is late
writes the fault record (compare-and-swap of its code 0 -> busy, the fields, then code 1), and all return
false: the kernel goes on to its end with wrong data, and the host, who reads the record, raises PeerTimeout.
A wait that begins after a record was written does not wait at all, and one that is under way looks once in
a millisecond: its code is also how the host, who has seen a peer die, ends the waits of this rank. The record
lies in host memory, where looks of thousands of waves would crowd out the doorbells and the engines' reads.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

from mori_shmem.device.flydsl.memory import (
    acquire_fence,
    load_agent,
    load_system,
    pointer,
    store_system,
    wait_stores,
)
from mori_shmem.device.queue_words import (
    CODE_BUSY,
    CODE_PUBLISHED,
    LOOK_TICKS,
    RECORD_BLOCK,
    RECORD_INDEX,
    RECORD_PEER,
    RECORD_SEEN,
    RECORD_WANTED,
    RECORD_WHAT,
)


def clock():
    """The GPU's constant clock: 10 ns ticks, Int64, the same for all lanes of a wave."""
    return fx.Int64(llvm.call_intrinsic(fx.Int64.ir_type, "llvm.amdgcn.s.memrealtime", [], [], []))


def deadline_after(timeout_ticks):
    """When waits that begin now shall end: one for all waits of a kernel."""
    return clock() + timeout_ticks


def has_failed(record):
    """Whether a wait of this rank was late, or the host has given up, so that nobody need wait any more."""
    return load_system(record, fx.Int32) != 0


@flyc.jit
def out_of_time(record, deadline, next_look):
    """One turn of a waiting loop: (1 if it has to end, when to look at the record again).

    Begin with next_look = 0: a failure of before is seen in the first turn.
    """
    now = clock()
    over = fx.Int32(now > deadline)
    if now > next_look:
        over = over | fx.Int32(has_failed(record))
        next_look = now + LOOK_TICKS
    return over, next_look


@flyc.jit
def wait_at_least(address, value, record, what, peer, deadline, index=0, scope="system"):
    """Until the 64-bit word is at least `value`; then what was stored before it is visible to this wave.

    False when it did not come in time. scope "agent": the word is one that only kernels of this GPU write.
    """
    look = load_system if scope == "system" else load_agent
    seen = look(address)
    over, next_look = fx.Int32(0), fx.Int64(0)
    while (seen < value) & (over == 0):
        over, next_look = out_of_time(record, deadline, next_look)
        fx.rocdl.s_sleep(1)
        seen = look(address)
    # A loop that was not given up has seen the value. To compare once more would be wrong: lanes that load
    # one word may differ in what they see, while the compiler takes them for equal.
    if (seen < value) & (over != 0):
        write_record(record, what, peer, index, seen, value)
    acquire_fence(scope)
    return (seen >= value) | (over == 0)


@flyc.jit
def write_record(record, what, peer, index, seen, wanted):
    """Who was waited for, what for, how far it had come. The first one counts."""
    old, _ = fx.atomic_cas(pointer(fx.Int32, record, 4), fx.Int32(0), fx.Int32(CODE_BUSY))
    if old == 0:
        fields = {
            RECORD_PEER: peer, RECORD_WHAT: what, RECORD_INDEX: index, RECORD_SEEN: seen,
            RECORD_WANTED: wanted, RECORD_BLOCK: fx.block_idx.x,
        }  # fmt: skip
        for offset, field in fields.items():
            store_system(record + offset, field, fx.Int32)
        wait_stores()
        store_system(record, CODE_PUBLISHED, fx.Int32)
