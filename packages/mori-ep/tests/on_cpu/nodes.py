"""Several nodes of one machine on its loopback: who is a node is what `join` was told. The gloo engine runs
everywhere; nixl where it is installed."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable

import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp, internode, reference
from mori_ep import EpDispatchCombineKernelType as Kind

os.environ.setdefault("MORI_SHMEM_BACKEND", "host")
EXPERTS_PER_RANK, TOPK, HIDDEN, MAX_TOKENS = 4, 6, 128, 150
NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")),
    reason="nixl is not installed: mori-ep[internode]",
)
BOTH = ["gloo", pytest.param("nixl", marks=NIXL)]


def join(engine: str, per_node: int, timeout_s: float = 60) -> internode.NodesCommunicator:
    return internode.join(engine=engine, ranks_per_node=per_node, timeout_s=timeout_s)


def config_for(comm: internode.NodesCommunicator, kind: Kind = Kind.InterNode, **more: object):
    return EpDispatchCombineConfig.for_comm(
        comm,
        **{
            "num_experts": EXPERTS_PER_RANK * comm.world_size,
            "data_type": torch.bfloat16,
            "hidden_dim": HIDDEN,
            "max_num_inp_token_per_rank": MAX_TOKENS,
            "num_experts_per_token": TOPK,
            "kernel_type": kind,
            "gpu_per_node": comm.ranks_per_node,
            **more,
        },
    )


def brought(rank: int, call: int, world: int, tokens: int | None = None) -> reference.RankInput:
    """Rows of whole numbers, so that sums are exact whatever the grouping; some slots and tokens masked."""
    generator = torch.Generator().manual_seed(rank * 1000 + call)
    n = (rank * 61 + call * 37) % (MAX_TOKENS + 1) if tokens is None else tokens
    x = torch.randint(-4, 5, (n, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand(n, EXPERTS_PER_RANK * world, generator=generator).argsort(1)[:, :TOPK].int()
    ids[call % 3 :: 7, 2] = -1
    ids[::11] = -1
    weights = torch.randint(1, 4, (n, TOPK), generator=generator).float()
    scales = torch.rand(n, 3, generator=generator)
    return reference.RankInput(x, ids, weights, scales)


def check_received(op: EpDispatchCombineOp, results: tuple, want: reference.Received) -> None:
    rows, weights, scales, ids, count = results[:5]
    n = want.count
    assert int(count) == n
    assert torch.equal(rows[:n].view(torch.uint8), want.rows.view(torch.uint8))
    assert torch.equal(ids[:n], want.ids)
    if want.weights is not None:
        assert torch.equal(weights[:n], want.weights)
    if want.scales is not None:
        assert torch.equal(scales[:n], want.scales)
    positions = op.get_dispatch_src_token_pos().tolist()
    assert [op.decode_send_flat_idx(position) for position in positions] == want.sources


def pair(op: EpDispatchCombineOp, given: list[reference.RankInput], *, weights: bool = True) -> None:
    """A dispatch and a combine, held to the reference; what is stale is poison."""
    me = op.config.rank
    mine, want = given[me], reference.dispatch(given, EXPERTS_PER_RANK)
    results = op.dispatch(mine.x, mine.weights, mine.scales, mine.ids)
    check_received(op, results, want[me])
    n = want[me].count
    y = torch.full_like(results[0], float("nan"))
    y[:n] = results[0][:n]
    out, out_weights = op.combine(y, results[1] if weights else None, mine.ids)
    sums = reference.combine(given, want, [received.rows for received in want], EXPERTS_PER_RANK)
    assert torch.equal(out[: len(mine.ids)], sums[me])
    if weights:
        all_weights = [received.weights for received in want]
        sums = reference.combine(given, want, all_weights, EXPERTS_PER_RANK)
        assert torch.equal(out_weights[: len(mine.ids)], sums[me])
    else:
        assert out_weights is None


def slowly(call: Callable[..., object], pause_s: float) -> Callable[..., object]:
    def wrapped(*arguments: object) -> object:
        time.sleep(pause_s)
        return call(*arguments)

    return wrapped
