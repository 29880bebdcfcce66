"""SH-1: sizes and offsets beyond 32 bits. The windows are sparse: only what is touched takes memory."""

import pathlib

import mori_shmem
import pytest

GIB = 1 << 30


def _available_gib() -> float:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / (1 << 20)
    return 0.0


pytestmark = pytest.mark.skipif(
    _available_gib() < 6, reason=f"needs 6 GiB of free memory, there are {_available_gib():.1f}"
)


def test_SH_1_one_put_of_more_than_a_gibibyte() -> None:
    """Byte i is (i * 131) mod 251, 2^30 + 16 bytes in one put: the last 16 included."""

    def rank() -> None:
        import torch

        nbytes = GIB + 16
        with mori_shmem.init(timeout_s=60) as comm:
            window = comm.alloc(nbytes)
            # The sequence repeats after 251 bytes: built by copying, in chunks of whole periods.
            period = (torch.arange(251) * 131 % 251).to(torch.uint8)
            chunk = period.repeat(1 << 16)
            if comm.rank == 0:
                _fill(window.tensor(nbytes, torch.uint8), chunk)
                comm.queue(1).put(window.at(0, 1), window.at(0), nbytes)
                comm.queue(1).quiet(60)
            comm.barrier(60)
            if comm.rank == 1:
                landed = window.tensor(nbytes, torch.uint8)
                for begin in range(0, nbytes, chunk.numel()):
                    piece = landed[begin : begin + chunk.numel()]
                    assert torch.equal(piece, chunk[: piece.numel()]), begin
                assert landed[-16:].tolist() == [i * 131 % 251 for i in range(GIB, GIB + 16)]

    def _fill(tensor, chunk) -> None:  # type: ignore[no-untyped-def]
        for begin in range(0, tensor.numel(), chunk.numel()):
            piece = tensor[begin : begin + chunk.numel()]
            piece.copy_(chunk[: piece.numel()])

    mori_shmem.run_ranks(rank, 2, timeout_s=120)


def test_SH_1_offsets_beyond_2_31_and_2_32() -> None:
    """4096 bytes to 2^31 + 4096, then to 2^32 + 4096; offset 4096, where the latter would wrap to, stays as
    it was."""

    def rank() -> None:
        import torch

        with mori_shmem.init() as comm:
            window = comm.alloc(9 * GIB // 2)
            peer = 1 - comm.rank
            here = window.tensor(4096, torch.uint8, 4096)
            here.copy_(torch.full((4096,), 77 + comm.rank))
            for step, offset in enumerate((2**31 + 4096, 2**32 + 4096), start=1):
                source = window.tensor(4096, torch.uint8, 1 << 16)
                source.copy_((torch.arange(4096) * 131 + step + comm.rank) % 251)
                comm.barrier()
                queue = comm.queue(peer)
                queue.put(window.at(offset, peer), window.at(1 << 16), 4096)
                queue.signal(window.at(offset + 4096, peer), step)
                comm.wait(window.at(offset + 4096), step, peer=peer)
                landed = window.tensor(4096, torch.uint8, offset)
                assert torch.equal(landed, ((torch.arange(4096) * 131 + step + peer) % 251).to(torch.uint8))
                assert (here == 77 + comm.rank).all()
                comm.barrier()

    mori_shmem.run_ranks(rank, 2)
