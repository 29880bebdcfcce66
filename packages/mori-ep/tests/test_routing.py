"""Routing handles: replay, several open at once; the registered buffer; halves of a call; rows by expert."""

from __future__ import annotations

import itertools
import time
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError, CollectiveMismatch, UnsupportedShape
from mori_shmem.testing import faults

KINDS = ("IntraNode", "IntraNodeLL", "AsyncLL")
every_kind = pytest.mark.parametrize("kind", KINDS)
HIDDEN, TOPK, EXPERTS = 96, 4, 12


def made(comm: mori_shmem.Communicator, kind: str, **changes: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "hidden_dim": HIDDEN,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOPK,
        "max_num_inp_token_per_rank": 64,
        "kernel_type": EpDispatchCombineKernelType[kind],
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **{**given, **changes}), comm)


@every_kind
def test_several_dispatches_are_open_and_each_combines_with_its_own(kind: str) -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind) as op:
            for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
                opened = []
                for batch in range(3):
                    given = fixture(comm.rank + 3 * batch, (21, 0, 64)[batch], TOPK, EXPERTS, HIDDEN)
                    rows, weights, _, ids, count, handle = op.dispatch(
                        given.x, given.weights, None, given.ids, return_routing=True
                    )
                    assert count is handle.recv_count
                    n = int(count)
                    opened.append((given, handle, apply_experts(rows[:n], ids[:n], weights[:n], op.config)))
                for batch in order:
                    given, handle, y = opened[batch]
                    out, _ = op.combine(y, None, given.ids, routing=handle)
                    assert not wrong_rows(out[: len(given.x)], expected(given, EXPERTS))

    mori_shmem.run_ranks(rank, 3)


@every_kind
def test_a_replay_puts_new_rows_where_the_old_ones_went(kind: str) -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind) as op:
            given = fixture(comm.rank, 17 + comm.rank, TOPK, EXPERTS, HIDDEN)
            *_, handle = op.dispatch(given.x, given.weights, None, given.ids, return_routing=True)
            before = op.get_dispatch_src_token_pos().clone()
            other = fixture(comm.rank + 5, 9, TOPK, EXPERTS, HIDDEN)
            for turn in range(5):
                op.dispatch(other.x, other.weights, None, other.ids)
                x = given.x * (turn + 1)
                rows, weights, _, ids, count = op.dispatch(x, given.weights, None, given.ids, routing=handle)
                assert torch.equal(op.get_dispatch_src_token_pos(), before)
                n = int(count)
                assert n == len(before)
                y = apply_experts(rows[:n], ids[:n], weights[:n], op.config)
                out, _ = op.combine(y, None, given.ids, routing=handle)
                assert not wrong_rows(out[: len(x)], expected(given, EXPERTS) * (turn + 1))
            with pytest.raises(ArgumentError, match=f"{17 + comm.rank} tokens on this rank, input has 3"):
                op.dispatch(x[:3], None, None, given.ids[:3], routing=handle)

    mori_shmem.run_ranks(rank, 2)


def test_replays_of_different_dispatches_raise_on_all_ranks() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            with made(comm, "IntraNode") as op:
                handles = []
                for batch in range(2):
                    given = fixture(comm.rank, 8, TOPK, EXPERTS, HIDDEN)
                    given.ids[: 3 * batch] = -1
                    handles.append(op.dispatch(given.x, None, None, given.ids, return_routing=True)[-1])
                words = "replay is of dispatch 1 on rank 0 and of dispatch 2 on rank 1"
                with pytest.raises(CollectiveMismatch, match=words):
                    op.dispatch(given.x, None, None, given.ids, routing=handles[comm.rank])
            with made(comm, "IntraNode") as op:
                *_, handle = op.dispatch(given.x, None, None, given.ids, return_routing=True)
                with pytest.raises(CollectiveMismatch, match="replay is"):
                    op.dispatch(given.x, None, None, given.ids, routing=handle if comm.rank else None)

    mori_shmem.run_ranks(rank, 2)


@every_kind
def test_the_registered_buffer_may_be_filled_once_dispatch_has_returned(kind: str) -> None:
    """Rank 1 is slow to read: a rank that filled its buffer too early would change what rank 1 adds up."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind, use_external_inp_buf=False) as op:
            y = op.get_registered_combine_input_buffer(torch.bfloat16)
            assert y.shape == (op.config.recv_capacity, HIDDEN)
            assert y.data_ptr() == op.get_registered_combine_input_buffer(torch.bfloat16, 8).data_ptr()
            for turn in range(60):
                given = fixture(comm.rank + turn, 1 + turn % 64, TOPK, EXPERTS, HIDDEN)
                rows, weights, _, ids, count = op.dispatch(given.x, given.weights, None, given.ids)
                n = int(count)
                y[:n] = apply_experts(rows[:n], ids[:n], weights[:n], op.config)
                if comm.rank == 1 and turn % 7 == 0:
                    time.sleep(0.01)
                out, _ = op.combine(y, None, given.ids)
                assert not wrong_rows(out[: len(given.x)], expected(given, EXPERTS)), turn

    mori_shmem.run_ranks(rank, 3)


@every_kind
def test_the_registered_buffer_serves_several_open_dispatches_one_after_the_other(kind: str) -> None:
    """No dispatch lies between their combines, so combine itself has to see that everybody has read."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind) as op:
            y = op.get_registered_combine_input_buffer(torch.bfloat16)
            for turn in range(20):
                opened = []
                for batch in range(3):
                    given = fixture(comm.rank + turn + 3 * batch, 40, TOPK, EXPERTS, HIDDEN)
                    rows, weights, _, ids, count, handle = op.dispatch(
                        given.x, given.weights, None, given.ids, return_routing=True
                    )
                    n = int(count)
                    opened.append((given, handle, apply_experts(rows[:n], ids[:n], weights[:n], op.config)))
                for given, handle, result in opened:
                    y[: len(result)] = result
                    out, _ = op.combine(y, None, given.ids, routing=handle, use_external_inp_buf=0)
                    assert not wrong_rows(out[:40], expected(given, EXPERTS)), turn

    mori_shmem.run_ranks(rank, 3)


def slow_reader(op: EpDispatchCombineOp) -> None:
    """Rank 1 reads what is to be added up long after the others have."""
    combiner = op._runner._combiner
    add_up = combiner._add_up

    def late(*arguments: Any) -> None:
        time.sleep(0.2)
        add_up(*arguments)

    if op.config.rank == 1:
        combiner._add_up = late


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *itertools.product(KINDS, ("by its handle", "as the last one", "after rows of one's own")),
        *itertools.product(("IntraNode", "IntraNodeLL"), ("elastic",)),
    ],
)
def test_the_registered_buffer_may_be_filled_once_combine_has_returned(kind: str, how: str) -> None:
    """A dispatch combined several times, with nothing open besides it."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind, elastic=how == "elastic") as op:
            slow_reader(op)
            given = fixture(comm.rank, 40, TOPK, EXPERTS, HIDDEN)
            *results, count = op.dispatch(given.x, given.weights, None, given.ids)
            handle = None
            if how == "by its handle":
                *results, count, handle = op.dispatch(
                    given.x, given.weights, None, given.ids, return_routing=True
                )
            rows, weights, _, ids = results
            n = int(count)
            result = apply_experts(rows[:n], ids[:n], weights[:n], op.config)
            for factor in (1, 2, 4):
                if how == "after rows of one's own" and factor == 1:
                    out, _ = op.combine(result, None, given.ids)
                else:
                    y = op.get_registered_combine_input_buffer(torch.bfloat16)
                    y[:n] = result * factor
                    out, _ = op.combine(y, None, given.ids, routing=handle, use_external_inp_buf=0)
                assert not wrong_rows(out[:40], expected(given, EXPERTS) * factor), factor

    mori_shmem.run_ranks(rank, 3)


@every_kind
def test_the_registered_buffer_serves_replays_that_are_combined_one_after_the_other(kind: str) -> None:
    """Their dispatches were combined before: that says nothing of the replays."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind) as op:
            slow_reader(op)
            y = op.get_registered_combine_input_buffer(torch.bfloat16)
            opened = []
            for batch in range(2):
                given = fixture(comm.rank + 3 * batch, 40, TOPK, EXPERTS, HIDDEN)
                rows, weights, _, ids, count, handle = op.dispatch(
                    given.x, given.weights, None, given.ids, return_routing=True
                )
                n = int(count)
                opened.append((given, handle, apply_experts(rows[:n], ids[:n], weights[:n], op.config)))
                op.combine(rows, None, given.ids, routing=handle)
            for given, handle, _ in opened:
                op.dispatch(given.x, None, None, given.ids, routing=handle)
            for given, handle, result in opened:
                y[: len(result)] = result
                out, _ = op.combine(y, None, given.ids, routing=handle, use_external_inp_buf=0)
                assert not wrong_rows(out[:40], expected(given, EXPERTS))

    mori_shmem.run_ranks(rank, 3)


@every_kind
def test_the_registered_buffer_is_not_filled_while_its_rows_are_on_their_way(kind: str) -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind) as op:
            given = fixture(comm.rank, 40, TOPK, EXPERTS, HIDDEN)
            packed, *_ = op.dispatch_standard_moe(given.x, given.weights, None, given.ids)
            y = op.convert_combine_input(packed)
            op.combine_send(y, None, given.ids, use_external_inp_buf=0)
            with pytest.raises(ArgumentError, match="Call combine_recv first"):
                op.convert_combine_input(packed)
            op.combine_recv()
            op.convert_combine_input(packed)

    mori_shmem.run_ranks(rank, 2)


@every_kind
def test_P10_the_second_half_goes_by_what_the_first_was_given(kind: str) -> None:
    """Nothing of the first half's tensors is kept by the caller; shapes differ from the configuration's."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind, hidden_dim=512) as op:
            for turn in range(20):
                hidden = (96, 512, 33)[turn % 3]
                given = fixture(comm.rank + turn, 3 * turn, TOPK, EXPERTS, hidden)
                x, ids = given.x.clone(), given.ids.clone()
                rows, weights, _, got_ids, count = op.dispatch_send(x, given.weights.clone(), None, ids)
                if kind == "AsyncLL":
                    x.fill_(torch.nan)
                    ids.fill_(-7)
                del x, ids
                op.dispatch_recv(call_local_expert_count=True)
                n = int(count)
                y = apply_experts(rows[:n], got_ids[:n], weights[:n], op.config)
                assert int(op.local_expert_count.sum()) >= n
                out, _ = op.combine_send(y, None, given.ids)
                if kind == "AsyncLL":
                    y.fill_(torch.nan)
                op.combine_recv()
                assert not wrong_rows(out[: 3 * turn], expected(given, EXPERTS)), turn

    mori_shmem.run_ranks(rank, 3)


def test_halves_out_of_order_are_refused_and_change_nothing() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, "AsyncLL") as op:
            given = fixture(comm.rank, 5, TOPK, EXPERTS, HIDDEN)
            with pytest.raises(
                ArgumentError, match="dispatch_recv was called where a send or a full call is due"
            ):
                op.dispatch_recv()
            rows, weights, _, ids, count = op.dispatch_send(given.x, given.weights, None, given.ids)
            for wrong in (
                lambda: op.combine(rows, None, given.ids),
                lambda: op.dispatch_send(given.x, given.weights, None, given.ids),
                op.combine_recv,
            ):
                with pytest.raises(ArgumentError, match=r"dispatch_recv is due|combine without a dispatch"):
                    wrong()
            op.dispatch_recv()
            n = int(count)
            y = apply_experts(rows[:n], ids[:n], weights[:n], op.config)
            out, _ = op.combine(y, None, given.ids)
            assert not wrong_rows(out[:5], expected(given, EXPERTS))

    mori_shmem.run_ranks(rank, 2)


def test_P8_P22_slow_copies_are_waited_for_before_anything_reads_or_overwrites_them() -> None:
    """Rank 0's copies take long: its peers must not read early, nor itself pack the next rows over them."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, "AsyncLL", num_qp_per_pe=2) as op:
            slow = faults(comm, delay_us=3000 if comm.rank == 0 else 0)
            with slow:
                for turn in range(12):
                    given = fixture(comm.rank + turn, 1 + 5 * turn, TOPK, EXPERTS, HIDDEN)
                    rows, weights, _, ids, count = op.dispatch(given.x, given.weights, None, given.ids)
                    n = int(count)
                    y = apply_experts(rows[:n], ids[:n], weights[:n], op.config)
                    out, _ = op.combine(y, None, given.ids)
                    assert not wrong_rows(out[: len(given.x)], expected(given, EXPERTS)), turn

    mori_shmem.run_ranks(rank, 3)


@every_kind
def test_P20_dispatches_back_to_back_do_not_run_into_each_other(kind: str) -> None:
    """No combine in between keeps ranks in step: one may send its next rows while another still reads the
    last. With copy queues, those of rank 0 are slow, so that its next rows would be packed over the last
    ones."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind, hidden_dim=2048) as op:
            inputs = [[fixture(r + 2 * t, 64, TOPK, EXPERTS, 2048) for r in range(2)] for t in range(4)]
            with faults(comm, delay_us=4000 if comm.rank == 0 else 0):
                for turn in range(24 if kind == "AsyncLL" else 200):
                    everyone = inputs[turn % 4]
                    given = everyone[comm.rank]
                    rows, *_, count = op.dispatch(given.x, given.weights, None, given.ids)
                    got = rows[: int(count)].clone()
                    positions = op.get_dispatch_src_token_pos().long()
                    stride = op.config.position_stride
                    source, token = positions // stride, positions % stride
                    want = torch.stack([r.x for r in everyone])[source, token]
                    assert torch.equal(got, want), turn
            comm.barrier()

    mori_shmem.run_ranks(rank, 2)


def test_P22_a_flag_without_its_rows_would_be_seen_here() -> None:
    """The negative of the test above: signals arrive and copies do not, as with a fence that is too
    narrow."""

    def rank() -> bool:
        with mori_shmem.init() as comm, made(comm, "AsyncLL") as op:
            with faults(comm, drop_every=1):
                given = fixture(comm.rank, 64, TOPK, EXPERTS, HIDDEN)
                _, weights, *_, count = op.dispatch(given.x, given.weights, None, given.ids)
                wrong = bool((weights[: int(count)] == 0).any())  # no weight is 0: the memory's first state
                comm.barrier()
            return wrong

    assert any(mori_shmem.run_ranks(rank, 2))


@every_kind
def test_rows_by_expert_go_there_and_back(kind: str) -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind, scale_dim=2, scale_type_size=4) as op:
            config = op.config
            experts = config.num_experts_per_rank
            for tokens in (30, 0, 64, 1):
                given = fixture(comm.rank, tokens, TOPK, EXPERTS, HIDDEN)
                given.ids[::5, 1] = -1
                given.ids[1::6, 2] = given.ids[1::6, 0]  # an expert named twice counts twice
                scales = torch.stack([torch.arange(tokens), torch.full((tokens,), comm.rank)], 1).float()
                packed, counts, sources, ranges = op.dispatch_standard_moe(
                    given.x, given.weights, scales, given.ids
                )
                assert packed.shape == (experts, config.recv_capacity, HIDDEN)
                assert (ranges.numel(), ranges.dtype) == (0, torch.int64)
                rows = [fixture(r, 64, TOPK, EXPERTS, HIDDEN).x for r in range(comm.world_size)]
                everyone = comm.all_gather(given.ids)
                for expert in range(experts):
                    wanted = [
                        (rank, token)
                        for rank, ids in enumerate(everyone)
                        for token in range(len(ids))
                        if comm.rank * experts + expert in ids[token].tolist()
                    ]
                    n = int(counts[expert])
                    assert [op.decode_send_flat_idx(p) for p in sources[expert, :n].tolist()] == wanted
                    for row, (rank, token) in enumerate(wanted):
                        assert torch.equal(packed[expert, row], rows[rank][token])
                        assert op.packed_recv_scales[expert, row].tolist() == [token, rank]
                out, _ = op.combine_standard_moe(packed, None, given.ids)
                assert not wrong_rows(out[:tokens], expected(given, EXPERTS))

                rows_out, weights, _, ids, _ = op.dispatch(given.x, given.weights, None, given.ids)
                again, *_ = op.convert_dispatch_output(rows_out, ids)
                y = op.convert_combine_input(again, weights=weights)
                out, _ = op.combine(y, None, given.ids, use_external_inp_buf=0)
                assert not wrong_rows(out[:tokens], expected(given, EXPERTS))

    mori_shmem.run_ranks(rank, 2)


def test_what_has_no_routing_or_no_experts_yet_says_so() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            with made(comm, "IntraNode") as op:
                with pytest.raises(UnsupportedShape, match="no rows have been laid out by expert"):
                    op.convert_combine_input(torch.zeros(12, 64, HIDDEN).bfloat16())
                with pytest.raises(UnsupportedShape, match="elastic=False"):
                    op.query_mask()
            with made(comm, "IntraNode", elastic=True) as op:
                given = fixture(0, 3, TOPK, EXPERTS, HIDDEN)
                with pytest.raises(UnsupportedShape, match="keeps no routing"):
                    op.dispatch(given.x, None, None, given.ids, return_routing=True)

    mori_shmem.run_ranks(rank, 1)
