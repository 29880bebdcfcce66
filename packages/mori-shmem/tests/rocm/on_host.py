"""on_host.py RANKS: what the host does on this target, on each rank; prints `ok NAME`. For `mori-sim run`."""

from __future__ import annotations

import sys
import threading
import time

import mori_shmem
import pytest
import torch
from mori_shmem import errors

U8, I64 = torch.uint8, torch.int64


def neighbours(comm: mori_shmem.Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


def bytes_of(rank: int, nbytes: int) -> torch.Tensor:
    return ((torch.arange(nbytes) * 131 + rank * 7) % 251).to(U8)


def windows(comm: mori_shmem.Communicator) -> None:
    """Zeroed, reachable from everywhere, refused where they differ; their tensors outlive them."""
    win = comm.alloc(3 << 20)
    assert not win.tensor(3 << 20, U8).any()
    assert win.handle.base + comm.rank * win.handle.stride == win.at(0).address
    win.tensor(100, U8, 8).fill_(comm.rank + 1)
    comm.barrier()
    for peer in range(comm.world_size):
        assert (win.peer(peer).tensor(100, U8, 8) == peer + 1).all()
    kept = win.peer(neighbours(comm)[0]).tensor(100, U8, 8)
    win.close()
    assert (kept == neighbours(comm)[0] + 1).all()
    with pytest.raises(errors.ClosedError):
        comm.queue(comm.rank).put(win.at(0), win.at(64), 8)
    with pytest.raises(errors.LayoutError, match="alloc sizes differ: rank"):
        comm.alloc(1000 if comm.rank == 0 else 2000)
    with pytest.raises(errors.LayoutError, match="alloc kinds differ: signals, data"):
        comm.alloc(1000, kind="data" if comm.rank else "signals")
    with pytest.raises(errors.LayoutError, match="kind='fast' is not known; allowed: data, signals"):
        comm.alloc(1000, kind="fast")
    assert comm.device.type == "cpu"


def test_SH_5_puts_of_all_sizes_and_rows(comm: mori_shmem.Communicator) -> None:
    """Any byte offset; rows; the smallest ring, wrapped many times; signals count each call once."""
    to, source = neighbours(comm)
    half = 1 << 19
    win = comm.alloc(2 * half + 4096)
    data, landed = win.tensor(half, U8), win.tensor(half, U8, half)
    data.copy_(bytes_of(comm.rank, half))
    comm.barrier()
    queue, count = comm.queue(to), 0
    sizes = (4, 20, 256, 4096, 65536 - 3)
    for number in range(120):
        nbytes, offset = sizes[number % 5], number * 97 % 1000
        queue.put(win.at(half + offset, to), win.at(offset), nbytes)
        if number % 3 == 0:
            queue.signal(win.at(2 * half, to), 1, op="add")
            count += 1
    queue.put_2d(win.at(half + (1 << 18), to), win.at(5), 100, 30, 1000, 333)
    queue.signal(win.at(2 * half, to), 1, op="add")
    comm.wait(win.at(2 * half), count + 1, peer=source)
    assert comm.read(win.at(2 * half)) == count + 1
    wanted = bytes_of(source, half)
    assert torch.equal(landed[1000:65000], wanted[1000:65000])
    for row in range(30):
        there = landed[(1 << 18) + row * 1000 :]
        assert torch.equal(there[:100], wanted[5 + row * 333 :][:100])
        assert not there[100:1000].any()
    queue.quiet()
    comm.barrier()


def test_SH_5_several_threads_share_a_queue(comm: mori_shmem.Communicator) -> None:
    to, source = neighbours(comm)
    win = comm.alloc(4096)
    comm.barrier()
    queue = comm.queue(to)

    def issue() -> None:
        for _ in range(25):
            queue.put(win.at(512, to), win.at(0), 64)
            queue.signal(win.at(1024, to), 1, op="add")

    threads = [threading.Thread(target=issue) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.wait(win.at(1024), 100, peer=source)
    queue.quiet()
    assert comm.read(win.at(1024)) == 100
    comm.barrier()


def test_SH_5_quiet_means_that_the_bytes_are_there(comm: mori_shmem.Communicator) -> None:
    """Told by another channel. The read pointer moves before bytes land, so it would be no answer."""
    to, source = neighbours(comm)
    nbytes = 1 << 18
    win = comm.alloc(2 * nbytes)
    for round_ in range(5):
        win.tensor(nbytes, U8).copy_(bytes_of(comm.rank + round_, nbytes))
        comm.barrier()
        for piece in range(8):
            offset = piece * nbytes // 8
            comm.queue(to).put(win.at(nbytes + offset, to), win.at(offset), nbytes // 8)
        comm.queue(to).quiet()
        comm.all_gather(round_)
        assert torch.equal(win.tensor(nbytes, U8, nbytes), bytes_of(source + round_, nbytes))
        comm.barrier()


def programs(comm: mori_shmem.Communicator) -> None:
    """A program waits for its flag, copies, signals, stamps the time; submitted as often as wanted."""
    to, source = neighbours(comm)
    win = comm.alloc(1 << 16)
    win.tensor(4096, U8).copy_(bytes_of(comm.rank, 4096))
    comm.barrier()
    go, arrived, stamps = 8192, 8200, 8208
    for round_ in (1, 2):
        program = mori_shmem.PutProgram()
        program.timestamp(win.at(stamps))
        program.wait(win.at(go), round_)
        program.put(win.at(16384, to), win.at(0), 4096)
        program.timestamp(win.at(stamps + 8))
        program.signal(win.at(arrived, to), round_)
        last = comm.read(win.at(stamps))
        comm.queue(to).submit(program)
        comm.wait(win.at(stamps), last, "!=")  # the queue has begun
        time.sleep(0.01)
        assert comm.read(win.at(arrived)) < round_
        comm.barrier()
        comm.signal(win.at(go), round_)
        comm.wait(win.at(arrived), round_, peer=source)
        assert torch.equal(win.tensor(4096, U8, 16384), bytes_of(source, 4096))
        comm.queue(to).quiet()
        before, after = win.tensor(2, I64, stamps).tolist()
        assert after - before > 5_000_000
        comm.barrier()
    assert comm.read(win.at(arrived)) == 2
    with pytest.raises(errors.ArgumentError, match="32 bits"):
        comm.queue(to).wait(win.at(go), 1 << 32)


def streams(comm: mori_shmem.Communicator) -> None:
    """A put comes after the kernel whose result it copies, a kernel after the put whose bytes it reads."""
    import kernels
    import mori_shmem.device.flydsl as dev
    from bed import Bed, pattern_of

    to, source = neighbours(comm)
    bed = Bed(comm, dev)
    win = comm.alloc(1 << 16)
    slow_from = bed.data.at(comm.rank * kernels.SLOT)
    for round_ in (1, 2, 3):
        bed.start(kernels.slow_pattern, round_)
        comm.queue(to).put(win.at(0, to), slow_from, 1024)
        comm.queue(to).signal(win.at(4096, to), round_)
        comm.wait(win.at(4096), round_, peer=source)
        assert torch.equal(win.tensor(1024, U8), pattern_of(source, source, round_, 1))
        comm.queue(to).put(bed.data.at(kernels.SLOT * comm.world_size), win.at(0), 1024)
        comm.queue(to).join()
        bed.start(kernels.look, round_)
        bed.finish()
        assert torch.equal(bed.out[:1024], pattern_of(source, source, round_, 1))
        bed.start(kernels.slow_pattern, 9)
        comm.signal(win.at(4104, to), round_)  # a signal of the host comes after the kernel, too
        comm.wait(win.at(4104), round_, peer=source)
        row = bed.data.peer(source).tensor(1024, U8, source * kernels.SLOT)
        assert torch.equal(row, pattern_of(source, source, 9, 1))
        comm.barrier()


def a_signal_before_close_arrives(comm: mori_shmem.Communicator) -> None:
    """Rank 0's stands behind a kernel of 20 ms, and rank 0 leaves at once."""
    import kernels
    import mori_shmem.device.flydsl as dev
    from bed import Bed

    to, source = neighbours(comm)
    bed = Bed(comm, dev)
    bed.run(kernels.slow_pattern, 1)  # compiled
    with mori_shmem.init("rocm", name="leaving") as leaving:
        win = leaving.alloc(64)
        leaving.barrier()
        if comm.rank == 0:
            bed.start(kernels.slow_pattern, 2)
        leaving.signal(win.at(0, to), 1)
        leaving.wait(win.at(0), 1, peer=source)
    bed.finish()
    comm.barrier()


def test_SH_2_two_communicators_side_by_side(comm: mori_shmem.Communicator) -> None:
    to, source = neighbours(comm)
    first = comm.alloc(64)
    with mori_shmem.init("rocm", name="second") as other:
        second = other.alloc(64)
        for i in range(10):
            comm.queue(to).signal(first.at(0, to), 2 * i)
            other.queue(to).signal(second.at(0, to), 2 * i + 1)
            assert comm.wait(first.at(0), 2 * i, peer=source) == 2 * i
            assert other.wait(second.at(0), 2 * i + 1, peer=source) == 2 * i + 1
            comm.barrier()
    comm.queue(to).signal(first.at(0, to), 100)
    comm.wait(first.at(0), 100, peer=source)
    comm.barrier()


def test_SH_4_queues_that_do_not_exist_are_named(comm: mori_shmem.Communicator) -> None:
    with pytest.raises(errors.ArgumentError, match=r"valid are 0\.\.7"):
        comm.queue(0, 8)
    win = comm.alloc(64)
    with pytest.raises(errors.ArgumentError, match="touches rank"):
        comm.queue(comm.rank).put(win.at(0, neighbours(comm)[0]), win.at(32), 8)


def test_GA_6_dropped_and_reordered_copies_fail_the_self_test(comm: mori_shmem.Communicator) -> None:
    from mori_shmem.testing import faults

    comm.self_test()
    with faults(comm, drop_every=1), pytest.raises(errors.TransportInert, match="never came"):
        comm.self_test()
    comm.barrier()
    with faults(comm, reorder=True), pytest.raises(errors.TransportInert, match="signal"):
        comm.self_test()
    comm.barrier()


def test_SH_6_waits_end_with_the_facts(comm: mori_shmem.Communicator) -> None:
    win = comm.alloc(64)
    to = neighbours(comm)[0]
    start = time.monotonic()
    with pytest.raises(
        errors.PeerTimeout, match=rf"rank {comm.rank} of .* to be >= 7; it is 0.*expected from rank {to}"
    ):
        comm.wait(win.at(8), 7, peer=to, what="a word that nobody writes", timeout_s=0.3)
    assert time.monotonic() - start < 5
    comm.queue(comm.rank).wait(win.at(0), 1)
    with pytest.raises(errors.PeerTimeout, match="quiet"):
        comm.queue(comm.rank).quiet(timeout_s=0.3)
    comm.signal(win.at(0), 1)
    comm.queue(comm.rank).quiet()
    comm.barrier()


def kernels_that_are_late(comm: mori_shmem.Communicator) -> None:
    """The record of a kernel's wait becomes a PeerTimeout of the host, once; later kernels start afresh."""
    import kernels
    import mori_shmem.device.flydsl as dev
    from bed import Bed

    bed = Bed(comm, dev, timeout_s=0.3)
    bed.start(kernels.late, 1)
    with pytest.raises(errors.PeerTimeout, match=r"flag 9/3 from rank 1 should have been >= 77; it was 0"):
        bed.finish()
    assert int(bed.out[:8].view(I64)) == 0
    comm.check()
    comm.barrier()


CHECKS = (
    windows,
    test_SH_5_puts_of_all_sizes_and_rows,
    test_SH_5_several_threads_share_a_queue,
    test_SH_5_quiet_means_that_the_bytes_are_there,
    programs,
    streams,
    a_signal_before_close_arrives,
    test_SH_2_two_communicators_side_by_side,
    test_SH_4_queues_that_do_not_exist_are_named,
    test_GA_6_dropped_and_reordered_copies_fail_the_self_test,
    test_SH_6_waits_end_with_the_facts,
    kernels_that_are_late,
)


def checks() -> list[str]:
    done = []
    with mori_shmem.init("rocm") as comm:
        for check in CHECKS:
            check(comm)
            done.append(check.__name__)
    return done


def test_SH_3_opening_and_closing_gives_everything_back() -> bool:
    """30 communicators, one after the other: no descriptor and no device memory is left of them."""
    from mori_shmem.core import native
    from mori_shmem.testing import open_fds

    fds = []
    for i in range(30):
        with mori_shmem.init("rocm") as comm:
            win = comm.alloc(1 << 20)
            to = neighbours(comm)[0]
            comm.queue(to).put(win.at(0, to), win.at(512), 64)
            comm.core.device_queues()
            comm.barrier()
        if i in (5, 29):
            fds.append(len(open_fds()))
    with pytest.raises(errors.ClosedError):
        comm.barrier()
    assert abs(fds[1] - fds[0]) <= 2, fds
    assert native.rocm_device_count() > 0
    return True


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    found = mori_shmem.run_ranks(checks, ranks)
    for name in found[0]:
        if all(name in names for names in found):
            print(f"ok {name}", flush=True)
    if all(mori_shmem.run_ranks(test_SH_3_opening_and_closing_gives_everything_back, ranks)):
        print("ok test_SH_3_opening_and_closing_gives_everything_back", flush=True)
