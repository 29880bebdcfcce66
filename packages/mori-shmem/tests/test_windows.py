"""Windows: what they hold at first, who reaches what, and every address that is refused."""

import os

import mori_shmem
import pytest
from mori_shmem.errors import ArgumentError, ClosedError, CollectiveMismatch, LayoutError, PeerTimeout


def test_a_window_is_zero_aligned_and_reachable_from_every_rank() -> None:
    def rank() -> None:
        import torch

        with mori_shmem.init() as comm:
            window = comm.alloc(3 * 4096 + 100)
            assert window.nbytes == 3 * 4096 + 100
            handle = window.handle
            assert (handle.rank, handle.world_size) == (comm.rank, comm.world_size)
            assert handle.base % 256 == handle.stride % 256 == 0
            assert handle.stride >= window.nbytes
            whole = window.tensor(window.nbytes, torch.uint8)
            assert not whole.any()
            assert whole.data_ptr() == handle.base + comm.rank * handle.stride
            comm.barrier()
            mine = window.tensor((2, 3), torch.float32, 256)
            mine.copy_(torch.arange(6.0).view(2, 3) + 10 * comm.rank)
            comm.barrier()
            for peer in range(comm.world_size):
                theirs = window.peer(peer).tensor((2, 3), torch.float32, 256)
                assert theirs.tolist() == [
                    [10.0 * peer + i for i in (0, 1, 2)],
                    [10.0 * peer + i for i in (3, 4, 5)],
                ]
            comm.barrier()
            eights = window.tensor(16, torch.float8_e4m3fn, 1)  # any dtype, at its own alignment
            eights.copy_(torch.full((16,), 0.5))
            assert window.tensor(16, torch.uint8, 1).tolist() == [0x30] * 16
            assert window.tensor((0, 5), torch.float64).shape == (0, 5)

    mori_shmem.run_ranks(rank, 3)


def test_tensors_keep_the_memory_alive() -> None:
    def rank() -> None:
        import gc

        import torch

        comm = mori_shmem.init()
        window = comm.alloc(1 << 20)
        theirs = window.peer(1 - comm.rank).tensor(1 << 20, torch.uint8)
        window.tensor(1 << 20, torch.uint8).fill_(comm.rank + 1)
        comm.barrier()
        window.close()
        comm.close()
        del window, comm
        gc.collect()
        assert (theirs == 2 - int(os.environ["RANK"])).all()

    mori_shmem.run_ranks(rank, 2)


def test_sizes_that_differ_are_refused_on_all_ranks_and_the_odd_one_is_named() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            with pytest.raises(LayoutError, match=r"rank 1 asked for 8192 bytes; ranks \[0, 2\] for 4096"):
                comm.alloc(8192 if comm.rank == 1 else 4096)
            with pytest.raises(LayoutError, match=r"rank 2: nbytes=-5: a whole number of at least 1"):
                comm.alloc(-5 if comm.rank == 2 else 4096)
            with pytest.raises(LayoutError, match=r"rank 0: "):
                comm.alloc((1 << 62) if comm.rank == 0 else 4096)
            assert comm.alloc(4096).number == 0  # the refused ones left nothing behind

    mori_shmem.run_ranks(rank, 3)


def test_ranks_in_different_collectives_are_told_so() -> None:
    def rank() -> None:
        with (
            mori_shmem.init(timeout_s=20) as comm,
            pytest.raises(
                CollectiveMismatch, match=r"is in (alloc|all_gather) \(collective \d+\), rank \d in"
            ),
        ):
            _ = comm.alloc(64) if comm.rank == 1 else comm.all_gather(1)

    mori_shmem.run_ranks(rank, 2)


def test_all_gather_takes_any_object_of_any_size() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            for size in (0, 1, 1 << 22):  # the last does not fit into a socket's buffer
                gathered = comm.all_gather({"rank": comm.rank, "data": bytes([comm.rank]) * size})
                assert [g["rank"] for g in gathered] == list(range(comm.world_size))
                assert all(g["data"] == bytes([g["rank"]]) * size for g in gathered)

    mori_shmem.run_ranks(rank, 3)


@pytest.fixture(scope="module")
def comm():  # type: ignore[no-untyped-def]
    with mori_shmem.init(rank=0, world_size=1, name="test_windows") as comm:
        yield comm


def test_addresses_outside_are_refused_where_they_are_used(comm: mori_shmem.Communicator) -> None:
    import torch

    window, other = comm.alloc(4096), comm.alloc(4096)
    queue = comm.queue(0)
    at = window.at
    for bad, match in (
        (lambda: queue.put(at(4000), at(0), 97), "97 bytes at offset 4000 do not fit into window .*0..3999"),
        (lambda: queue.put(at(0), at(0) - 8, 8), "offset -8"),
        (lambda: queue.put(at(0), at(64) + 8192, 8), "offset 8256"),
        (lambda: queue.put(at(0), at(0), 5000), "none at this size"),
        (lambda: queue.put(at(0), at(32), 64), "overlap"),
        (lambda: queue.put_2d(at(0), at(2048), 64, 4, 32, 64), "rows would overlap"),
        (lambda: queue.put_2d(at(0), at(32), 64, 4, 128, 128), "overlap"),
        (lambda: queue.put_2d(at(0), at(2048), 1024, 4, 1024, 1024), "do not fit"),
        (lambda: queue.signal(at(4), 1), "multiple of 8"),
        (lambda: queue.signal(at(4092), 1), "do not fit"),
        (lambda: comm.wait(at(-8), 1), "offset -8"),
        (lambda: comm.read(at(12)), "multiple of 8"),
        (lambda: window.tensor(4097, torch.uint8), "do not fit"),
        (lambda: window.tensor(-1, torch.uint8), "shape"),
        (lambda: window.tensor(4, torch.float32, 2), "no multiple of 4"),
        (lambda: window.tensor(4, torch.uint8, -1), "do not fit"),
    ):
        with pytest.raises(LayoutError, match=match):
            bad()
    for bad, match in (
        (lambda: queue.put(12345, at(0), 8), "an address in a window is needed"),
        (lambda: queue.put(at(0), at(64), -1), "nbytes=-1"),
        (lambda: queue.put(at(0), at(64), 8.0), "nbytes=8.0"),
        (lambda: at("0"), "whole number of bytes"),
        (lambda: window.at(0, 1), r"ranks of this communicator are 0\.\.0"),
        (lambda: window.peer(-1), r"0\.\.0"),
        (lambda: queue.signal(at(0), -1), "value=-1"),
        (lambda: queue.signal(at(0), 1 << 64), "value="),
        (lambda: queue.signal(at(0), 1, op="max"), "op='max' is not known; allowed: set, add"),
        (lambda: queue.wait(at(0), 1 << 32), "compares the low 32 bits"),
        (lambda: queue.wait(at(0), 1, cmp="<"), "allowed: >=, =="),
        (lambda: comm.wait(at(0), 1, cmp="=>"), "allowed: <, <=, ==, !=, >=, >"),
        (lambda: comm.wait(at(0), 1, peer=7), r"peer 7: ranks of this communicator are 0\.\.0"),
        (lambda: comm.wait(at(0), 1, timeout_s=-1), "timeout_s=-1"),
        (lambda: queue.submit([]), "is no PutProgram"),
    ):
        with pytest.raises(ArgumentError, match=match):
            bad()
    other.close()
    with pytest.raises(ClosedError, match=r"closed"):
        queue.put(other.at(0), at(0), 8)
    with pytest.raises(ClosedError):
        other.tensor(1, torch.uint8)
    other.close()  # twice is fine


def test_another_communicators_window_is_refused(comm: mori_shmem.Communicator) -> None:
    with mori_shmem.init(rank=0, world_size=1, name="another") as another:
        window = another.alloc(64)
        with pytest.raises(ArgumentError, match=r"another communicator"):
            comm.queue(0).put(window.at(0), window.at(32), 8)
        with pytest.raises(ArgumentError, match=r"another communicator"):
            comm.signal(window.at(0), 1)


def test_references_count_in_bytes(comm: mori_shmem.Communicator) -> None:
    window = comm.alloc(4096)
    ref = window.at(64)
    assert ref + 8 == window.at(72)
    assert (ref - 64).address == window.handle.base
    assert ref + 8 != ref
    assert "at(64, peer=0)" in repr(ref)
    assert len({ref, window.at(64), ref + 1}) == 2


def test_a_collective_broken_off_in_the_middle_is_not_gone_on_with() -> None:
    """Rank 1 takes only a part of what rank 0 sends: what follows on that socket would be the rest of it."""

    def rank() -> None:
        import time

        with mori_shmem.init() as comm:
            if comm.rank == 0:
                with pytest.raises(PeerTimeout, match=r"rank 1 did not come within 0.5 s"):
                    comm.all_gather(bytes(64 << 20), timeout_s=0.5)
                with pytest.raises(CollectiveMismatch, match=r"broken off in the middle of a message"):
                    comm.all_gather(1)
            else:
                time.sleep(1.5)

    mori_shmem.run_ranks(rank, 2)
