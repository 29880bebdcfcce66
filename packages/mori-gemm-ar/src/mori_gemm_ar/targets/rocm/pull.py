"""Everyone's finished slices by loads: read from the owner's staging, widened on the way, stored in the
output.

The first workgroup tells every peer that this rank's slice may be read, and waits for all peers, so that
whoever has finished a call knows that everybody has reduced. Each workgroup waits for the owners of its own
pieces; all waves do, since what a wave sees depends on the fence of its own wait.
The pieces are dealt out so that neighbouring workgroups read from different owners: each has a link of its
own.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
import functools

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev

from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.meet import FINISHED, await_due, tell
from mori_gemm_ar.targets.rocm.regions import control_of
from mori_gemm_ar.targets.rocm.rows import LANES, column_of, strips_of, widen_row

THREADS = 256
WAVES = THREADS // LANES


@fx.struct
class Pull:
    """staging, scales: offsets of the finished slice at every owner, of up to slice_rows rows, and here at
    the output the m rows of the whole matrix. A slice is cut into `pieces` of `piece_rows` rows."""

    base: fx.Int64
    stride: fx.Int64
    rank: fx.Int32
    staging: fx.Int64
    scales: fx.Int64
    output: fx.Int64
    m: fx.Int32
    slice_rows: fx.Int32
    pieces: fx.Int32
    piece_rows: fx.Int32
    record: fx.Int64
    timeout_ticks: fx.Int64


@functools.cache
def puller(num_ranks: int, n: int, *, fp8: bool) -> Kernel:
    """`pull`."""
    control = control_of(num_ranks)

    @flyc.kernel
    def pull(args: Pull, blocks: fx.Int32):
        window = dev.window(args.base, args.stride, args.rank)
        lane, wave = fx.thread_idx.x % LANES, fx.thread_idx.x // LANES
        deadline = dev.deadline_after(args.timeout_ticks)
        if (fx.block_idx.x == 0) & (fx.thread_idx.x < num_ranks) & (fx.thread_idx.x != args.rank):
            tell(window, control, FINISHED, fx.thread_idx.x)
            await_due(window, control, FINISHED, fx.thread_idx.x, args.record, deadline)
        for piece in range(fx.block_idx.x, args.pieces * num_ranks, blocks):
            index = fx.Int32(piece)
            owner = (args.rank + 1 + index % num_ranks) % num_ranks
            if owner != args.rank:
                await_due(window, control, FINISHED, owner, args.record, deadline)
            first_of_slice = owner * args.slice_rows
            height = fx.min(args.slice_rows, args.m - first_of_slice)
            first = index // num_ranks * args.piece_rows
            for row in range(first + wave, fx.min(first + args.piece_rows, height), WAVES):
                pull_row(args, window, owner, fx.Int64(row), fx.Int64(first_of_slice) + fx.Int64(row), lane)

    def pull_row(args, window, owner, row, row_of_matrix, lane):
        """Row `row` of the owner's slice."""
        out = dev.my_address(window, args.output) + row_of_matrix * (2 * n)
        source = dev.peer_address(window, owner, args.staging) + row * (n if fp8 else 2 * n)
        if fp8:
            widen_row(n, source, dev.peer_address(window, owner, args.scales) + row * 4, out, lane)
        else:
            copy_row(source, out, lane)

    @flyc.jit
    def copy_row(source, out, lane):
        held = [
            dev.load16(source + fx.Int64(column_of(n, strip, lane)[1]) * 2) for strip in range(strips_of(n))
        ]
        for strip in fx.range_constexpr(strips_of(n)):
            column, _ = column_of(n, strip, lane)
            if column < n:
                dev.store16(out + fx.Int64(column) * 2, held[strip])

    return Kernel(pull, Pull, THREADS)
