"""Puts by the copy engines: one wave for each peer, which has a queue and a link of its own.

    scatter   my partial sums of each owner's slice -> its landing slot; it counts them in `arrived`
    gather    my finished slice -> every peer; it counts it in `finished`. Then wait for everybody else's, and
              for the engines to be done with what they read here: the caller may write to the output after
              the call
What they read was published by the end of the kernel that stored it. The count is raised by the engine
itself, behind the bytes: that a queue's read pointer has moved on says nothing about them.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
import functools

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev

from mori_gemm_ar.problem import ROW_SCALE_BYTES
from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.meet import FINISHED, await_due
from mori_gemm_ar.targets.rocm.regions import WORD_BYTES, control_of

LANES = 64


@fx.struct
class Scatter:
    """c, landing: offsets of C and of my landing slot at every owner. slice_rows, m: of the call."""

    base: fx.Int64
    stride: fx.Int64
    rank: fx.Int32
    queues: fx.Int64
    c: fx.Int64
    landing: fx.Int64
    m: fx.Int32
    slice_rows: fx.Int32


@functools.cache
def scatterer(num_ranks: int, n: int) -> Kernel:
    """`scatter`, one workgroup."""
    control = control_of(num_ranks)

    @flyc.kernel
    def scatter(args: Scatter, blocks: fx.Int32):
        window, peer = dev.window(args.base, args.stride, args.rank), fx.thread_idx.x // LANES
        if (fx.thread_idx.x % LANES == 0) & (peer != args.rank):
            queue = dev.open_queue(dev.queue_address(args.queues, fx.Int64(peer)))
            first = fx.min(args.m, peer * args.slice_rows)
            rows = fx.min(args.m - first, args.slice_rows)
            arrived = dev.peer_address(window, peer, control.arrived) + fx.Int64(args.rank) * WORD_BYTES
            source = dev.my_address(window, args.c) + fx.Int64(first) * (2 * n)
            landing = dev.peer_address(window, peer, args.landing)
            dev.put(queue, landing, source, fx.Int64(rows) * (2 * n), signal=(arrived, 1))

    return Kernel(scatter, Scatter, num_ranks * LANES)


@fx.struct
class Gather:
    """rows_at, scales_at: offsets of my finished rows and their scales, here and at every peer."""

    base: fx.Int64
    stride: fx.Int64
    rank: fx.Int32
    queues: fx.Int64
    rows_at: fx.Int64
    scales_at: fx.Int64
    rows: fx.Int32
    record: fx.Int64
    timeout_ticks: fx.Int64


@functools.cache
def gatherer(num_ranks: int, n: int, *, fp8: bool, sends: bool) -> Kernel:
    """`gather`, one workgroup. Without `sends` somebody else has posted the puts."""
    control = control_of(num_ranks)

    @flyc.kernel
    def gather(args: Gather, blocks: fx.Int32):
        window, peer = dev.window(args.base, args.stride, args.rank), fx.thread_idx.x // LANES
        if (fx.thread_idx.x % LANES == 0) & (peer != args.rank):
            queue = dev.open_queue(dev.queue_address(args.queues, fx.Int64(peer)))
            if fx.const_expr(sends):
                send(args, window, queue, peer)
            deadline = dev.deadline_after(args.timeout_ticks)
            if await_due(window, control, FINISHED, peer, args.record, deadline):
                dev.quiet(queue)

    def send(args, window, queue, peer):
        def put_rows(offset, row_bytes, signal):
            there, here = dev.peer_address(window, peer, offset), dev.my_address(window, offset)
            dev.put(queue, there, here, fx.Int64(args.rows) * row_bytes, signal=signal)

        finished = dev.peer_address(window, peer, control.finished) + fx.Int64(args.rank) * WORD_BYTES
        if fp8:
            put_rows(args.rows_at, n, None)
            put_rows(args.scales_at, ROW_SCALE_BYTES, (finished, 1))
        else:
            put_rows(args.rows_at, 2 * n, (finished, 1))

    return Kernel(gather, Gather, num_ranks * LANES)
