"""Arguments that would read or write memory that is not theirs, and calls out of turn: refused by name, and
the op stays usable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, checks
from mori_ep.adapters.deepep import Buffer
from mori_ep.adapters.deepep.ids import expert_ids
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError, ClosedError, CollectiveMismatch, LayoutError, UnsupportedShape

HIDDEN, TOPK, EXPERTS, TOKENS = 32, 3, 8, 8
REFUSED = (ArgumentError, UnsupportedShape, LayoutError)


def made(comm: mori_shmem.Communicator, **changes: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "hidden_dim": HIDDEN,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOPK,
        "max_num_inp_token_per_rank": 16,
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **{**given, **changes}), comm)


def refuses(
    error: type[BaseException] | tuple[type[BaseException], ...], words: str, call: Callable[[], Any]
):
    with pytest.raises(error, match=words):
        call()


def works(op: EpDispatchCombineOp) -> None:
    given = fixture(op.config.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
    rows, weights, _, ids, count = op.dispatch(given.x, given.weights, None, given.ids)
    n = int(count)
    out, _ = op.combine(apply_experts(rows[:n], ids[:n], weights[:n], op.config), None, given.ids)
    assert not wrong_rows(out[:TOKENS], expected(given, EXPERTS))


def test_a_routing_handle_of_another_op_is_refused_and_the_op_stays_usable() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            given = fixture(comm.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
            one, two = made(comm, max_num_inp_token_per_rank=64), made(comm, max_num_inp_token_per_rank=8)
            *_, handle = one.dispatch(given.x, None, None, given.ids, return_routing=True)
            y = torch.zeros(16, HIDDEN).bfloat16()
            bad: Any
            for bad, words in (
                (handle, "is of op"),
                (replace(handle, op_number=0), "is of op 0"),
                ((1, 2), "routing is tuple"),
                (torch.zeros(3), "routing is Tensor"),
            ):
                with pytest.raises(ArgumentError, match=words):
                    two.dispatch(given.x, None, None, given.ids, routing=bad)
                with pytest.raises(ArgumentError, match=words):
                    two.combine(y, None, given.ids, routing=bad)
            works(two)
            works(one)
            one.dispatch(given.x, None, None, given.ids, routing=handle)
            one.close()
            two.close()

    mori_shmem.run_ranks(rank, 2)


def test_weights_and_rows_by_expert_that_do_not_fit_are_refused() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, scale_dim=2, scale_type_size=4) as op:
            given = fixture(comm.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
            s = torch.ones(TOKENS, 2)
            x, w, scales, ids, count = op.dispatch(given.x, given.weights, s, given.ids)
            n = int(count)
            lay_out = op.convert_dispatch_output
            wide = torch.zeros(len(x), HIDDEN + 1).bfloat16()
            for error, words, call in (
                (LayoutError, f"dispatch_out_x has 1 rows, {n} are", lambda: lay_out(x[:1], ids)),
                (LayoutError, "two dimensions", lambda: lay_out(x[0], ids)),
                (LayoutError, "dispatch_out_x has strides", lambda: lay_out(x.T.contiguous().T, ids)),
                (UnsupportedShape, "float64", lambda: lay_out(x.double(), ids)),
                (UnsupportedShape, f"hidden size {HIDDEN + 1}", lambda: lay_out(wide, ids)),
                (LayoutError, "torch.int32", lambda: lay_out(x, ids.long())),
                (LayoutError, "torch.int32", lambda: lay_out(x, ids[:, :2].contiguous())),
                (LayoutError, "topk_idx has 1 rows", lambda: lay_out(x, ids[:1])),
                (
                    LayoutError,
                    "scales has 1 rows",
                    lambda: lay_out(x, ids, dispatch_out_scales=scales[:1]),
                ),
                (
                    UnsupportedShape,
                    "16 bytes per row",
                    lambda: lay_out(x, ids, dispatch_out_scales=scales.double()),
                ),
            ):
                refuses(error, words, call)
            packed, *_ = lay_out(x[:n], ids[:n], dispatch_out_scales=scales)
            back = op.convert_combine_input
            for words, bad in (
                ("float32", w.bfloat16()),
                ("float32", w.double()),
                (f"weights has 1 rows, {n} are", w[:1].clone()),
                ("strides", w.T.contiguous().T),
                ("float32", w[:, :2].contiguous()),
                ("two dimensions", w.flatten()),
            ):
                refuses(LayoutError, words, lambda bad=bad: back(packed, weights=bad))
            out, _ = op.combine(back(packed, weights=w[:n]), None, given.ids, use_external_inp_buf=0)
            assert not wrong_rows(out[:TOKENS], expected(given, EXPERTS))

    mori_shmem.run_ranks(rank, 2)


def test_checks_of_weights_go_by_the_device_of_the_op() -> None:
    config = EpDispatchCombineConfig(torch.bfloat16, 0, 1, HIDDEN, 0, 1, 2, 16, EXPERTS, TOPK)
    with pytest.raises(LayoutError, match="weights is on cpu, this op is on cuda:0"):
        checks.check_factors(config, torch.device("cuda:0"), torch.zeros(16, TOPK), 16)


def test_a_later_dispatch_parts_rows_by_expert_from_their_way_back() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm) as op:
            given = fixture(comm.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
            packed, *_ = op.dispatch_standard_moe(given.x, given.weights, None, given.ids)
            op.dispatch(given.x, given.weights, None, given.ids)
            refuses(
                ArgumentError,
                "after dispatch 2 .* are of dispatch 1",
                lambda: op.combine_standard_moe(packed, None, given.ids),
            )
            packed, *_ = op.dispatch_standard_moe(given.x, given.weights, None, given.ids)
            out, _ = op.combine_standard_moe(packed, None, given.ids)
            assert not wrong_rows(out[:TOKENS], expected(given, EXPERTS))

    mori_shmem.run_ranks(rank, 1)


def test_a_closed_op_and_an_open_half_are_named_before_anything_else() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            given = fixture(comm.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
            y = torch.zeros(16, HIDDEN).bfloat16()
            op = made(comm, kernel_type=EpDispatchCombineKernelType.AsyncLL)
            op.dispatch_send(given.x, None, None, given.ids)
            for call in (
                lambda: op.combine(y, None, given.ids),
                lambda: op.combine_send(y, None, given.ids),
                lambda: op.dispatch(given.x, None, None, given.ids.long()),
                lambda: op.dispatch_send(given.x, None, None, given.ids.long()),
            ):
                refuses(ArgumentError, "was called where dispatch_recv is due", call)
            op.dispatch_recv()
            works(op)
            op.close()
            for call in (
                lambda: op.combine(y, None, given.ids.long()),
                lambda: op.dispatch(given.x, None, None, given.ids.long()),
            ):
                refuses(ClosedError, "is closed", call)

    mori_shmem.run_ranks(rank, 1)


def test_a_mismatch_names_dtypes() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm) as op:
            given = fixture(comm.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
            x = given.x.half() if comm.rank else given.x
            words = "dtype is bfloat16 on rank 0 and float16 on rank 1"
            with pytest.raises(CollectiveMismatch, match=words):
                op.dispatch(x, None, None, given.ids)

    mori_shmem.run_ranks(rank, 2)


# ---- the DeepEP-shaped Buffer ----


def brought(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = fixture(rank, TOKENS, TOPK, EXPERTS, 128)
    assert given.weights is not None
    return given.x, given.ids.long(), given.weights


def test_low_latency_calls_that_are_refused_use_up_no_slot() -> None:
    """One rank is refused, and both go on; the result of the dispatch before stays live."""

    def rank() -> None:
        comm = mori_shmem.init()
        buffer = Buffer(None, low_latency_mode=True, comm=comm)
        x, ids, weights = brought(comm.rank)

        def send(x: Any = x, ids: Any = ids, **more: Any) -> Any:
            return buffer.low_latency_dispatch(x, ids, 16, EXPERTS, use_fp8=False, **more)

        def bring(y: torch.Tensor, handle: Any, **more: Any) -> None:
            out, *_ = buffer.low_latency_combine(y, ids, weights, handle, **more)
            assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())

        bad_stats = torch.zeros(1, dtype=torch.int32)
        wrong = [
            lambda: send(x[0]),
            lambda: send(x.T.contiguous().T),
            lambda: send(torch.cat([x] * 3), torch.cat([ids] * 3)),
            lambda: send(x, ids[:2]),
            lambda: send(cumulative_local_expert_recv_stats=bad_stats),
            lambda: buffer.low_latency_dispatch(x, ids, 16, EXPERTS + 1, use_fp8=False),
        ]
        for turn in range(2):  # before there is an op, and after
            if comm.rank == turn:
                for call in wrong:
                    refuses(REFUSED, "", call)
            first, _, handle, *_ = send()
            second, _, another, *_ = send()
            if comm.rank == turn:
                for call in wrong:
                    refuses(REFUSED, "", call)
                strided = first.transpose(1, 2).contiguous().transpose(1, 2)
                refuses(REFUSED, "strides", lambda y=strided, h=handle: bring(y, h))
            bring(second, another)
            bring(first, handle)
        rows, _, handle, _, hook = send(return_recv_hook=True)
        refuses(ArgumentError, "dispatch_recv is due", lambda: bring(rows, handle))
        hook()
        bring(rows, handle)
        buffer.destroy()
        comm.close()

    mori_shmem.run_ranks(rank, 2)


def test_normal_calls_are_refused_before_ranks_meet() -> None:
    def rank() -> None:
        comm = mori_shmem.init()
        buffer = Buffer(None, comm=comm)
        x, ids, weights = brought(comm.rank)

        def send(x: Any = x, ids: Any = ids, weights: Any = weights, experts: int = EXPERTS) -> Any:
            return buffer.dispatch(
                x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=torch.zeros(experts)
            )

        if comm.rank == 1:
            for call in (
                lambda: send(x[0]),
                lambda: send(x.double()),
                lambda: send(x.T.contiguous().T),
                lambda: send(ids=ids[:2]),
                lambda: send(weights=weights.double()),
                lambda: send(weights=weights[:2]),
                lambda: send((x, torch.ones(2, 4))),
                lambda: send(experts=EXPERTS + 1),
                lambda: buffer.dispatch(x, handle=(1, 2)),
                lambda: buffer.combine(x, None),
            ):
                refuses(REFUSED, "", call)
        rows, _, here_weights, _, handle, _ = send()
        out, *_ = buffer.combine(rows * here_weights.sum(1, keepdim=True).bfloat16(), handle)
        assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
        buffer.destroy()
        comm.close()

    mori_shmem.run_ranks(rank, 2)


def test_ids_that_only_a_cast_makes_experts_go_nowhere() -> None:
    far = torch.tensor([[2**32, 2**32 + 3, -(2**32) + 1], [0, EXPERTS, 7]])
    ids = expert_ids(far, EXPERTS)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[EXPERTS, EXPERTS, -1], [0, EXPERTS, 7]]

    def rank() -> None:
        comm = mori_shmem.init()
        buffer = Buffer(None, low_latency_mode=True, comm=comm)
        x, _, weights = brought(comm.rank)
        x, weights = x[:2], weights[:2]
        rows, _, _, counts, _, _ = buffer.dispatch(
            x, topk_idx=far, topk_weights=weights, num_tokens_per_expert=torch.zeros(EXPERTS)
        )
        assert (len(rows), counts) == (1, [1, 0, 0, 0, 0, 0, 0, 1])
        packed, count, handle, *_ = buffer.low_latency_dispatch(x, far, 16, EXPERTS, use_fp8=False)
        assert count.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
        out, *_ = buffer.low_latency_combine(packed, far, weights, handle)
        factor = torch.tensor([[0.0], [float(weights[1, 0] + weights[1, 2])]])
        assert torch.equal(out, (x.float() * factor).bfloat16())
        buffer.destroy()
        comm.close()

    mori_shmem.run_ranks(rank, 1)
