"""A kernel that waits for a word of rank 1's, and does nothing else."""

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev


@flyc.kernel
def wait_for_peer(flag: fx.Int64, record: fx.Int64, ticks: fx.Int64):
    dev.wait_at_least(flag, 1, record, 1, 1, dev.deadline_after(ticks))


@flyc.jit
def launch(flag: fx.Int64, record: fx.Int64, ticks: fx.Int64, stream: fx.Stream = fx.Stream(None)):
    wait_for_peer(flag, record, ticks).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
