"""on_device.py RANKS [NAME...]: kernels of kernels.py on each rank; prints `ok NAME`. For `mori-sim run`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import mori_shmem
import torch


def puts(bed: Any, *, through: bool) -> None:
    import kernels

    for round_ in (1, 2):
        number = round_ + 2 * through
        bed.run(kernels.puts, number, 3, 2, through)
        bed.check_rows(number, 6)
        bed.comm.barrier()


def puts_fenced(bed: Any) -> None:
    puts(bed, through=False)


def puts_through(bed: Any) -> None:
    puts(bed, through=True)


def lanes(bed: Any) -> None:
    """Twelve lanes and their signal are 13 packets of the 16 that the ring holds."""
    import kernels

    for round_ in (1, 2):
        bed.run(kernels.lanes, round_, 12)
        bed.check_rows(round_, 3)
        where = (peer * kernels.SLOT + 8 * kernels.KIB for peer in range(bed.world))
        counted = [int(bed.out[at:][:8].view(torch.int64)) for at in where]
        assert counted == [round_] * bed.world, counted
        bed.comm.barrier()


def batch(bed: Any) -> None:
    import kernels

    for round_ in (1, 2, 3):
        bed.run(kernels.batch, round_, 3)
        bed.check_rows(round_, 3)
        bed.comm.barrier()


def loopback(bed: Any) -> None:
    import kernels
    from bed import pattern_of

    for round_ in (1, 2):
        bed.run(kernels.loopback, round_)
        assert torch.equal(bed.out[:1024], pattern_of(bed.rank, bed.rank, round_, 1))
        assert int(bed.out[1024:1032].view(torch.int64)) == 3
    bed.comm.barrier()


def push(bed: Any) -> None:
    import kernels

    for round_, (through, fresh) in enumerate(((False, False), (True, False), (True, True)), start=1):
        bed.run(kernels.push, round_, through, fresh)
        bed.check_rows(round_, 2)
        bed.comm.barrier()


def pull(bed: Any) -> None:
    import kernels

    bed.run(kernels.pull, 1)
    bed.check_rows(1, 2)
    bed.comm.barrier()


def locked(bed: Any) -> None:
    import kernels

    bed.run(kernels.locked, 1, 5, cached_spare=True)
    assert bed.counter().item() == 15, bed.counter()


def meet(bed: Any) -> None:
    """Barriers inside a kernel, between barriers that are kernels of their own."""
    import kernels
    from bed import pattern_of

    for round_ in (1, 2):
        bed.run(kernels.meet, round_, 2)
        sender = (bed.rank - 1) % bed.world
        row = bed.out[sender * kernels.SLOT :][:1024]
        assert torch.equal(row, pattern_of(sender, bed.rank, round_, 1))
        bed.comm.stream_barrier()
    bed.comm.barrier()


def whole(bed: Any) -> None:
    """A put that needs several packets, by helpers whose packets carry 4 KiB at most; and puts of nothing."""
    import kernels
    from bed import Bed
    from variants import variant

    changes = [("queue.py", "words.COPY_BYTES\n", "1 << 12\n"), ("queue.py", ">> 29", ">> 12")]
    nbytes = 2 * 4096 + 20
    with tempfile.TemporaryDirectory() as folder:
        small = Bed(bed.comm, variant(Path(folder), "small_packets", changes))
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        mine = small.data.tensor(2 * bed.world * kernels.SLOT, torch.uint8)
        mine[bed.rank * kernels.SLOT :][:nbytes] = source
        small.run(kernels.whole, 1, nbytes)
        landed = mine[(bed.world + bed.rank) * kernels.SLOT :]
        assert torch.equal(landed[:nbytes], source)
        assert not landed[nbytes : nbytes + 64].any()


CHECKS = (puts_fenced, puts_through, lanes, batch, loopback, push, pull, locked, meet, whole)


def checks(names: list[str]) -> list[str]:
    """On one rank: the names of what it has seen work."""
    import mori_shmem.device.flydsl as dev
    from bed import Bed

    ok = []
    with mori_shmem.init("rocm") as comm:
        bed = Bed(comm, dev)
        for check in CHECKS:
            if not names or check.__name__ in names:
                check(bed)
                ok.append(check.__name__)
    return ok


if __name__ == "__main__":
    found = mori_shmem.run_ranks(checks, int(sys.argv[1]), sys.argv[2:])
    for name in found[0]:
        if all(name in names for names in found):
            print(f"ok {name}", flush=True)
