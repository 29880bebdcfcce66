"""Where ranks meet: the begin of a call, and the waits for what peers owe. One wave each, lane p for rank p.

    start   this call's number and what will be due in it; every peer is told the number and M
    meet    tell the peers (where stores and loads carried the bytes; copy engines tell by themselves), then
            wait for them

A meeting also compares M: a rank that is in the same call with another M sends to other places than this rank
reads. What went wrong is written into the fault record, with one of the codes below; the host raises it.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
import functools

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev
from mori_shmem.device.flydsl.waits import write_record

from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.regions import M_BITS, WORD_BYTES, control_of

LANES = 64
# `what` of a fault record. CALLED: the peer has not begun this call. OTHER_M: it has, with the M that was
# seen.
PARTIALS, FINISHED, CALLED, OTHER_M = 1, 2, 3, 4


@fx.struct
class Start:
    """puts, parts: how many puts of partial sums, and of finished rows, will come from each peer."""

    base: fx.Int64
    stride: fx.Int64
    rank: fx.Int32
    m: fx.Int32
    puts: fx.Int32
    parts: fx.Int32


@functools.cache
def starter(num_ranks: int) -> Kernel:
    """`start`, one workgroup."""
    control = control_of(num_ranks)

    @flyc.kernel
    def start(args: Start, blocks: fx.Int32):
        window, lane = dev.window(args.base, args.stride, args.rank), fx.thread_idx.x
        epoch = dev.load_agent(dev.my_address(window, control.epoch)) + 1
        note_counters(window, control, lane)
        if (lane < num_ranks) & (lane != args.rank):
            called = dev.peer_address(window, lane, control.called) + fx.Int64(args.rank) * WORD_BYTES
            dev.store_system(called, (epoch << M_BITS) | fx.Int64(args.m))
        if lane == 0:
            dev.store_agent(dev.my_address(window, control.epoch), epoch)
            for due, more in ((control.arrived_due, args.puts), (control.finished_due, args.parts)):
                word = dev.my_address(window, due)
                dev.store_agent(word, dev.load_agent(word) + fx.Int64(more))

    return Kernel(start, Start, LANES)


@flyc.jit
def note_counters(window, control, lane):
    """Where they stand when the call begins: whatever they count up to in it counts from there."""
    for i in range(lane, control.num_counters, LANES):
        counter = dev.my_address(window, control.counters) + fx.Int64(i) * WORD_BYTES
        dev.store_agent(counter + control.then, dev.load_agent(counter))


@fx.struct
class Meet:
    """record, timeout_ticks: of the communicator, for waits that are late."""

    base: fx.Int64
    stride: fx.Int64
    rank: fx.Int32
    m: fx.Int32
    record: fx.Int64
    timeout_ticks: fx.Int64


@functools.cache
def meeter(num_ranks: int, what: int, *, tells: bool) -> Kernel:
    """`meet` for PARTIALS or FINISHED, one workgroup."""
    control = control_of(num_ranks)

    @flyc.kernel
    def meet(args: Meet, blocks: fx.Int32):
        window, peer = dev.window(args.base, args.stride, args.rank), fx.thread_idx.x
        deadline = dev.deadline_after(args.timeout_ticks)
        if (peer < num_ranks) & (peer != args.rank):
            if fx.const_expr(tells):
                tell(window, control, what, peer)
            agree_on_m(window, control, peer, args.m, args.record, deadline)
            await_due(window, control, what, peer, args.record, deadline)

    return Kernel(meet, Meet, LANES)


def _words(control, what):
    """(the words that peers write, the word that says what they owe)."""
    if what == PARTIALS:
        return control.arrived, control.arrived_due
    return control.finished, control.finished_due


def tell(window, control, what, peer):
    """What I owe a peer in this call is there. What it will read has been published by the end of a
    kernel."""
    flags, due = _words(control, what)
    word = dev.peer_address(window, peer, flags) + fx.Int64(window.rank) * WORD_BYTES
    dev.store_system(word, dev.load_agent(dev.my_address(window, due)))


def await_due(window, control, what, peer, record, deadline):
    """Until a peer has sent, or told, all that it owes me in this call; then this wave can see it."""
    flags, due = _words(control, what)
    word = dev.my_address(window, flags) + fx.Int64(peer) * WORD_BYTES
    return dev.wait_at_least(word, dev.load_agent(dev.my_address(window, due)), record, what, peer, deadline)


@flyc.jit
def agree_on_m(window, control, peer, m, record, deadline):
    """Until a peer is in this call too; its M must be mine."""
    epoch = dev.load_agent(dev.my_address(window, control.epoch))
    called = dev.my_address(window, control.called) + fx.Int64(peer) * WORD_BYTES
    dev.wait_at_least(called, epoch << M_BITS, record, CALLED, peer, deadline)
    tag = dev.load_system(called)
    theirs = fx.Int32(tag & ((1 << M_BITS) - 1))
    if ((tag >> M_BITS) == epoch) & (theirs != m):
        write_record(record, OTHER_M, peer, 0, theirs, m)
