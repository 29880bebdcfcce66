"""large.py PART: sizes and offsets beyond 32 bits, on two ranks; prints `ok NAME`. For `mori-sim run`.

Windows are sparse on the node: what nobody touches takes no memory.
"""

from __future__ import annotations

import sys

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem
import mori_shmem.device.flydsl as dev
import torch

GIB, KIB = 1 << 30, 1024
FAR = 4 * GIB + 4 * KIB  # where 32 bits would wrap to 4 KiB
FLAG, KERNELS_FLAG = FAR + 8 * KIB, FAR + 9 * KIB
U8 = torch.uint8


def pattern(seed: int, nbytes: int = 4 * KIB) -> torch.Tensor:
    return ((torch.arange(nbytes) * 131 + seed) % 251).to(U8)


@flyc.kernel
def put_far(base: fx.Int64, stride: fx.Int64, rank: fx.Int32, queues: fx.Int64, record: fx.Int64):
    """Put 4 KiB from and to far offsets, add to a far flag; wait for the peer's; copy what came by loads."""
    window, peer, lane = dev.window(base, stride, rank), 1 - rank, fx.thread_idx.x
    if lane == 0:
        queue = dev.open_queue(dev.queue_address(queues, fx.Int64(peer)))
        there, flag = dev.peer_address(window, peer, FAR), dev.peer_address(window, peer, KERNELS_FLAG)
        dev.put(queue, there, dev.my_address(window, FAR + 16 * KIB), 4 * KIB, signal=(flag, 1))
    deadline = dev.deadline_after(3_000_000_000)
    dev.wait_at_least(dev.my_address(window, KERNELS_FLAG), 1, record, 1, peer, deadline)
    for i in fx.range_constexpr(4):
        at = fx.Int64(lane) * 16 + i * KIB
        dev.store16(
            dev.my_address(window, FAR + 32 * KIB) + at, dev.load16(dev.peer_address(window, rank, FAR) + at)
        )


@flyc.jit
def launch(
    base: fx.Int64, stride: fx.Int64, rank: fx.Int32, queues: fx.Int64, record: fx.Int64,
    stream: fx.Stream = fx.Stream(None),
):  # fmt: skip
    put_far(base, stride, rank, queues, record).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


@flyc.kernel
def put_all(base: fx.Int64, stride: fx.Int64, rank: fx.Int32, queues: fx.Int64, nbytes: fx.Int64):
    """One put of the whole part to the peer, from a kernel."""
    window, peer = dev.window(base, stride, rank), 1 - rank
    if fx.thread_idx.x == 0:
        queue = dev.open_queue(dev.queue_address(queues, fx.Int64(peer)))
        dev.put(queue, dev.peer_address(window, peer, 0), dev.my_address(window, 0), nbytes)
        dev.quiet(queue)


@flyc.jit
def launch_all(
    base: fx.Int64, stride: fx.Int64, rank: fx.Int32, queues: fx.Int64, nbytes: fx.Int64,
    stream: fx.Stream = fx.Stream(None),
):  # fmt: skip
    put_all(base, stride, rank, queues, nbytes).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


def test_SH_1_offsets_beyond_2_32(comm: mori_shmem.Communicator) -> None:
    """A put of the host and one of a kernel, signals, and loads through a peer pointer; offset 4 KiB, where
    the wrapped address would lie, stays as it was."""
    window, peer = comm.alloc(9 * GIB // 2), 1 - comm.rank
    near = window.tensor(4 * KIB, U8, 4 * KIB)
    near.fill_(77 + comm.rank)
    window.tensor(4 * KIB, U8, FAR + 16 * KIB).copy_(pattern(comm.rank))
    comm.barrier()
    for step, offset in enumerate((2 * GIB + 4 * KIB, FAR), start=1):
        comm.queue(peer).put(window.at(offset, peer), window.at(FAR + 16 * KIB), 4 * KIB)
        comm.queue(peer).signal(window.at(FLAG, peer), step)
        comm.wait(window.at(FLAG), step, peer=peer)
        assert torch.equal(window.tensor(4 * KIB, U8, offset), pattern(peer))
    comm.barrier()
    window.peer(peer).tensor(4 * KIB, U8, FAR).zero_()
    comm.barrier()
    handle = window.handle
    queues, record = comm.core.device_queues().table, comm.fault_record.data_ptr()
    launch(handle.base, handle.stride, handle.rank, queues, record)
    comm.barrier()
    comm.check()
    assert torch.equal(window.tensor(4 * KIB, U8, FAR), pattern(peer))
    assert torch.equal(window.tensor(4 * KIB, U8, FAR + 32 * KIB), pattern(peer))
    assert bool((near == 77 + comm.rank).all())
    comm.barrier()


def test_SH_1_puts_of_more_than_a_gibibyte(comm: mori_shmem.Communicator) -> None:
    """2^30 + 16 bytes, more than one packet counts: by the host from rank 0, by a kernel from rank 1."""
    nbytes = GIB + 16
    window = comm.alloc(nbytes)
    probes = (0, GIB // 2 - 8, GIB // 2, 0x3FFFFFE0 - 8, 0x3FFFFFE0, GIB - 8, GIB, GIB + 8)
    for sender in (0, 1):
        if comm.rank == sender:
            for i, at in enumerate(probes):
                window.tensor(8, U8, at).copy_(pattern(100 * sender + i + 1, 8))
            if sender == 0:
                comm.queue(1).put(window.at(0, 1), window.at(0), nbytes)
                comm.queue(1).quiet(60)
            else:
                handle = window.handle
                launch_all(handle.base, handle.stride, handle.rank, comm.core.device_queues().table, nbytes)
        comm.barrier(60)
        if comm.rank != sender:
            for i, at in enumerate(probes):
                assert torch.equal(window.tensor(8, U8, at), pattern(100 * sender + i + 1, 8)), hex(at)
            assert not bool(window.tensor(4096, U8, 3 * GIB // 4).any())
        comm.barrier()


CHECKS = (test_SH_1_offsets_beyond_2_32, test_SH_1_puts_of_more_than_a_gibibyte)


def checks() -> list[str]:
    with mori_shmem.init("rocm", timeout_s=60) as comm:
        for check in CHECKS:
            check(comm)
    return [check.__name__ for check in CHECKS]


if __name__ == "__main__":
    for name in mori_shmem.run_ranks(checks, 2)[0]:
        print("ok", name)
    sys.exit(0)
