"""Across nodes: what cannot be done, and what ranks give that does not go together, is refused by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep import EpDispatchCombineOp, internode
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    CollectiveMismatch,
    SettingError,
    TransportInert,
    UnsupportedShape,
)
from mori_shmem.launch import run_ranks
from nodes import EXPERTS_PER_RANK, HIDDEN, TOPK, brought, config_for, join, pair


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(call: Callable[[], object], kind: type[Exception], *words: str) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value

    def calls() -> None:
        refused(lambda: internode.join(ranks_per_node=3), UnsupportedShape, "ranks_per_node=3", "2 ranks")
        refused(lambda: internode.join(ranks_per_node=1, engine="ucx"), SettingError, "ucx", "nixl, gloo")
        refused(lambda: internode.join(ranks_per_node=1, backend="cuda"), TransportInert, "GPU memory")
        comm = join("gloo", 1)
        for more, words in (
            ({"kind": Kind.IntraNode}, "IntraNode reaches the ranks of one node"),
            ({"elastic": True}, "elastic=True"),
            ({"quant_type": "fp4_blockwise"}, "fp4_blockwise goes with"),
            ({"quant_type": "fp8_blockwise", "use_external_inp_buf": False}, "would be ignored"),
            ({"gpu_per_node": 2}, "gpu_per_node=2"),
        ):
            refused(
                lambda more=more: EpDispatchCombineOp(config_for(comm, **more), comm), UnsupportedShape, words
            )
        with EpDispatchCombineOp(config_for(comm), comm) as op:
            given = [brought(r, 0, 2, 5) for r in range(2)]
            mine = replace(given[comm.rank], x=given[comm.rank].x[:, : HIDDEN - 8 * comm.rank].contiguous())
            refused(lambda: op.dispatch(mine.x, None, None, mine.ids), CollectiveMismatch, "hidden bytes")
        with EpDispatchCombineOp(config_for(comm, max_total_recv_tokens=80), comm) as op:
            for tokens in (3, 70, 30):  # EP-5: too many are refused on every rank, and the op goes on
                given = [replace(brought(r, 1, 2, tokens), scales=None) for r in range(2)]
                if tokens == 70:
                    mine = given[comm.rank]
                    refused(
                        lambda m=mine: op.dispatch(m.x, None, None, m.ids), UnsupportedShape, "room for 40"
                    )
                else:
                    pair(op, given)
        comm.close()
        comm.close()
        refused(comm.barrier, ClosedError, "closed")
        with mori_shmem.init(name="one node") as here:
            config = replace(config_for(here_as_nodes(here)), gpu_per_node=2)
            refused(lambda: EpDispatchCombineOp(config, here), UnsupportedShape, "internode.join")

    run_ranks(calls, 2, timeout_s=60)


def here_as_nodes(comm: mori_shmem.Communicator):
    """What config_for looks at."""

    class Nodes:
        rank, world_size, ranks_per_node = comm.rank, comm.world_size, comm.world_size

    return Nodes()


def test_configurations_and_engines_that_differ_are_told_apart() -> None:
    def calls() -> None:
        rank = int(os.environ["RANK"])
        with pytest.raises(ArgumentError, match=r"gloo.*nixl"):
            internode.join(ranks_per_node=1, engine=["gloo", "nixl"][rank], name="a", timeout_s=20)
        with (
            internode.join(ranks_per_node=1, engine="gloo", name="b", timeout_s=20) as comm,
            pytest.raises(ArgumentError, match="hidden_dim is 64 on rank 0, 65 on rank 1"),
        ):
            EpDispatchCombineOp(config_for(comm, hidden_dim=64 + rank), comm)

    run_ranks(calls, 2, timeout_s=60)


def test_PK_2_an_engine_that_is_not_installed_names_the_extra() -> None:
    def calls() -> None:
        sys.modules["nixl_cu12"] = sys.modules["nixl_cu13"] = None  # what an import of them then raises
        with join("nixl", 1) as comm, pytest.raises(TransportInert, match=r"mori-ep\[internode\].*gloo"):
            comm.alloc(256)

    run_ranks(calls, 2, timeout_s=60)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 1)])
def test_P25_combines_that_differ_are_told_to_all_ranks_of_all_nodes(nodes: int, per_node: int) -> None:
    """Rank 1 gives no weights, or has a smaller hidden size. With three nodes the last has no rows, so that
    nobody but the others' words can tell it."""
    world = nodes * per_node

    def rank() -> None:
        with join("gloo", per_node, timeout_s=20) as comm:
            me, n = comm.rank, 5
            x = torch.zeros(n, HIDDEN).bfloat16()
            own = torch.full((n, TOPK), EXPERTS_PER_RANK * me, dtype=torch.int32)
            if me == 2 and nodes == 3:
                own[:] = -1
            y = torch.zeros(world * n, HIDDEN).bfloat16()
            weights = torch.ones(world * n, TOPK)
            alone = nodes == 3 and me == 2
            for rows, brought, words in (
                (y, None if me == 1 or alone else weights, "weights"),
                (y[:, :16].contiguous() if me == 1 else y, None, r"\[\*, (16|128)\]|of different kinds"),
            ):
                with EpDispatchCombineOp(config_for(comm, Kind.InterNodeV1), comm) as op:
                    op.dispatch(x, None, None, own)
                    with pytest.raises(CollectiveMismatch, match=words):
                        op.combine(rows, brought, own)
                    comm.barrier()

    run_ranks(rank, world)
