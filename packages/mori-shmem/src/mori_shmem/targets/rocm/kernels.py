"""The kernels of this target itself. Importing this needs flydsl (mori-shmem[rocm]); each is compiled when
first launched. (No postponed annotations here: FlyDSL reads them.)"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from functools import cache

import flydsl.compiler as flyc
import flydsl.expr as fx

import mori_shmem.device.flydsl as dev
from mori_shmem.targets.fault_record import BARRIER

CALLERS_STREAM = fx.Stream(None)


@cache
def barrier(world_size):
    """launch(base, stride, rank, count, record, timeout_ticks, stream): one wave meets the other ranks'."""

    @flyc.kernel
    def meet(
        base: fx.Int64,
        stride: fx.Int64,
        rank: fx.Int32,
        count: fx.Int64,
        record: fx.Int64,
        timeout_ticks: fx.Int64,
    ):
        window = dev.window(base, stride, rank)
        dev.all_ranks_meet(window, 0, count, record, BARRIER, dev.deadline_after(timeout_ticks), world_size)

    @flyc.jit
    def launch(
        base: fx.Int64,
        stride: fx.Int64,
        rank: fx.Int32,
        count: fx.Int64,
        record: fx.Int64,
        timeout_ticks: fx.Int64,
        stream: fx.Stream = CALLERS_STREAM,
    ):
        meet(base, stride, rank, count, record, timeout_ticks).launch(
            grid=(1, 1, 1), block=(64, 1, 1), stream=stream
        )

    return launch
