"""How ranks meet: every way in, who is missing, who is refused, and what a second init does."""

import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mori_shmem
import pytest
from mori_shmem.errors import (
    AlreadyInitialised,
    ArgumentError,
    ClosedError,
    ForkedError,
    PeerDied,
    PeerTimeout,
    TransportInert,
)
from mori_shmem.testing import allowing_for_load, die, open_fds, run_ranks_to_the_end


def greet(comm: Any) -> None:
    """Prove that the communicator works: everybody writes its rank to everybody."""
    import torch

    window = comm.alloc(8 * comm.world_size)
    for peer in range(comm.world_size):
        comm.signal(window.at(8 * comm.rank, peer), 100 + comm.rank)
    for peer in range(comm.world_size):
        comm.wait(window.at(8 * peer), 100 + peer, peer=peer)
    got = window.tensor(comm.world_size, torch.int64).tolist()
    assert got == [100 + peer for peer in range(comm.world_size)]
    comm.barrier()


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_from_the_launchers_variables(world_size: int) -> None:
    def rank() -> tuple[int, int, str]:
        with mori_shmem.init() as comm:
            greet(comm)
            return comm.rank, comm.world_size, comm.backend

    assert mori_shmem.run_ranks(rank, world_size) == [(r, world_size, "host") for r in range(world_size)]


TORCHRUN_SCRIPT = textwrap.dedent("""
    import torch.distributed as dist
    import mori_shmem
    with mori_shmem.init() as comm:
        comm.self_test()
        dist.init_process_group("gloo")     # beside it, over the same store
        assert dist.get_rank() == comm.rank
        with mori_shmem.init(group=dist.group.WORLD) as second:
            assert second.all_gather(comm.rank) == list(range(comm.world_size))
        dist.destroy_process_group()
    print(f"rank {comm.rank} done", flush=True)
""")


def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):  # one pipe: a line's end may come after the other's text
        assert done.stdout.count(f"rank {rank} done") == 1


def test_from_process_groups_and_disjoint_subgroups() -> None:
    def rank() -> list[Any]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        groups = [dist.new_group([0, 1]), dist.new_group([3, 2])]
        me = dist.get_rank()
        mine, other = groups if me < 2 else reversed(groups)
        with pytest.raises(ArgumentError, match=r"no process group that this rank is in"):
            mori_shmem.init(group=other)
        with mori_shmem.init(group=mine) as pair, mori_shmem.init() as world:
            greet(pair)
            greet(world)
            assert world.world_size == 4
            assert pair.rank == dist.get_rank(mine)
            members: list[Any] = pair.all_gather(me)
        dist.destroy_process_group()
        return members

    assert mori_shmem.run_ranks(rank, 4)[::2] == [[0, 1], [2, 3]]


def test_from_rank_world_size_and_store() -> None:
    def rank(path: str) -> None:
        from torch.distributed import FileStore

        me = int(os.environ.pop("RANK"))
        store = FileStore(path, 2)
        with mori_shmem.init(rank=1 - me, world_size=2, store=store) as comm:
            assert comm.rank == 1 - me
            greet(comm)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mori_shmem.run_ranks(rank, 2, f"{folder}/store")


def test_one_rank_needs_no_store() -> None:
    with mori_shmem.init(rank=0, world_size=1) as comm:
        greet(comm)


def test_SH_6_a_rank_that_never_starts_is_named_at_the_limit() -> None:
    """The limit set by argument, in a run beside it by environment variable; and once by hand, where it is
    rank 0 that never comes and nobody keeps the store."""

    def rank(how: str) -> tuple[float, str]:
        if os.environ["RANK"] == "2":
            return 0.0, ""  # never comes
        if how == "environment":
            os.environ["MORI_TIMEOUT_S"] = "5"
        began = time.monotonic()
        with pytest.raises(PeerTimeout) as late:
            mori_shmem.init(timeout_s=5 if how == "argument" else None)
        assert late.value.peers == (2,)
        return time.monotonic() - began, str(late.value)

    by_hand = subprocess.Popen(
        [sys.executable, "-c", "import mori_shmem; mori_shmem.init(timeout_s=1)"],
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda how: mori_shmem.run_ranks(rank, 3, how), ("argument", "environment")))
    for took_s, message in (*runs[0][:2], *runs[1][:2]):
        assert 5 <= took_s <= 5 + allowing_for_load(5)
        for part in (
            "rank 2 did not come",
            "rendezvous of init",
            "within 5 s",
            "timeout_s=",
            "MORI_TIMEOUT_S",
        ):
            assert part in message
    _, stderr = by_hand.communicate(timeout=60)
    assert by_hand.returncode == 1
    assert "PeerTimeout" in stderr
    assert "rank 0 has not come to init" in stderr


def test_a_rank_that_dies_during_init_is_named_at_once() -> None:
    def rank() -> None:
        from mori_shmem import comm

        if os.environ["RANK"] == "1":
            comm.Mesh = lambda *args: die()  # after the rendezvous, before the first exchange
        mori_shmem.init()

    began = time.monotonic()
    outcomes = run_ranks_to_the_end(rank, 3)
    assert time.monotonic() - began < min(allowing_for_load(8), 25)  # and not 30
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, PeerDied)
        assert outcome.error.peers == (1,)


def test_ranks_of_different_machines_are_refused() -> None:
    def rank() -> None:
        from mori_shmem import rendezvous

        if os.environ["RANK"] == "1":
            rendezvous._this_host = lambda: ("elsewhere", "far-away")
        with pytest.raises(
            TransportInert, match=r"rank \d runs on .*joins the processes of one machine only"
        ):
            mori_shmem.init()

    mori_shmem.run_ranks(rank, 2)


def test_a_stranger_at_the_door_is_ignored() -> None:
    """Somebody who connects to a rank's address without knowing its token is hung up on; the ranks still
    meet."""

    def rank() -> None:
        import socket

        from mori_shmem import rendezvous

        honest = rendezvous._call

        def call(place: Any, peer: int, card: Any, deadline: Any) -> Any:
            for said in (b"", b"x" * 36, b"0" * 200, rendezvous._HELLO.pack(b"0" * 32, place.rank)):
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect("\0" + card.address)
                    stranger.sendall(said)
            return honest(place, peer, card, deadline)

        rendezvous._call = call
        with mori_shmem.init(timeout_s=20) as comm:
            greet(comm)

    mori_shmem.run_ranks(rank, 3)


def test_wrong_ways_in_are_refused_with_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ArgumentError, match=r"RANK and WORLD_SIZE not set.*torchrun or mori_shmem.run_ranks"):
        mori_shmem.init()
    with pytest.raises(ArgumentError, match=r"rank 2 of 2 ranks"):
        mori_shmem.init(rank=2, world_size=2, store=object())
    with pytest.raises(ArgumentError, match=r"both are needed"):
        mori_shmem.init(rank=0)
    with pytest.raises(ArgumentError, match=r"2 ranks need store="):
        mori_shmem.init(rank=0, world_size=2)
    with pytest.raises(ArgumentError, match=r"give one or the other"):
        mori_shmem.init(rank=0, world_size=1, group=object())
    with pytest.raises(ArgumentError, match=r"backend='gpu' is not known; allowed: auto, host, cuda, rocm"):
        mori_shmem.init("gpu", rank=0, world_size=1)
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match=r"RANK='first' is not a whole number"):
        mori_shmem.init()


def test_GA_6_a_transport_that_is_not_there_is_refused_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")  # also where there are AMD GPUs
    with pytest.raises(TransportInert, match=r"the rocm backend needs (libamdhip64|a GPU)"):
        mori_shmem.init("rocm", rank=0, world_size=1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(TransportInert, match="the cuda backend needs torch with CUDA and a visible GPU"):
        mori_shmem.init("cuda", rank=0, world_size=1)


def test_different_world_sizes_are_refused_on_all_ranks() -> None:
    def rank(path: str) -> None:
        from torch.distributed import FileStore

        me = int(os.environ["RANK"])
        with pytest.raises(ArgumentError, match=r"was given world_size=[23], rank [01] [32]"):
            mori_shmem.init(rank=me, world_size=2 + (me == 1), store=FileStore(path, 3), timeout_s=3)
        # The rank that believes in three ranks waits for the third in vain before it can say so.

    def lonely(path: str) -> None:
        if os.environ["RANK"] == "1":
            from torch.distributed import FileStore

            with pytest.raises(PeerTimeout, match=r"rank 2 did not come"):
                mori_shmem.init(rank=1, world_size=3, store=FileStore(path, 3), timeout_s=1)
        else:
            rank(path)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mori_shmem.run_ranks(lonely, 2, f"{folder}/store")


# ---- more than one communicator ----


def test_SH_3_a_second_init_raises_and_use_after_close_raises() -> None:
    def rank() -> None:
        comm = mori_shmem.init()
        for arguments in ({}, {"timeout_s": 5}):
            with pytest.raises(AlreadyInitialised, match=r"Use that one, close.. it first"):
                mori_shmem.init(**arguments)
        window, queue = comm.alloc(64), comm.queue(0)
        tensor = window.tensor(8, __import__("torch").int64)
        greet(comm)  # the refused ones did it no harm
        comm.close()
        comm.close()
        assert comm.closed
        uses = (
            lambda: comm.alloc(8),
            lambda: comm.queue(0),
            comm.barrier,
            lambda: comm.all_gather(1),
            lambda: comm.wait(window.at(0), 0),
            lambda: comm.signal(window.at(0), 1),
            lambda: comm.read(window.at(0)),
            lambda: window.tensor(1, __import__("torch").int64),
            lambda: queue.put(window.at(0), window.at(8), 8),
            queue.quiet,
            comm.self_test,
        )
        for use in uses:
            with pytest.raises(ClosedError):
                use()
        tensor.fill_(7)  # what was handed out stays valid memory
        assert tensor.sum() == 56
        with mori_shmem.init() as again:
            greet(again)

    mori_shmem.run_ranks(rank, 2)


def test_SH_3_create_put_destroy_200_times_gives_everything_back() -> None:
    def once(i: int) -> None:
        import torch

        with mori_shmem.init() as comm:
            window = comm.alloc(1 << 16)
            peer = 1 - comm.rank
            window.tensor(16, torch.int64).fill_(i)
            comm.barrier()
            queue = comm.queue(peer)
            queue.put(window.at(1024, peer), window.at(0), 128)
            queue.signal(window.at(4096, peer), i)
            comm.wait(window.at(4096), i, peer=peer)
            assert window.tensor(16, torch.int64, 1024).tolist() == [i] * 16
            comm.barrier()

    def rank() -> None:
        def used() -> tuple[int, int, int]:
            resident_kib = next(
                int(line.split()[1])
                for line in pathlib.Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmRSS")
            )
            threads = len(os.listdir("/proc/self/task"))
            return len(open_fds()), threads, resident_kib

        shm_before = os.listdir("/dev/shm")
        for i in range(1, 201):
            once(i)
            if i == 5:
                fds, threads, resident_kib = used()
        fds_after, threads_after, resident_kib_after = used()
        assert fds_after <= fds + 2, open_fds()
        assert threads_after <= threads + 2
        assert resident_kib_after - resident_kib < 16 * 1024
        assert os.listdir("/dev/shm") == shm_before

    mori_shmem.run_ranks(rank, 2)


def test_SH_2_two_communicators_side_by_side_keep_their_values_apart() -> None:
    def rank() -> None:
        import torch

        a, b = mori_shmem.init(name="a"), mori_shmem.init(name="b")
        windows = {comm: comm.alloc(4096) for comm in (a, b)}

        def exchange(comm: Any, number: int, value: int) -> None:
            window, peer = windows[comm], 1 - comm.rank
            window.tensor(8, torch.int64).fill_(value)
            queue = comm.queue(peer)
            queue.put(window.at(1024, peer), window.at(0), 64)
            queue.signal(window.at(2048, peer), number)
            comm.wait(window.at(2048), number, peer=peer)
            assert window.tensor(8, torch.int64, 1024).tolist() == [value] * 8
            comm.barrier()

        for i in range(1, 201):
            exchange(a, i, 2 * i)
            exchange(b, i, 2 * i + 1)
        a.close()
        for i in range(201, 251):
            exchange(b, i, 2 * i + 1)
        b.close()

    mori_shmem.run_ranks(rank, 2)


def test_SH_2_eight_threads_may_make_communicators_at_once() -> None:
    def rank() -> int:
        made: list[Any] = []
        refused: list[BaseException] = []

        def make(name: str) -> None:
            try:
                comm = mori_shmem.init(name=name)
                greet(comm)
                made.append(comm)
            except AlreadyInitialised as error:
                refused.append(error)

        def all_at_once(names: list[str]) -> None:
            threads = [threading.Thread(target=make, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        all_at_once([str(i) for i in range(8)])
        assert len(made) == 8
        all_at_once(["same"] * 8)  # the same identity: one of them gets it, the others a named error
        assert (len(made), len(refused)) == (9, 7)
        for comm in made:
            comm.close()
        return len(made)

    assert mori_shmem.run_ranks(rank, 2) == [9, 9]


def test_a_forked_child_is_refused_and_can_make_its_own() -> None:
    def rank() -> None:
        comm = mori_shmem.init()
        window = comm.alloc(64)
        comm.barrier()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for use in (comm.barrier, lambda: comm.alloc(8), lambda: comm.signal(window.at(0), 1)):
                    with pytest.raises(ForkedError, match=r"forked child"):
                        use()
                comm.close()  # does nothing to the parent's
                with mori_shmem.init(rank=0, world_size=1) as own:
                    greet(own)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        greet(comm)
        comm.close()

    mori_shmem.run_ranks(rank, 2)
