"""Ranks that are late, dead or gone: errors with names in time, and the elastic mode, where the others go
on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, reference
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError, MoriError, PeerDied, PeerTimeout
from mori_shmem.testing import die, run_ranks_to_the_end

KINDS = ("IntraNode", "IntraNodeLL", "AsyncLL")
every_kind = pytest.mark.parametrize("kind", KINDS)
HIDDEN, TOPK, EXPERTS = 64, 4, 12


def made(comm: mori_shmem.Communicator, kind: str = "IntraNode", **changes: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "hidden_dim": HIDDEN,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOPK,
        "max_num_inp_token_per_rank": 32,
        "kernel_type": EpDispatchCombineKernelType[kind],
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **{**given, **changes}), comm)


def dispatch(op: EpDispatchCombineOp, tokens: int = 16) -> tuple[Any, torch.Tensor]:
    """(what this rank gave, its experts' rows)."""
    given = fixture(op.config.rank, tokens, TOPK, EXPERTS, HIDDEN)
    rows, weights, _, ids, count = op.dispatch(given.x, given.weights, None, given.ids)
    n = int(count)
    return given, apply_experts(rows[:n], ids[:n], weights[:n], op.config)


def until_told(folder: Path, num_ranks: int) -> None:
    """A rank that does not come stays alive until so many others have noticed."""
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < num_ranks and time.monotonic() < deadline:
        time.sleep(0.02)


@every_kind
def test_a_rank_that_does_not_come_is_named_with_flag_and_values(kind: str, tmp_path: Path) -> None:
    def rank() -> None:
        with mori_shmem.init(timeout_s=2) as comm:  # also what ranks may take to meet, on a busy machine
            op = made(comm, kind)
            given, y = dispatch(op)
            op.combine(y, None, given.ids)
            comm.barrier()
            if comm.rank == 1:
                until_told(tmp_path, 2)
                return
            began = time.monotonic()
            words = f"rank {comm.rank} of 3, in wait for `entered` of dispatch 2: .*it is {1 << 32}.*rank 1"
            with pytest.raises(PeerTimeout, match=words) as late:
                dispatch(op)
            assert 1.9 < time.monotonic() - began < 30
            (tmp_path / f"{comm.rank}").touch()
            assert late.value.peers == (1,)
            assert (late.value.seen, late.value.wanted) == (1 << 32, 2 << 32)
            with pytest.raises(MoriError, match="cannot be used any more"):
                op.dispatch(given.x, None, None, given.ids)

    mori_shmem.run_ranks(rank, 3)


@every_kind
def test_a_dead_rank_is_named_within_two_seconds(kind: str) -> None:
    def rank() -> float:
        comm = mori_shmem.init()
        op = made(comm, kind)
        given, y = dispatch(op)
        if comm.rank == 1:
            die()
        began = time.monotonic()
        with pytest.raises(PeerDied) as dead:  # noqa: PT012 - whichever of the two has to wait for it
            op.combine(y, None, given.ids)
            dispatch(op)
        assert 1 in dead.value.peers
        return time.monotonic() - began

    outcomes = run_ranks_to_the_end(rank, 3, timeout_s=60)
    assert [o.error is None for o in outcomes] == [True, False, True], outcomes
    assert all(o.value < 2 for o in outcomes if o.rank != 1)


def test_P21_a_wait_sleeps() -> None:
    """A rank that waits half a second for a late one uses a fraction of it."""

    def rank() -> float:
        with mori_shmem.init() as comm, made(comm) as op:
            comm.barrier()
            if comm.rank == 1:
                time.sleep(0.6)
            began = time.process_time()
            dispatch(op)
            return time.process_time() - began

    assert mori_shmem.run_ranks(rank, 2)[0] < 0.3


def test_P1_nobody_leaves_the_constructor_before_all_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> float:
        from mori_ep.targets import host

        class Late(host.Runner):
            def __init__(self, comm: mori_shmem.Communicator, *more: Any) -> None:
                if comm.rank == 1:
                    time.sleep(0.4)
                super().__init__(comm, *more)

        host.Runner = Late  # type: ignore[misc]
        with mori_shmem.init() as comm:
            comm.barrier()
            began = time.monotonic()
            op = made(comm)
            took = time.monotonic() - began
            given, y = dispatch(op)
            out, _ = op.combine(y, None, given.ids)
            assert not wrong_rows(out[:16], expected(given, EXPERTS))
            comm.barrier()
            return took

    assert min(mori_shmem.run_ranks(rank, 3)) > 0.35


def test_P9_P15_a_rank_without_tokens_and_weights_takes_part() -> None:
    """Null weights on the empty rank, and a geometry with far more warps than tokens."""

    def rank() -> None:
        with mori_shmem.init() as comm:
            for kind in KINDS:
                with made(comm, kind) as op:
                    for tokens in (0, 1, 0):
                        n = tokens if comm.rank else 0
                        given = fixture(comm.rank, n, TOPK, EXPERTS, HIDDEN)
                        weights = given.weights if comm.rank else None
                        rows, got, _, ids, count = op.dispatch(given.x, weights, None, given.ids, 304, 10, 16)
                        y = apply_experts(rows[: int(count)], ids[: int(count)], got[: int(count)], op.config)
                        out, out_weights = op.combine(y, y.new_zeros(0, TOPK).float(), given.ids, 304, 85, 16)
                        assert out_weights is None
                        assert not wrong_rows(out[:n], expected(given, EXPERTS))

    mori_shmem.run_ranks(rank, 2)


def test_P24_a_trace_changes_nothing_and_tells_the_steps() -> None:
    def rank() -> list[str]:
        import mori_bench

        with mori_shmem.init() as comm, made(comm, "AsyncLL") as op:
            op.trace = mori_bench.Trace(comm.rank)
            for _ in range(3):
                given, y = dispatch(op)
                out, _ = op.combine(y, None, given.ids)
                assert not wrong_rows(out[:16], expected(given, EXPERTS))
            spans = op.trace.spans
            assert all(span.start_ns <= span.end_ns for span in spans)
            comm.barrier()
            return [f"{span.lane}: {span.name}" for span in spans[: len(spans) // 3]]

    steps = mori_shmem.run_ranks(rank, 2)[0]
    assert "dispatch: wait for rows" in steps
    assert "combine: add up" in steps
    assert steps[0] == "call: dispatch"


def test_calls_of_two_threads_are_refused() -> None:
    def rank() -> None:
        import threading

        with mori_shmem.init() as comm, made(comm) as op:
            seen: list[BaseException] = []
            if comm.rank == 0:
                given = fixture(0, 3, TOPK, EXPERTS, HIDDEN)
                first = threading.Thread(target=dispatch, args=(op, 16))
                first.start()
                time.sleep(0.2)  # it waits for rank 1
                with pytest.raises(MoriError, match="on another thread"):
                    op.dispatch(given.x, None, None, given.ids)
                first.join()
            else:
                time.sleep(0.5)
                dispatch(op)
            assert not seen
            comm.barrier()

    mori_shmem.run_ranks(rank, 2)


def test_unknown_ids_are_refused_where_the_setting_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm) as op:
            given = fixture(comm.rank, 5, TOPK, EXPERTS, HIDDEN)
            given.ids[3, 1] = -1
            op.dispatch(given.x, None, None, given.ids)
            given.ids[4, 2] = 12
            with pytest.raises(ArgumentError, match=r"indices\[4, 2\] is 12: experts are 0..11"):
                op.dispatch(given.x, None, None, given.ids)

    monkeypatch.setenv("MORI_EP_CHECK_IDS", "1")
    mori_shmem.run_ranks(rank, 2)


# ---- elastic ----


@pytest.mark.parametrize("kind", ["IntraNode", "IntraNodeLL"])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_killed_rank_is_masked_and_the_others_go_on(kind: str, moment: str) -> None:
    """What it should have added is missing, everything else is exact, and no call waits for it again."""

    def rank() -> list[int]:
        comm = mori_shmem.init(timeout_s=20)
        op = made(comm, kind, elastic=True)
        given, y = dispatch(op)
        out, _ = op.combine(y, None, given.ids)
        assert not wrong_rows(out[:16], expected(given, EXPERTS))
        assert op.query_mask().tolist() == [0] * 4
        for turn in range(6):
            if comm.rank == 2 and turn == 1 and moment == "before":
                die()
            given, y = dispatch(op, 10 + turn)
            if comm.rank == 2 and turn == 1:
                die()
            began = time.monotonic()
            out, _ = op.combine(y, None, given.ids)
            if turn != 1:
                gone = 2 if turn else None
                left = given.weights * (given.ids // 3 != gone) if gone else given.weights
                assert not wrong_rows(
                    out[: 10 + turn], (given.x.float() * left.sum(1, keepdim=True)).bfloat16()
                )
            if turn > 1:
                assert time.monotonic() - began < 10, "nobody waits for it: that would take 20 s"
                assert op._runner.received_rows() == len(y)
        return op.query_mask().tolist()

    outcomes = run_ranks_to_the_end(rank, 4, timeout_s=90)
    assert [o.value for o in outcomes if o.rank != 2] == [[0, 0, 1, 0]] * 3, outcomes


def test_a_mask_set_by_hand_leaves_a_rank_out_and_takes_it_in_again() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, elastic=True) as op:
            for turn in range(9):
                if turn == 3:
                    comm.barrier()  # a rank that is masked while it still reads would miss rows
                    for other in range(comm.world_size):
                        if other != comm.rank and 1 in (other, comm.rank):
                            op.update_mask(other, True)
                if turn == 6:
                    comm.barrier()
                    op.clean_mask()
                    comm.barrier()
                given, y = dispatch(op)
                out, _ = op.combine(y, None, given.ids)
                hidden_from = range(3)
                if 3 <= turn < 6:
                    hidden_from = [1] if comm.rank == 1 else [0, 2]
                seen = torch.isin(given.ids // 4, torch.tensor(list(hidden_from)))
                want = given.x.float() * (given.weights * seen).sum(1, keepdim=True)
                assert reference.rel_l2(out[:16].float(), want) == 0, (turn, comm.rank)
            with pytest.raises(ArgumentError, match="cannot be masked here"):
                op.update_mask(comm.rank, True)
            comm.barrier()

    mori_shmem.run_ranks(rank, 3)


def test_a_late_rank_is_masked_at_the_deadline(tmp_path: Path) -> None:
    def rank() -> tuple[list[int], float]:
        with mori_shmem.init(
            timeout_s=2
        ) as comm:  # what no rank but the late one may take, on a busy machine
            op = made(comm, elastic=True)
            dispatch_and_combine(op)
            comm.barrier()
            if comm.rank == 1:
                until_told(tmp_path, 2)
                return [], 0.0
            began = time.monotonic()
            dispatch_and_combine(op)
            took = time.monotonic() - began
            dispatch_and_combine(op)
            (tmp_path / f"{comm.rank}").touch()
            return op.query_mask().tolist(), took

    def dispatch_and_combine(op: EpDispatchCombineOp) -> None:
        given, y = dispatch(op)
        op.combine(y, None, given.ids)

    results = mori_shmem.run_ranks(rank, 3)
    for mask, took in (results[0], results[2]):
        assert mask == [0, 1, 0]
        assert 1.9 < took < 30
