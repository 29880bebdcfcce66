"""The operators of torch.library: torch's own checks of them, and a layer compiled whole."""

from __future__ import annotations

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp, nn
from mori_ep.testing import expected, fixture
from mori_shmem.launch import preload

EXPERTS, TOPK, HIDDEN = 8, 4, 64


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    preload("mori_ep.nn")  # 3 s of torch's compiler


def made(comm: mori_shmem.Communicator, dtype: torch.dtype = torch.bfloat16) -> EpDispatchCombineOp:
    config = EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=EXPERTS,
        data_type=dtype,
        hidden_dim=HIDDEN,
        num_experts_per_token=TOPK,
        max_num_inp_token_per_rank=32,
        scale_dim=2,
        scale_type_size=4,
    )
    return EpDispatchCombineOp(config, comm)


def layer(
    op: EpDispatchCombineOp, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dispatch, experts that multiply by their weights, combine, and something after it."""
    rows, came, _, got, count = nn.dispatch(op, x, weights, None, ids)
    per_rank = op.config.num_experts_per_rank
    here = torch.div(got, per_rank, rounding_mode="floor") == op.config.rank
    y = (rows.float() * (came * here).sum(1, keepdim=True)).to(rows.dtype)
    out, _ = nn.combine(op, y, None, ids, after=count)
    return torch.relu(out) + 1, count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_torch_finds_nothing_wrong_with_the_operators(dtype: torch.dtype) -> None:
    """Schema, fake kernels against real ones, tracing: torch.library.opcheck, on one rank."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, dtype) as op:
            given = fixture(0, 5, TOPK, EXPERTS, HIDDEN)
            x, handle = given.x.to(dtype), nn.handle_of(op)
            args = (given.ids, nn.CODES[dtype], HIDDEN, handle)
            for scales in (None, torch.ones(5, 2).view(torch.uint8)):
                tensors = (x.view(torch.uint8), given.weights, scales)
                torch.library.opcheck(
                    torch.ops.mori_ep.dispatch.default, (*tensors, *args, 32), test_utils=CHECKS
                )
            y = torch.ones(32, HIDDEN).bfloat16()
            args = (given.ids, nn.CODES[torch.bfloat16], HIDDEN, handle, None)
            for weights in (None, torch.ones(32, TOPK)):
                torch.library.opcheck(
                    torch.ops.mori_ep.combine.default,
                    (y.view(torch.uint8), weights, *args),
                    test_utils=CHECKS,
                )

    mori_shmem.run_ranks(rank, 1)


# Rows behind `count` are whatever the memory holds, so the fake kernels are compared in shape, not the
# results.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_a_layer_compiles_whole_and_gives_what_it_gives_uncompiled() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm) as op:
            whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
            for turn in range(3):
                given = fixture(comm.rank + turn, 9, TOPK, EXPERTS, HIDDEN)
                plain, count = layer(op, given.x, given.weights, given.ids)
                out, compiled_count = whole(op, given.x, given.weights, given.ids)
                want = torch.relu(expected(given, EXPERTS)) + 1
                assert torch.equal(out, want)
                assert torch.equal(plain, want)
                assert torch.equal(count, compiled_count)

    mori_shmem.run_ranks(rank, 2)


def test_results_are_the_callers_own() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, torch.float8_e4m3fn) as op:
            given = fixture(comm.rank, 4, TOPK, EXPERTS, HIDDEN)
            first = nn.dispatch(
                op, given.x.to(torch.float8_e4m3fn), given.weights, torch.ones(4, 2), given.ids
            )
            assert first[0].dtype == torch.float8_e4m3fn
            assert first[2] is not None
            assert first[2].shape == (op.config.recv_capacity, 2)
            kept = [t.clone() for t in first if t is not None]
            other = fixture(comm.rank + 5, 7, TOPK, EXPERTS, HIDDEN)
            nn.dispatch(op, other.x.to(torch.float8_e4m3fn), other.weights, torch.zeros(7, 2), other.ids)
            n = int(first[4])
            for now, before in zip([t for t in first if t is not None], kept, strict=True):
                assert torch.equal(now[:n].view(torch.uint8), before[:n].view(torch.uint8))
            comm.barrier()

    mori_shmem.run_ranks(rank, 2)
