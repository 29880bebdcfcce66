"""run_ranks: values, failures, limits, and that nothing is left behind."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import mori_shmem
import pytest
from mori_shmem.errors import ArgumentError, RankFailed, RunTimeout
from mori_shmem.launch import preload
from mori_shmem.testing import allowing_for_load, die, run_ranks_to_the_end

HERE = os.getpid()


def my_rank() -> int:
    return int(os.environ["RANK"])


def _ended(pid: int, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not pathlib.Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


def test_values_come_back_in_rank_order() -> None:
    offset = 10

    def square(x: int) -> tuple[int, int]:  # a closure, of a module that ranks cannot import
        return my_rank() + offset, x * x

    assert mori_shmem.run_ranks(square, 5, 3) == [(10 + rank, 9) for rank in range(5)]
    assert mori_shmem.run_ranks(lambda: os.getpid() != HERE, 1) == [True]


def test_a_function_may_name_torchs_operators() -> None:
    """torch.ops is a module of a class of its own, which cloudpickle takes for data once it is imported."""
    import torch
    import torch.ops

    def add() -> float:
        return torch.ops.aten.add(torch.ones(1), torch.ones(1)).item()

    assert mori_shmem.run_ranks(add, 2) == [2.0, 2.0]


def test_ranks_see_what_torchrun_would_set() -> None:
    def surroundings() -> dict[str, str]:
        import torch

        assert torch.get_num_threads() == 1
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        return {name: os.environ[name] for name in names} | {"cwd": os.getcwd(), "mine": os.environ["MINE"]}

    os.environ["MINE"] = "set after the server started"
    seen = mori_shmem.run_ranks(surroundings, 2)[1]
    assert seen["cwd"] == os.getcwd()
    assert seen["mine"] == "set after the server started"
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == ("1", "1", "2")


def test_torch_distributed_works_in_them_side_by_side() -> None:
    def summed() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.full((4,), float(dist.get_rank()))
        dist.all_reduce(x)
        dist.destroy_process_group()
        return float(x[0])

    results: list[list[float]] = []
    runs = [
        threading.Thread(target=lambda: results.append(mori_shmem.run_ranks(summed, 3))) for _ in range(3)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert results == [[3.0] * 3] * 3


def test_the_first_failure_is_raised_with_its_traceback_and_the_rest_are_ended() -> None:
    def rank(folder: str) -> None:
        pathlib.Path(folder, str(os.getpid())).touch()
        if my_rank() == 2:
            while len(os.listdir(folder)) < 4:
                time.sleep(0.01)
            raise KeyError(f"the real reason, at {time.monotonic()}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that must be killed
        time.sleep(60)

    with pytest.raises(KeyError, match=r"the real reason") as failed:
        mori_shmem.run_ranks(rank, 4, str(_scratch()))
    took_s = time.monotonic() - float(failed.value.args[0].split()[-1])
    assert took_s < allowing_for_load(5)  # 1.1 on an idle machine
    (note,) = failed.value.__notes__
    assert note.startswith("raised by rank 2 of 4:")
    assert "in rank" in note
    pids = [int(p.name) for p in _scratch().iterdir()]
    assert len(pids) == 4
    assert all(_ended(pid) for pid in pids)


_SCRATCH: list[pathlib.Path] = []


@pytest.fixture(autouse=True)
def scratch(tmp_path: pathlib.Path) -> None:
    _SCRATCH[:] = [tmp_path]


def _scratch() -> pathlib.Path:
    return _SCRATCH[0]


def test_a_killed_rank_is_named_with_its_signal_and_a_crash_with_its_stack() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 3 was killed by signal 9 \(SIGKILL\)"):
        mori_shmem.run_ranks(lambda: die() if my_rank() == 1 else time.sleep(60), 3)

    def segfault() -> None:
        if my_rank() == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    with pytest.raises(RankFailed, match=r"signal 11 \(SIGSEGV\)") as crashed:
        mori_shmem.run_ranks(segfault, 2)
    assert "in segfault" in str(crashed.value)


def test_the_cause_is_raised_not_the_complaint_about_it() -> None:
    def rank() -> None:
        from mori_shmem.errors import PeerDied

        mori_shmem.init().barrier()  # both are there: the grace is not for slow starts
        if my_rank() == 0:
            raise PeerDied("rank 1 died", rank=0, peers=[1])
        time.sleep(0.2)
        raise ValueError("why rank 1 went")

    with pytest.raises(ValueError, match=r"why rank 1 went") as failed:
        mori_shmem.run_ranks(rank, 2)
    assert any("rank 0 also failed: PeerDied" in note for note in failed.value.__notes__)


def test_errors_that_cannot_travel_still_arrive_as_text() -> None:
    def rank() -> None:
        class Local(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__(f"{a} {b}")

        raise Local(1, 2)

    with pytest.raises(RankFailed, match=r"(?s)raised by rank 0 of 1.*Local: 1 2"):
        mori_shmem.run_ranks(rank, 1)
    with pytest.raises(RankFailed, match=r"exited with status|SystemExit"):
        mori_shmem.run_ranks(lambda: sys.exit(3), 1)
    assert mori_shmem.run_ranks(lambda: sys.exit(0), 1) == [None]


def test_a_run_has_a_limit_and_says_where_the_ranks_stood() -> None:
    def stuck() -> None:
        if my_rank() != 1:
            time.sleep(60)

    mori_shmem.run_ranks(lambda: None, 3)  # starts the server, which imports torch
    began = time.monotonic()
    with pytest.raises(RunTimeout) as late:
        mori_shmem.run_ranks(stuck, 3, timeout_s=6.0)
    assert time.monotonic() - began < 6 + allowing_for_load(6)
    assert late.value.ranks == (0, 2)
    assert str(late.value).count("in stuck") == 2


def test_what_ranks_started_does_not_outlive_them() -> None:
    def rank() -> int:
        return subprocess.Popen(["sleep", "60"], start_new_session=True).pid

    assert all(_ended(pid) for pid in mori_shmem.run_ranks(rank, 2))


def test_every_outcome_is_there_when_the_run_goes_to_its_end() -> None:
    def rank() -> int:
        if my_rank() == 0:
            die()
        if my_rank() == 1:
            raise ValueError("one")
        return 2

    killed, raised, returned = run_ranks_to_the_end(rank, 3)
    assert isinstance(killed.error, RankFailed)
    assert killed.error.exit_code == -signal.SIGKILL
    assert isinstance(raised.error, ValueError)
    assert (returned.error, returned.value) == (None, 2)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, 5000])
def test_world_size_is_checked(world_size: int) -> None:
    with pytest.raises(ArgumentError, match=r"world_size"):
        mori_shmem.run_ranks(my_rank, world_size)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e12, "3", True])
def test_a_limit_is_checked(timeout_s: float) -> None:
    with pytest.raises(ArgumentError, match=r"timeout_s"):
        mori_shmem.run_ranks(my_rank, 1, timeout_s=timeout_s)


def test_scripts_need_no_guard_and_the_prompt_works_too() -> None:
    """A script without `if __name__ == "__main__"` whose main module must not run again, then typed-in
    lines."""
    path = _scratch() / "script.py"
    path.write_text(
        textwrap.dedent("""
        import mori_shmem, os
        print("main module")
        print(mori_shmem.run_ranks(lambda: int(os.environ["RANK"]), 2))
        """)
    )
    typed = "def f(): return 7\n\nprint(mori_shmem.run_ranks(f, 2))\n"
    done = subprocess.run(
        [sys.executable, "-i", str(path)], input=typed, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines() == ["main module", "[0, 1]", "[7, 7]"], done.stderr


_LONG_RUN = """
    import mori_shmem, os, time
    def rank(folder):
        open(f"{folder}/{os.getpid()}", "w").close()
        time.sleep(100)
    mori_shmem.run_ranks(rank, 3, FOLDER)
"""


def test_nothing_outlives_the_caller() -> None:
    """Two callers at once; one is interrupted, the other killed."""
    ends = (signal.SIGINT, signal.SIGKILL)
    callers = []
    for end in ends:
        (folder := _scratch() / end.name).mkdir()
        code = textwrap.dedent(_LONG_RUN).replace("FOLDER", repr(str(folder)))
        callers.append(subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True))
    for end, caller in zip(ends, callers, strict=True):
        while len(pids := [int(p.name) for p in (_scratch() / end.name).iterdir()]) < 3:
            time.sleep(0.02)
        (supervisor,) = {_parent(pid) for pid in pids}
        server = _parent(supervisor)
        caller.send_signal(end)
        _, stderr = caller.communicate(timeout=10)
        assert caller.returncode != 0
        assert ("KeyboardInterrupt" in stderr) == (end == signal.SIGINT)
        assert [pid for pid in (*pids, supervisor, server) if not _ended(pid, 4.0)] == []


def _parent(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_killed_server_is_replaced() -> None:
    def supervisor() -> int:
        return os.getppid()

    (first,) = set(mori_shmem.run_ranks(supervisor, 2))
    from mori_shmem.launch import client

    assert client._server._process is not None
    os.kill(client._server._process.pid, signal.SIGKILL)
    client._server._process.wait()
    (second,) = set(mori_shmem.run_ranks(supervisor, 2))
    assert second != first
    assert _ended(first)


def test_ranks_die_with_their_supervisor() -> None:
    def rank(folder: str) -> None:
        pathlib.Path(folder, str(os.getpid())).touch()
        if my_rank() == 0:
            while len(os.listdir(folder)) < 2:
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankFailed, match=r"supervises the ranks ended unexpectedly"):
        mori_shmem.run_ranks(rank, 2, str(_scratch()))
    assert all(_ended(int(p.name)) for p in _scratch().iterdir())


def test_torch_is_imported_once_for_all_ranks() -> None:
    """Eight ranks start in 0.2 s on two idle cores, because each finds torch imported; alone it takes 2.5
    s."""

    def rank() -> tuple[bool, float]:
        found = "torch" in sys.modules
        began = time.thread_time()
        import torch  # noqa: F401

        return found, time.thread_time() - began

    for found, took_s in mori_shmem.run_ranks(rank, 8):
        assert found
        assert took_s < 0.1


def test_modules_named_for_it_are_there_before_the_ranks_are() -> None:
    """The next run has them, also where a server was running; one that is broken is the rank's to report."""

    def rank() -> list[str]:
        return [name for name in ("wave", "no_such_module") if name in sys.modules]

    assert mori_shmem.run_ranks(rank, 2) == [[], []]
    preload("wave", "no_such_module")
    assert mori_shmem.run_ranks(rank, 2) == [["wave"], ["wave"]]


def test_ranks_are_not_forked_from_a_process_with_other_threads() -> None:
    """A program of its own: a test runner may have threads."""
    program = textwrap.dedent("""
        import threading
        import torch.distributed  # once, and not in each rank
        from mori_shmem.errors import ArgumentError
        from mori_shmem.testing import run_ranks_to_the_end

        made_here = 6
        end = threading.Event()
        watcher = threading.Thread(target=end.wait, name="watcher")
        watcher.start()
        try:
            run_ranks_to_the_end(lambda: made_here, 1, from_here=True)
        except ArgumentError as refusal:
            print(refusal)
        end.set()
        watcher.join()
        print([outcome.value for outcome in run_ranks_to_the_end(lambda: made_here, 2, from_here=True)])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    refusal, values = done.stdout.splitlines()
    assert "other threads (watcher)" in refusal, done
    assert "join them first" in refusal
    assert values == "[6, 6]"


def test_a_module_that_exits_is_left_to_the_ranks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mori_test_exits.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    preload("mori_test_exits")
    assert mori_shmem.run_ranks(my_rank, 2) == [0, 1]
    with pytest.raises(ArgumentError, match=r"preload\(7\): names of modules"):
        preload(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("native", [False, True], ids=["Python's", "native"])
def test_a_module_that_starts_threads_is_refused_by_name(
    native: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = """
        import threading
        threading.Thread(target=threading.Event().wait, name="heartbeat", daemon=True).start()
    """
    of_c = """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)
    """
    (tmp_path / "mori_test_threads.py").write_text(textwrap.dedent(of_c if native else python))
    monkeypatch.syspath_prepend(str(tmp_path))
    preload("mori_test_threads", "wave")
    said = r"preload\('mori_test_threads'\): importing it starts threads \(%s\)"
    with pytest.raises(ArgumentError, match=said % (".+" if native else "heartbeat")):
        mori_shmem.run_ranks(my_rank, 2)
    # The next run goes without it, and with the rest.
    loaded = mori_shmem.run_ranks(lambda: [m for m in ("mori_test_threads", "wave") if m in sys.modules], 2)
    assert loaded == [["wave"], ["wave"]]


def test_a_refusal_is_heard_also_where_the_job_is_too_large_to_be_taken(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a socket holds: the server hangs up while it is still being sent."""
    started = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "mori_test_starts.py").write_text(started)
    monkeypatch.syspath_prepend(str(tmp_path))
    preload("mori_test_starts")
    large = bytes(8 << 20)
    with pytest.raises(ArgumentError, match="mori_test_starts"):
        mori_shmem.run_ranks(lambda: len(large), 2)
    assert mori_shmem.run_ranks(lambda: len(large), 2) == [8 << 20] * 2
