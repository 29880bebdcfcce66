"""SH-7: when a rank dies, the others fail soon, name it, and end by themselves, leaving nothing."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import mori_shmem
import pytest
from mori_shmem.errors import PeerDied, RankFailed
from mori_shmem.testing import allowing_for_load, die, open_fds, run_ranks_to_the_end

NOTICE_S = 2.0  # on an idle machine; what is late would take 30


def _wait(comm: Any, window: Any) -> None:
    comm.wait(window.at(0), 1, peer=comm.world_size - 1, what="news", timeout_s=30)


def _wait_for_the_living(comm: Any, window: Any) -> None:
    comm.wait(window.at(0), 1, peer=(comm.rank + 1) % (comm.world_size - 1), what="news", timeout_s=30)


def _wait_for_anybody(comm: Any, window: Any) -> None:
    comm.wait(window.at(0), 1, timeout_s=30)


def _barrier(comm: Any, window: Any) -> None:
    comm.barrier()


def _alloc(comm: Any, window: Any) -> None:
    comm.alloc(4096)


def _all_gather(comm: Any, window: Any) -> None:
    comm.all_gather("hello")


def _self_test(comm: Any, window: Any) -> None:
    comm.self_test()


def _quiet(comm: Any, window: Any) -> None:
    queue = comm.queue(comm.world_size - 1)
    queue.wait(window.at(8), 1)  # the flag that the dead rank would have set
    queue.quiet(30)


def _named_memory() -> set[str]:
    """What looks like ours in the places where named shared memory lives (other programs use them, too)."""
    return {name for place in ("/dev/shm", "/tmp") for name in os.listdir(place) if "mori-shmem" in name}


CALLS = {
    call.__name__[1:]: call
    for call in (
        _wait,
        _wait_for_the_living,
        _wait_for_anybody,
        _barrier,
        _alloc,
        _all_gather,
        _self_test,
        _quiet,
    )
}


@pytest.mark.parametrize(
    ("call", "world_size"),
    [*((call, 2) for call in CALLS), ("barrier", 4), ("wait", 8), ("self_test", 8)],
)
def test_SH_7_a_killed_rank_is_named_within_two_seconds(
    call: str, world_size: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    named = _named_memory()

    def rank(call: str) -> tuple[str, tuple[int, ...], float, int]:
        comm = mori_shmem.init()
        window = comm.alloc(4096)
        died_at = comm.alloc(8)  # told to all beforehand, so that they can say how long it took
        comm.barrier()
        if comm.rank == comm.world_size - 1:
            time.sleep(0.3)  # the others are waiting by then
            for peer in range(comm.world_size):
                died_at.peer(peer).tensor(1, __import__("torch").int64).fill_(time.monotonic_ns())
            die()
        with pytest.raises(PeerDied) as gone:
            CALLS[call](comm, window)
        took_s = (time.monotonic_ns() - comm.read(died_at.at(0))) / 1e9
        # Not closed on purpose: the process must end by itself all the same.
        return str(gone.value), gone.value.peers, took_s, os.getpid()

    began = time.monotonic()
    outcomes = run_ranks_to_the_end(rank, world_size, call, timeout_s=60)
    assert time.monotonic() - began < 30
    last = world_size - 1
    assert isinstance(outcomes[last].error, RankFailed)
    for outcome in outcomes[:last]:
        if outcome.error is not None:
            raise outcome.error
        message, peers, took_s, _ = outcome.value
        assert peers == (last,)
        assert f"rank {last} died" in message
        assert took_s < allowing_for_load(NOTICE_S)
    assert list(tmp_path.iterdir()) == []
    assert _named_memory() == named
    pids = [outcome.value[3] for outcome in outcomes[:last]]
    assert not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]


WAITING = textwrap.dedent("""
    import os, time, mori_shmem
    comm = mori_shmem.init(timeout_s=60)
    window = comm.alloc(4096)
    comm.barrier()
    print("ready", flush=True)
    if comm.rank == 0:
        comm.wait(window.at(0), 1, peer=1)
    time.sleep(100)
""")


def test_SH_7_a_survivor_started_by_hand_ends_by_itself() -> None:
    """Plain processes, no launcher that would end them: the exit status, and the time it takes to end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    survivor, victim = ranks
    try:
        assert [process.stdout.readline() for process in ranks if process.stdout] == ["ready\n"] * 2
        time.sleep(0.3)
        victim.kill()
        killed_at = time.monotonic()
        _, stderr = survivor.communicate(timeout=60)
        assert time.monotonic() - killed_at < allowing_for_load(10)
        assert survivor.returncode == 1
        assert "PeerDied" in stderr
        assert "rank 1 died" in stderr
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_living_rank_may_still_write_where_another_has_died() -> None:
    """It gets a second after each wait has begun; a word that has come is never lost to a death."""

    def rank() -> list[int]:
        comm = mori_shmem.init("host", timeout_s=30)
        window = comm.alloc(4096)
        comm.barrier()
        if comm.rank == 2:
            die()
        seen = []
        for value in range(1, 4):
            if comm.rank == 1:
                time.sleep(0.3)
                comm.signal(window.at(0, 0), value)
            else:
                seen.append(comm.wait(window.at(0), value, peer=1))
        comm.close()
        return seen

    first, second, _ = run_ranks_to_the_end(rank, 3, timeout_s=60)
    assert (first.value, second.value) == ([1, 2, 3], []), (first.error, second.error)


def test_a_rank_that_left_is_told_from_one_that_died() -> None:
    def rank() -> None:
        comm = mori_shmem.init()
        window = comm.alloc(4096)
        comm.barrier()
        if comm.rank == 1:
            comm.signal(window.at(0, 0), 5)
            comm.close()
            time.sleep(1)
            return
        assert comm.wait(window.at(0), 5, peer=1) == 5  # what it wrote before it left counts
        for call in (
            lambda: comm.wait(window.at(0), 6, peer=1),
            comm.barrier,
            lambda: comm.all_gather(1),
            lambda: comm.alloc(64),
        ):
            with pytest.raises(PeerDied, match=r"rank 1 left \(closed the communicator\)") as gone:
                call()
            assert gone.value.peers == (1,)
        comm.close()

    mori_shmem.run_ranks(rank, 2)


def test_a_closing_rank_finishes_what_its_queues_hold() -> None:
    def rank() -> None:
        import torch

        nbytes = 32 << 20
        comm = mori_shmem.init()
        window = comm.alloc(2 * nbytes + 64)
        if comm.rank == 1:
            window.tensor(nbytes, torch.uint8).fill_(9)
            comm.queue(0).put(window.at(nbytes, 0), window.at(0), nbytes)
            comm.queue(0).signal(window.at(2 * nbytes, 0), 1)
        else:
            comm.wait(window.at(2 * nbytes), 1, peer=1)
            assert (window.tensor(nbytes, torch.uint8, nbytes) == 9).all()
        comm.close()

    mori_shmem.run_ranks(rank, 2)


def test_a_fork_that_holds_the_sockets_does_not_hide_the_death() -> None:
    """A dead rank's children (a data loader, say) live on: the peers must notice all the same."""

    def rank() -> None:
        comm = mori_shmem.init()
        if comm.rank == 1:
            if os.fork() == 0:
                time.sleep(40)
                os._exit(0)
            sockets = [sock.fileno() for sock in comm._mesh._sockets.values()]
            subprocess.Popen(
                ["sleep", "40"], pass_fds=sockets
            )  # these stay open: no end of the connection is seen
            time.sleep(0.2)
            die()
        began = time.monotonic()
        with pytest.raises(PeerDied, match=r"rank 1 died"):
            comm.all_gather(1)
        assert time.monotonic() - began < allowing_for_load(2.5)

    outcomes = run_ranks_to_the_end(rank, 2)
    assert outcomes[0].error is None, outcomes[0].error


def test_ctrl_c_ends_a_wait() -> None:
    def rank() -> float:
        import signal

        comm = mori_shmem.init()
        window = comm.alloc(64)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            comm.wait(window.at(0), 1, timeout_s=60)
        return time.monotonic() - began

    assert mori_shmem.run_ranks(rank, 1)[0] < allowing_for_load(2)


def test_nothing_is_named_while_it_runs() -> None:
    def paths() -> set[str]:
        mapped = pathlib.Path("/proc/self/maps").read_text().splitlines()
        return {*open_fds().values(), *(line.split(None, 5)[5] for line in mapped if line.count(" ") > 5)}

    def rank() -> list[str]:
        before = paths()
        with mori_shmem.init() as comm:
            window = comm.alloc(1 << 20)  # given back when nobody holds it
            comm.queue(0)
            comm.barrier()
            new = paths() - before
            comm.barrier()
            window.close()
        return sorted(path.strip() for path in new)

    for new in mori_shmem.run_ranks(rank, 2):
        files = [path for path in new if path.startswith("/")]
        assert len(files) >= 2
        assert all(path.startswith("/memfd:mori") and path.endswith("(deleted)") for path in files), files
