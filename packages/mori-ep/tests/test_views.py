"""What a second call costs: the very tensors again, and nothing made, allocated or looked up on the way."""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
from mori_ep.testing import fixture
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("IntraNode", "IntraNodeLL", "AsyncLL")


def made(comm: mori_shmem.Communicator, kind: str = "IntraNode") -> EpDispatchCombineOp:
    config = EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=8,
        data_type=torch.bfloat16,
        hidden_dim=64,
        num_experts_per_token=4,
        max_num_inp_token_per_rank=32,
        scale_dim=2,
        scale_type_size=4,
        kernel_type=EpDispatchCombineKernelType[kind],
    )
    return EpDispatchCombineOp(config, comm)


def results_of(op: EpDispatchCombineOp, hidden: int = 64) -> list[torch.Tensor]:
    """Everything that a dispatch and a combine with scales and weights return."""
    given = fixture(op.config.rank, 9, 4, 8, hidden)
    dispatched = op.dispatch(given.x, given.weights, torch.ones(9, 2), given.ids)
    combined = op.combine(dispatched[0], dispatched[1], given.ids)
    return [*dispatched, *combined]


def test_T1_the_same_objects_come_back_unless_the_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(cached: bool) -> None:
        with mori_shmem.init() as comm, made(comm) as op:
            first, second = results_of(op), results_of(op)
            assert len(first) == 7
            for a, b in zip(first, second, strict=True):
                assert (a is b) == cached
                assert a.data_ptr() == b.data_ptr()
            other = results_of(op, 32)  # another shape: other objects over the same memory
            again = results_of(op)
            assert other[0] is not first[0]
            assert other[0].data_ptr() == first[0].data_ptr()
            assert all((a is b) == cached for a, b in zip(first, again, strict=True))
            os.environ["MORI_EP_DISABLE_VIEW_CACHE"] = "0" if not cached else "1"  # read once: no effect now
            third = results_of(op)
            assert all((a is b) == cached for a, b in zip(first, third, strict=True))
            del os.environ["MORI_EP_DISABLE_VIEW_CACHE"]

    mori_shmem.run_ranks(rank, 2, True)
    monkeypatch.setenv("MORI_EP_DISABLE_VIEW_CACHE", "1")
    mori_shmem.run_ranks(rank, 2, False)


class NoTensors(TorchDispatchMode):
    """Every operator of torch that runs inside is an error: making a tensor or a view is one, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class NoReading(dict):  # type: ignore[type-arg]
    """An environment that nobody may look into."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError(f"the environment was asked for {key}")

    __contains__ = get = __getitem__  # type: ignore[assignment]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_makes_no_tensor_reads_no_variable_and_keeps_no_memory(kind: str) -> None:
    def rank() -> int:
        with mori_shmem.init() as comm, made(comm, kind) as op:
            given = fixture(comm.rank, 9, 4, 8, 64)
            scales = torch.ones(9, 2)

            def call() -> None:
                rows, weights, _, _, _ = op.dispatch(given.x, given.weights, scales, given.ids)
                op.combine(rows, weights, given.ids)

            for _ in range(5):
                call()
            with pytest.MonkeyPatch.context() as patch, NoTensors():
                patch.setattr(os, "environ", NoReading())
                call()
            tracemalloc.start()
            call()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(50):
                call()
            kept = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            comm.barrier()
            return kept

    assert max(mori_shmem.run_ranks(rank, 2)) < 4096


def test_results_are_where_the_layout_says_and_stay_readable_after_close() -> None:
    def rank() -> None:
        comm = mori_shmem.init()
        op = made(comm)
        results = results_of(op)
        assert op._window is not None
        base = op._window.addresses[comm.rank]
        assert results[0].data_ptr() == base + op.layout.out.offset_bytes
        assert results[5].data_ptr() == base + op.layout.result.offset_bytes
        kept = results[5].clone()
        comm.barrier()
        op.close()
        op.close()
        comm.close()
        assert torch.equal(results[5], kept)
        with pytest.raises(mori_shmem.errors.ClosedError, match="closed"):
            op.reset()

    mori_shmem.run_ranks(rank, 2)
