"""Signals of a window in Triton kernels: the device side of comm.signal, comm.wait and queue.signal.

    peer = peer_pointer(table, rank)                     # win.handle.table as a tensor or address of int64
    set_word(word_pointer(peer, offset_bytes), epoch, "sys")
    came = wait_word(word, epoch, record, timeout_ns, rank, sender, what, index)

All are called once per program, with scalar pointers; `tl.debug_barrier()` makes the program's threads
meet, so that a signal comes after what all of them have stored, and a load after a wait comes after it for
all. `record` is comm.fault_record. A wait that passes its deadline writes into it who waited for whom, the
flag, the value seen and the value wanted, and returns 0; the host then raises PeerTimeout (`comm.check`, or
the next wait).

A kernel that a queue waits for must be loaded before: launch it once, and mark the arguments that change
with do_not_specialize, for each new variant is another kernel to load (targets/cuda/queue.py says why).

The words are 64 bits; one writer each, growing, or a toggle (targets/cuda/lowering.py has the rules for
graphs).
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def now_ns():
    """The GPU's clock, the same value for all threads of the program: what is decided by it must be decided
    alike
    by all, or they would part at the next barrier."""
    threads = tl.arange(0, cuda.num_threads())
    each = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [threads], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.max(each, axis=0)


@triton.jit
def peer_pointer(table, rank):
    """Where the part of `rank` starts, as a byte pointer."""
    return tl.load(table + rank).to(tl.pointer_type(tl.int8))


@triton.jit
def word_pointer(part, offset_bytes):
    """The 64-bit word at an offset of a part."""
    return (part + offset_bytes).to(tl.pointer_type(tl.int64))


@triton.jit
def read_word(word, scope: tl.constexpr):
    """Acquire. scope: "gpu" or "sys"."""
    return tl.atomic_add(word, 0, sem="acquire", scope=scope)


@triton.jit
def set_word(word, value, scope: tl.constexpr):
    """Release, after what every thread of the program has stored."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope=scope)


@triton.jit
def add_to_word(word, value, scope: tl.constexpr):
    """Release, after what every thread of the program has stored."""
    tl.debug_barrier()
    tl.atomic_add(word, value, sem="release", scope=scope)


@triton.jit
def wait_word(word, wanted, record, timeout_ns, rank, peer, what, index):
    """1: the word is at least `wanted`, and what was stored before it is visible. 0: late; the record is
    written.

    System scope. `record` points to int32 words: code, rank, peer, what, index, seen, wanted, block.
    """
    seen = read_word(word, "sys")
    came = seen >= wanted
    waiting = seen < wanted
    if waiting:  # another wait of this rank has failed: so has the call, and this one need not be waited for
        waiting = tl.atomic_add(record, 0, sem="relaxed", scope="sys") == 0
    start = now_ns()
    while waiting:
        seen = read_word(word, "sys")
        came = seen >= wanted
        waiting = (seen < wanted) & (now_ns() - start < timeout_ns)
    if not came:
        _write_record(record, rank, peer, what, index, seen, wanted)
    tl.debug_barrier()
    return came


@triton.jit
def _write_record(record, rank, peer, what, index, seen, wanted):
    """The first wait that fails owns the record: code goes 0 -> busy -> 1."""
    if tl.atomic_cas(record, 0, 2, sem="relaxed", scope="sys") == 0:
        tl.store(record + 1, rank)
        tl.store(record + 2, peer)
        tl.store(record + 3, what)
        tl.store(record + 4, index)
        tl.store(record + 5, tl.cast(seen, tl.int32))
        tl.store(record + 6, tl.cast(wanted, tl.int32))
        tl.store(record + 7, tl.program_id(0))
        tl.debug_barrier()
        tl.atomic_xchg(record, 1, sem="release", scope="sys")


@triton.jit
def all_ranks_meet(table, words, count, record, timeout_ns, rank, world_size, what):
    """A barrier of all ranks, by one program of each at a time.

    `words` is the offset of world_size words in the window that belong to this barrier alone; `count`
    points to my own count of barriers in device memory, so that replays and eager calls may mix
    (kernels.ptx has the proof).
    """
    epoch = tl.load(count) + 1
    tl.debug_barrier()
    tl.store(count, epoch)
    for peer in range(world_size):
        set_word(word_pointer(peer_pointer(table, peer), words) + rank, epoch, "sys")
    mine = word_pointer(peer_pointer(table, rank), words)
    for peer in range(world_size):
        wait_word(mine + peer, epoch, record, timeout_ns, rank, peer, what, 0)
