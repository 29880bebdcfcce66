"""The owner's sum: W bf16 partial sums of each element, added in fp32 in rank order, rounded once to bf16.

    reducer    a flat walk over 16-byte packs; or, quantising, a wave for each row, whose scale needs it whole
    pusher     the same, part by part: whoever finishes a part hands it to the copy engines

How a part gets to the copy engines, which read memory and no caches (`publish`):
    writethrough   every lane stores past its caches and waits for that; the workgroup meets; one lane counts
    fence          every wave waits for its plain stores; the workgroup meets; one wave writes its L2 back and
                   one lane counts
Workgroups do not wait for each other: the last of a part posts its puts, one lane for each peer. A counter is
never reset: a part is complete when its counter stands as many above where the call found it as there are
workgroups.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
import functools
import operator

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev

from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.regions import WORD_BYTES, control_of
from mori_gemm_ar.targets.rocm.rows import LANES, PACK, column_of, store_narrowed, strips_of

THREADS = 256
WAVES = THREADS // LANES
PACK_BYTES = 2 * PACK


@fx.struct
class Sum:
    """The source of rank s begins at sources + s * step, this rank's own at `own`. Finished rows go to `out`
    (bf16, or codes) and `scales`."""

    sources: fx.Int64
    step: fx.Int64
    own: fx.Int64
    rank: fx.Int32
    rows: fx.Int32
    out: fx.Int64
    scales: fx.Int64


def sum_at(num_ranks, args, offset):
    """8 finished elements, bf16, at a byte offset of the slice."""
    parts = []
    for s in range(num_ranks):
        source = (args.rank == s).select(args.own, args.sources + args.step * s)
        part = fx.generic_load(dev.pointer(fx.BFloat16, source + offset, 16), count=PACK)
        parts.append(part.to(fx.Float32))
    return functools.reduce(operator.add, parts).to(fx.BFloat16)


def sum_of_row(num_ranks, n, args, row, lane):
    """The finished packs of a row that a lane holds."""
    starts = (fx.Int64(row) * n + fx.Int64(column_of(n, strip, lane)[1]) for strip in range(strips_of(n)))
    return [sum_at(num_ranks, args, start * 2) for start in starts]


@functools.cache
def reducer(num_ranks: int, n: int, *, quantises: bool) -> Kernel:
    """`reduce`: all rows of a slice."""

    @flyc.kernel
    def reduce(args: Sum, blocks: fx.Int32):
        if fx.const_expr(quantises):
            lane, wave = fx.thread_idx.x % LANES, fx.thread_idx.x // LANES
            for row in range(fx.block_idx.x * WAVES + wave, args.rows, blocks * WAVES):
                packs = sum_of_row(num_ranks, n, args, row, lane)
                store_narrowed(packs, n, args.out + fx.Int64(row) * n, args.scales + fx.Int64(row) * 4, lane)
        else:
            for i in range(
                fx.block_idx.x * THREADS + fx.thread_idx.x, args.rows * (n // PACK), blocks * THREADS
            ):
                offset = fx.Int64(i) * PACK_BYTES
                dev.store16(args.out + offset, sum_at(num_ranks, args, offset).bitcast(fx.Int32))

    return Kernel(reduce, Sum, THREADS)


@fx.struct
class Push:
    """The sum (as above), cut into `parts` of `part_rows` rows, and where a part goes at each peer: to the
    same offset of its window as here."""

    sources: fx.Int64
    step: fx.Int64
    own: fx.Int64
    rank: fx.Int32
    rows: fx.Int32
    out: fx.Int64
    scales: fx.Int64
    base: fx.Int64
    stride: fx.Int64
    queues: fx.Int64
    part_rows: fx.Int32
    parts: fx.Int32


@functools.cache
def pusher(num_ranks: int, n: int, *, quantises: bool, publish: str) -> Kernel:
    """`reduce_push`. quantises: codes and scales travel, not bf16."""
    control, through = control_of(num_ranks), publish == "writethrough"
    row_bytes = n if quantises else 2 * n

    @flyc.kernel
    def reduce_push(args: Push, blocks: fx.Int32):
        lane, wave = fx.thread_idx.x % LANES, fx.thread_idx.x // LANES
        for part in range(args.parts):
            first = fx.Int32(part) * args.part_rows
            stop = fx.max(first, fx.min(first + args.part_rows, args.rows))
            if fx.const_expr(quantises):
                for row in range(first + fx.block_idx.x * WAVES + wave, stop, blocks * WAVES):
                    packs = sum_of_row(num_ranks, n, args, row, lane)
                    codes, scale_at = args.out + fx.Int64(row) * n, args.scales + fx.Int64(row) * 4
                    store_narrowed(packs, n, codes, scale_at, lane, through)
            else:
                begin = first * (n // PACK) + fx.block_idx.x * THREADS + fx.thread_idx.x
                for i in range(begin, stop * (n // PACK), blocks * THREADS):
                    offset = fx.Int64(i) * PACK_BYTES
                    store = dev.store16_through if through else dev.store16
                    store(args.out + offset, sum_at(num_ranks, args, offset).bitcast(fx.Int32))
            dev.wait_stores()
            fx.barrier()
            if wave == 0:
                if fx.const_expr(not through):
                    dev.release_fence("system")
                push_if_last(args, blocks, part, first, stop, lane)

    @flyc.jit
    def push_if_last(args, blocks, part, first, stop, lane):
        """Count this workgroup; the last one of the part posts it to every peer."""
        window = dev.window(args.base, args.stride, args.rank)
        counter = dev.my_address(window, control.blocks) + fx.Int64(part) * WORD_BYTES
        before = fx.Int64(0)
        if lane == 0:
            before = dev.add_agent(counter, 1) - dev.load_agent(counter + control.then)
        is_last = fx.Int32(fx.rocdl.readfirstlane(fx.Int32.ir_type, fx.Int32(before))) == blocks - 1
        if is_last & (lane < num_ranks) & (lane != args.rank):
            queue = dev.open_queue(dev.queue_address(args.queues, fx.Int64(lane)))
            finished = dev.peer_address(window, lane, control.finished) + fx.Int64(args.rank) * WORD_BYTES
            to_peer = dev.peer_address(window, lane, 0) - window.mine
            rows = args.out + fx.Int64(first) * row_bytes
            nbytes = fx.Int64(stop - first) * row_bytes
            if fx.const_expr(quantises):
                dev.put(queue, rows + to_peer, rows, nbytes)
                scales = args.scales + fx.Int64(first) * 4
                dev.put(queue, scales + to_peer, scales, fx.Int64(stop - first) * 4, signal=(finished, 1))
            else:
                dev.put(queue, rows + to_peer, rows, nbytes, signal=(finished, 1))

    return Kernel(reduce_push, Push, THREADS)
