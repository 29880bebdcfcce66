"""Across nodes: rows, their order and their sums are those of one node, whoever is slow."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep import EpDispatchCombineOp, reference
from mori_shmem.launch import run_ranks
from nodes import (
    EXPERTS_PER_RANK,
    HIDDEN,
    MAX_TOKENS,
    NIXL,
    brought,
    check_received,
    config_for,
    join,
    pair,
    slowly,
)


@pytest.mark.parametrize(
    ("engine", "nodes", "per_node", "kind"),
    [
        ("gloo", 2, 2, "InterNodeV1"),
        ("gloo", 2, 1, "InterNodeV1LL"),
        ("gloo", 3, 1, "InterNode"),
        ("gloo", 1, 2, "InterNodeV1"),  # no other node: nothing goes through the engine
        pytest.param("nixl", 2, 2, "InterNodeV1LL", marks=NIXL),
    ],
)
def test_rows_order_and_sums_are_those_of_one_node(engine: str, nodes: int, per_node: int, kind: str) -> None:
    world = nodes * per_node

    def calls() -> None:
        with join(engine, per_node) as comm:
            config = config_for(comm, Kind[kind], scale_dim=3, scale_type_size=4)
            with EpDispatchCombineOp(config, comm) as op:
                for call in range(6):  # ranks of different sizes, more than one chunk, parities
                    given = [brought(rank, call, world) for rank in range(world)]
                    if call % 2:
                        given = [replace(part, scales=None) for part in given]
                    pair(op, given, weights=call != 2)
                for tokens in (0, 64, 65, MAX_TOKENS):  # EP-1: none at all; the edges of a chunk
                    one_sided = [brought(r, 9, world, tokens if r % 2 else 0) for r in range(world)]
                    pair(op, one_sided)
                all_to_one = [brought(r, 10, world, 70) for r in range(world)]
                for part in all_to_one:
                    part.ids.fill_(-1)[:, 0] = EXPERTS_PER_RANK * (world - 1)
                pair(op, all_to_one)

    run_ranks(calls, world, timeout_s=120)


def test_other_dtypes_and_hidden_sizes_on_one_op() -> None:
    def calls() -> None:
        with (
            join("gloo", 1) as comm,
            EpDispatchCombineOp(config_for(comm, max_token_type_size=4), comm) as op,
        ):
            for call, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)):
                hidden = HIDDEN - 8 * call - 3  # odd numbers of bytes in a row, too
                given = [brought(rank, call, 2) for rank in range(2)]
                given = [replace(g, x=g.x[:, :hidden].contiguous().to(dtype), scales=None) for g in given]
                want, mine = reference.dispatch(given, EXPERTS_PER_RANK), given[comm.rank]
                results = op.dispatch(mine.x, mine.weights, None, mine.ids)
                check_received(op, results, want[comm.rank])
                wide = torch.float32 if dtype == torch.float8_e4m3fn else dtype
                out, _ = op.combine(results[0].to(wide), None, mine.ids)
                y = [received.rows.to(wide) for received in want]
                sums = reference.combine(given, want, y, EXPERTS_PER_RANK)
                assert torch.equal(out[: len(mine.ids)], sums[comm.rank])

    run_ranks(calls, 2, timeout_s=60)


def test_sums_are_rounded_once_per_node_and_once_at_the_end() -> None:
    """bf16 has steps of 32 above 4096: 4096 + 16 is rounded to 4096 on node 0, and that + 8 once more.
    Rounded once, the sum would be 4128."""

    def calls() -> None:
        with (
            join("gloo", 2) as comm,
            EpDispatchCombineOp(config_for(comm, num_experts=4, num_experts_per_token=4), comm) as op,
        ):
            ids = torch.tensor([[3, 2, 0, 1]], dtype=torch.int32)
            rows, *_ = op.dispatch(torch.ones(1, HIDDEN).bfloat16(), None, None, ids)
            out, _ = op.combine(torch.full_like(rows, [4096.0, 16.0, 4.0, 4.0][comm.rank]), None, ids)
            assert (out[0] == 4096).all()

    run_ranks(calls, 4, timeout_s=60)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 1)])
def test_quantised_sums_cross_nodes(nodes: int, per_node: int) -> None:
    """Whole numbers up to 16 are e4m3fn as they are, so a direct cast loses nothing of them, and halves the
    bytes between nodes; what else is lost stays within two quantisations. Weights are exact."""
    world = nodes * per_node

    def rank() -> None:
        with join("gloo", per_node) as comm:
            sent = {}
            for quant in ("none", "fp8_direct_cast"):
                config = config_for(comm, Kind.InterNodeV1, scale_dim=3, scale_type_size=4, quant_type=quant)
                with EpDispatchCombineOp(config, comm) as op:
                    engine, puts, sums = op._window.engine, [], op.layout.extra["partials_out"]

                    def put(*to: int, then=engine.put_signal, puts=puts, sums=sums) -> None:
                        if sums.offset_bytes <= to[2] < sums.end_bytes:
                            puts.append(to[3])
                        then(*to)

                    engine.put_signal = put
                    for call in range(3):
                        pair(op, [brought(r, call, world) for r in range(world)], weights=call != 1)
                    sent[quant] = sum(puts)
            assert sent["fp8_direct_cast"] < 0.56 * sent["none"]
            for quant in ("fp8_direct_cast", "fp8_blockwise"):
                given = [brought(r, 5, world, 100) for r in range(world)]
                for r, g in enumerate(given):
                    g.x[:] = torch.randn(g.x.shape, generator=torch.Generator().manual_seed(r))
                with EpDispatchCombineOp(config_for(comm, Kind.InterNodeV1LL, quant_type=quant), comm) as op:
                    mine, want = given[comm.rank], reference.dispatch(given, EXPERTS_PER_RANK)
                    rows, weights, *_ = op.dispatch(mine.x, mine.weights, None, mine.ids)
                    out, told = op.combine(rows, weights, mine.ids)
                    sums = reference.combine(given, want, [w.rows for w in want], EXPERTS_PER_RANK)
                    loss = reference.rel_l2(out[:100].float(), sums[comm.rank].float())
                    assert 5e-3 < loss < 5e-2
                    sums = reference.combine(given, want, [w.weights for w in want], EXPERTS_PER_RANK)
                    assert torch.equal(told[:100], sums[comm.rank])

    run_ranks(rank, world)


def test_many_pairs_back_to_back_with_ranks_that_drift() -> None:
    def calls() -> None:
        with join("gloo", 2) as comm, EpDispatchCombineOp(config_for(comm), comm) as op:
            pause = random.Random(comm.rank)
            for call in range(40):
                if pause.random() < 0.2:
                    time.sleep(0.005)
                pair(op, [replace(brought(r, call, 4, (call * 7 + r) % 70), scales=None) for r in range(4)])

    run_ranks(calls, 4, timeout_s=120)


def test_a_node_that_is_slow_keeps_what_came_while_others_go_on() -> None:
    """Node 0 is a call ahead whenever it can be: what it puts must not touch what node 1 has yet to read."""

    def calls() -> None:
        with join("gloo", 1) as comm, EpDispatchCombineOp(config_for(comm), comm) as op:
            me = comm.rank
            if me == 1:
                op._runner._combiner._add_up = slowly(op._runner._combiner._add_up, 0.04)
            calls_ = [
                [replace(brought(r, call, 2, 60 + 7 * call), scales=None) for r in range(2)]
                for call in range(8)
            ]
            wanted = [reference.dispatch(given, EXPERTS_PER_RANK) for given in calls_]
            for call, (given, want) in enumerate(zip(calls_, wanted, strict=True)):
                mine = given[me]
                results = op.dispatch_send(mine.x, mine.weights, None, mine.ids)
                if me == 1:
                    time.sleep(0.04)  # all of node 0's rows are here, and nothing of them is read
                op.dispatch_recv()
                check_received(op, results, want[me])
                if call % 3 == 0:
                    rows = results[0].clone()
                    for factor in (1, 2, 3):
                        out, _ = op.combine(rows * factor, None, mine.ids)
                        y = [received.rows * factor for received in want]
                        sums = reference.combine(given, want, y, EXPERTS_PER_RANK)
                        assert torch.equal(out[: len(mine.ids)], sums[me])

    run_ranks(calls, 2, timeout_s=60)
