"""What is refused, and how a launch of Stage1 over copy engines ends when it cannot go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import mori_shmem
import pytest
import torch
from mori_megamoe import MegaMoEStage1Sdma
from mori_megamoe.stage1.options import Options
from mori_megamoe.targets.host import DirectStores
from mori_megamoe.targets.host.sdma.crew import Board, Crew
from mori_megamoe.targets.host.sdma.job import Job
from mori_megamoe.testing import Toy, same_bytes
from mori_shmem.errors import ArgumentError, ClosedError, MoriError, PeerDied, PeerTimeout
from mori_shmem.testing import die, run_ranks_to_the_end
from patience import with_longer_times
from sdma_modes import FEW, MODES, check

TOY = Toy(2)
INPUTS = TOY.inputs((20, 9))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scale_mode": "lds"}, "scale_mode='lds' is not known; allowed: auto, shuffler, ldsw"),
        ({"order": "random"}, "order='random' is not known; allowed: expert, ready-first"),
        ({"puts": "three"}, "puts='three' is not known; allowed: two, one"),
        ({"gemm1": "7002"}, r"gemm1='7002': None, or 'in-launch' \(also called '7001'\)"),
        ({"gemm1": "7001", "fuse_quant": True}, "gemm1='7001' with fuse_quant=True.*Choose one"),
        ({"gemm1": "in-launch", "scale_mode": "shuffler"}, "read landed scales themselves"),
        ({"fuse_quant": 1}, "fuse_quant=1: True or False"),
        ({"merge_rows": -1}, "merge_rows=-1: a number of rows, or 0"),
        ({"workers": 0}, "workers=0: a whole number of at least 1"),
        ({"gemm1": "in-launch", "packers": -1}, "packers=-1"),
        ({"mover": "sdma"}, "mover='sdma' is not known; allowed: auto, copies, stores"),
        ({"slot_experts": -1}, "slot_experts=-1: a whole number of at least 0"),
        ({"slot_slack": 0.5}, "slot_slack=0.5: 1 to 1024"),
        ({"slot_slack": float("nan")}, "slot_slack=nan: 1 to 1024"),
        ({"workers": 300}, "302 workgroups that must all run at the same time: at most 256"),
    ],
)
def test_choices_that_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Options(**given).check()


def test_roles_are_the_lowest_workgroups() -> None:
    assert Options(scale_mode="ldsw").roles == ("put", "work", "work")
    assert Options(shufflers=2, workers=1).roles == ("put", "shuffle", "shuffle", "work")
    assert Options(gemm1="7001", workers=1).roles == ("put", "pack", "pack", "work")
    assert Options(order="ready-first", workers=1).roles == ("put", "schedule", "work")


OF_ANOTHER_TARGET: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mover": "stores"}, "mover='stores': on the host target that is the layer's baseline"),
    ({"slot_experts": 2}, "slot_experts=2: the host target copies as many rows as there are"),
    ({"slot_slack": 2}, "slot_slack=2: the host target copies"),
)


def test_installing_twice_and_what_else_is_refused() -> None:
    want = TOY.reference(INPUTS)

    def rank() -> None:
        with mori_shmem.init() as comm, TOY.layer(comm) as moe:
            with pytest.raises(
                ArgumentError, match=r"moe is a DirectStores, which is no mori_megamoe\.MegaMoE"
            ):
                MegaMoEStage1Sdma(moe.stage1)  # type: ignore[arg-type]
            for given, words in OF_ANOTHER_TARGET:
                with pytest.raises(ArgumentError, match=words):
                    MegaMoEStage1Sdma(moe, **given)
            stage1 = MegaMoEStage1Sdma(moe, mover="copies")
            with pytest.raises(MoriError, match="is not installed"):
                stage1.uninstall()
            assert not stage1.installed
            assert stage1.install() is stage1
            assert stage1.installed
            with pytest.raises(MoriError, match="is installed already"):
                stage1.install()
            with pytest.raises(MoriError, match=r"another Stage1 over copy engines already, copy engines \("):
                MegaMoEStage1Sdma(moe).install()
            after = moe.replace_stage1(DirectStores())
            with pytest.raises(MoriError, match="Stage1 is 'direct', put in after this one"):
                stage1.uninstall()
            moe.replace_stage1(after)
            check(moe, INPUTS, want, "installed")
            stage1.uninstall()
            assert isinstance(moe.stage1, DirectStores)
            check(moe, INPUTS, want, "uninstalled")
        with pytest.raises(ClosedError):
            stage1.install()

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


def test_choices_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, TOY.layer(comm) as moe:
            stage1 = MegaMoEStage1Sdma(moe, puts="one" if comm.rank else "two")
            with pytest.raises(ArgumentError, match=r"different stages: .*two put.*one put"):
                stage1.install()
            assert not stage1.installed
            MegaMoEStage1Sdma(moe).install()

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


def test_workgroups_that_cannot_all_run_are_refused_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("megamoe"):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(MoriError, match=r"5 workgroups must run at the same time.*more than 2 threads"):
        Crew(5)
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()


def workgroups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("megamoe workgroup")]


def test_closing_the_layer_ends_the_workgroups() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            with TOY.layer(comm) as moe:
                MegaMoEStage1Sdma(moe).install()
                moe(*INPUTS[comm.rank])
                assert len(workgroups()) == 4
            assert not workgroups()

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


# ---- launches that cannot go on ----


@pytest.mark.parametrize("mode", FEW)
def test_a_dropped_put_is_noticed_at_the_deadline_with_names(mode: str) -> None:
    """Rank 0's put of segment 2 to rank 1 is lost, and so are those behind it."""
    with_longer_times(lambda limit_s: a_put_is_dropped(mode, limit_s), 0.7, 3, 12)


def a_put_is_dropped(mode: str, limit_s: float) -> None:
    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm, TOY.layer(comm) as moe:
            MegaMoEStage1Sdma(moe, **MODES[mode]).install()
            moe(*INPUTS[comm.rank])
            if comm.rank == 0:
                lose_puts_from(2)
                moe.stage1_only(*INPUTS[comm.rank])
                comm.barrier()  # until rank 1 has given up
                return
            comm.timeout_s = limit_s
            began = time.monotonic()
            with pytest.raises(PeerTimeout, match=r"`arrived` of rank 0, segment [23] of launch 2") as late:
                moe.stage1_only(*INPUTS[comm.rank])
            assert 0.7 * limit_s < time.monotonic() - began < 30
            assert late.value.peers == (0,)
            assert late.value.seen == 6  # segments 0 to 3 of launch 1; 0 and 1 of launch 2
            assert late.value.wanted in (7, 8)  # two workers wait, one for each that is missing
            with pytest.raises(MoriError, match="since a call failed with PeerTimeout"):
                moe(*INPUTS[comm.rank])
            comm.barrier(timeout_s=60)

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


def lose_puts_from(number: int) -> None:
    program = Job._program

    def lossy(job: Job, batch: Any) -> Any:
        made = program(job, batch)
        return mori_shmem.PutProgram() if batch[-1].number >= number else made

    Job._program = lossy  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", FEW)
def test_a_rank_that_does_not_get_ready_is_named(mode: str) -> None:
    """Rank 1 has told its counts, and then hangs before its rows may be written."""
    with_longer_times(lambda limit_s: a_rank_hangs(mode, limit_s), 0.7, 3, 12)


def a_rank_hangs(mode: str, limit_s: float) -> None:
    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm, TOY.layer(comm) as moe:
            MegaMoEStage1Sdma(moe, **MODES[mode]).install()
            moe(*INPUTS[comm.rank])
            if comm.rank == 1:
                ready = moe._runner._set["ready"]
                ready.signal = lambda value: comm.barrier()  # type: ignore[method-assign, assignment]
                with pytest.raises(PeerDied):  # the others have given up by then
                    moe(*INPUTS[comm.rank])
                return
            comm.timeout_s = limit_s
            with pytest.raises(PeerTimeout, match=r"`(ready|arrived)` of rank 1, .*launch 2") as late:
                moe(*INPUTS[comm.rank])
            assert late.value.peers == (1,)
            comm.barrier(timeout_s=60)

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


DEATHS: list[tuple[str, str]] = [
    ("in-launch", "wait_ready"),
    ("fuse-quant, ldsw, one put", "put"),
    ("shuffler", "_scales"),
    ("ldsw, ready-first", "schedule"),
]


@pytest.mark.parametrize(("mode", "where"), DEATHS)
def test_a_dead_rank_is_named_within_two_seconds(mode: str, where: str) -> None:
    """Killed on one of its workgroups. Also those name it that wait for another rank, which gave up."""
    with_longer_times(lambda limit_s: one_dies(mode, where, limit_s), 2, 2, 20)  # of a deadline of 60


def one_dies(mode: str, where: str, limit_s: float) -> None:
    toy = Toy(3)
    inputs = toy.inputs((20, 9, 5))

    def rank() -> float:
        comm = mori_shmem.init(timeout_s=60)
        moe = toy.layer(comm)
        MegaMoEStage1Sdma(moe, **MODES[mode]).install()
        moe(*inputs[comm.rank])
        if comm.rank == 1:
            setattr(Job, where, lambda *args: die())
        began = time.monotonic()
        with pytest.raises(PeerDied) as dead:
            moe(*inputs[comm.rank])
        assert dead.value.peers == (1,)
        took = time.monotonic() - began
        moe.close()
        assert not workgroups()
        return took

    outcomes = run_ranks_to_the_end(rank, 3, timeout_s=60)
    assert [o.error is None for o in outcomes] == [True, False, True], outcomes
    assert all(o.value < limit_s for o in outcomes if o.rank != 1), outcomes


@pytest.mark.parametrize("where", ["put", "work", "wait_ready"])
def test_a_workgroup_that_fails_ends_the_others(where: str) -> None:
    """Its own error comes out at once, though other workgroups wait for rows that never come."""

    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm, TOY.layer(comm) as moe:
            MegaMoEStage1Sdma(moe, gemm1="in-launch").install()
            moe(*INPUTS[comm.rank])

            def fails(*args: Any) -> None:
                raise ZeroDivisionError(where)

            setattr(Job, where, fails)
            began = time.monotonic()
            with pytest.raises(ZeroDivisionError, match=where):
                moe(*INPUTS[comm.rank])
            assert time.monotonic() - began < 30
            with pytest.raises(MoriError, match="since a call failed with ZeroDivisionError"):
                moe(*INPUTS[comm.rank])
            comm.barrier()  # a rank that leaves is an error of its own to those that still wait for it
            moe.close()
            assert not workgroups()

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


def test_a_board_gives_up_where_nobody_reports_anything() -> None:
    board = Board(timeout_s=0.1, doing="a launch")
    with pytest.raises(
        PeerTimeout, match=r"a launch: no workgroup has done anything for 0.2 s.*\('packed', 3\)"
    ):
        board.wait(("packed", 3))


def test_a_crew_hands_out_tickets_once_and_raises_the_first_error() -> None:
    crew, board = Crew(3), Board(timeout_s=60, doing="a launch")
    drawn: list[int] = []

    def work(number: int) -> None:
        while (ticket := board.draw("tile")) < 100:
            drawn.append(ticket)

    crew.run(work, board)
    assert sorted(drawn) == list(range(100))

    second = Board(timeout_s=60, doing="a launch")

    def one_fails(number: int) -> None:
        if number == 1:
            raise KeyError("mine")
        second.wait("never")

    with pytest.raises(KeyError, match="mine"):
        crew.run(one_fails, second)
    crew.close()
    crew.close()


def test_late_ranks_give_the_same_bytes() -> None:
    """A nap on each workgroup, another in each call."""
    want = TOY.reference(INPUTS)

    def rank() -> None:
        with mori_shmem.init() as comm, TOY.layer(comm) as moe:
            naps = iter(
                torch.rand(10_000, generator=torch.Generator().manual_seed(comm.rank)).mul(0.004).tolist()
            )

            def late(run: Callable[..., Any]) -> Callable[..., Any]:
                def wrapped(*args: Any) -> Any:
                    time.sleep(next(naps))
                    return run(*args)

                return wrapped

            for name in ("put", "wait_ready", "_program", "_shuffle_tile", "schedule", "_scales", "quiet"):
                setattr(Job, name, late(getattr(Job, name)))
            for mode in MODES.values():
                stage1 = MegaMoEStage1Sdma(moe, **mode).install()
                for call in range(2):
                    assert same_bytes(moe(*INPUTS[comm.rank]), want[comm.rank].out), (mode, call)
                stage1.uninstall()

    mori_shmem.run_ranks(rank, 2, timeout_s=100)
