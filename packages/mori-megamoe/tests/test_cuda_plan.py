"""The cuda target's plan and sending, on the CPU's emulation: several ranks at once, compared with the plan
in Python."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from mori_megamoe import plan as host_plan
from mori_megamoe.problem import Problem as LayerProblem
from mori_megamoe.targets.cuda import params
from mori_megamoe.targets.cuda.faults import error_of
from mori_megamoe.targets.cuda.layout import Shape, offsets_of
from mori_shmem.errors import PeerTimeout, UnsupportedShape

sys.path.insert(0, str(Path(__file__).parent))
from cuda_ranks import RankCall, Ranks, random_call, routes_by_expert

NO_SLOT = -1
TOY = {"model_dim": 256, "inter_dim": 512, "topk": 3, "max_tokens": 64, "body": "R", "tile_rows": 64}


def shape_of(world_size: int, num_experts: int, **fields: object) -> Shape:
    return Shape(world_size, num_experts=num_experts, **{**TOY, **fields})  # type: ignore[arg-type]


def planned(ranks: Ranks, calls: Sequence[RankCall]) -> None:
    ranks.each(lambda rank: ranks.plan_only(rank, calls[rank]))


def check_plan(ranks: Ranks, calls: Sequence[RankCall], call_number: int) -> None:
    """Order, tiles and units of every rank."""
    shape = ranks.shape
    by_expert = routes_by_expert(shape, calls)
    for rank, place in enumerate(ranks.places):
        local, counts = place.local, place.local.tiles.counts.tolist()
        mine = [[r for r in rows if r.rank == rank] for rows in by_expert]
        order = [r.token * shape.topk + r.slot for rows in mine for r in rows]
        assert local.order[: len(order)].tolist() == order
        tiles, sources, padding, row = [], [], [], 0
        for expert in range(shape.experts):
            rows = by_expert[rank * shape.experts + expert]
            for at in range(0, len(rows), shape.tile_rows):
                tiles.append((expert, row + at))
                here = {r.rank for r in rows[at : at + shape.tile_rows]}
                sources.append(sum(1 << s for s in here))
            padded = -(-len(rows) // shape.tile_rows) * shape.tile_rows
            padding += range(row + len(rows), row + padded)
            row += padded
        arrays = local.tiles
        assert counts[params.NUM_TILES] == len(tiles)
        assert list(zip(arrays.expert.tolist(), arrays.row_base.tolist(), strict=True))[: len(tiles)] == tiles
        assert arrays.input_base[: len(tiles)].tolist() == [base for _, base in tiles]
        assert arrays.sources[: len(tiles)].tolist() == sources
        assert counts[params.NUM_ROWS] == row
        assert counts[params.EPOCH] == call_number
        assert (place.landed.source[padding] == shape.world_size * shape.max_tokens).all()
        check_items(arrays.items[: counts[params.NUM_ITEMS]].tolist(), [e for e, _ in tiles], shape.pairs)
        check_units(ranks, rank, by_expert, counts[params.NUM_UNITS])


def check_items(items: list[int], experts: list[int], pairs: int) -> None:
    """Each tile with each pair once; experts ascending, in an expert the tile fastest."""
    split = [(item & 0xFFFFF, item >> 20) for item in items]
    assert sorted(split) == [(tile, pair) for tile in range(len(experts)) for pair in range(pairs)]
    keys = [(experts[tile], pair, tile) for tile, pair in split]
    assert keys == sorted(keys)


def check_units(ranks: Ranks, rank: int, by_expert: list[list[object]], count: int) -> None:
    shape, place = ranks.shape, ranks.places[rank]
    units = place.local.units.view(torch.int32).view(-1, 5)[:count].tolist()
    experts = [
        (rank + 1 + step) % shape.world_size * shape.experts + expert
        for expert in range(shape.experts)
        for step in range(shape.world_size)
    ]
    wanted, firsts, first = [], {}, 0
    for expert, rows in enumerate(by_expert):
        firsts[expert] = first
        first += sum(r.rank == rank for r in rows)  # type: ignore[attr-defined]
    for expert in experts:
        rows = by_expert[expert]
        number = sum(r.rank == rank for r in rows)  # type: ignore[attr-defined]
        to = landing_row(shape, by_expert, expert) + sum(r.rank < rank for r in rows)  # type: ignore[attr-defined]
        for at in range(0, number, 16):
            wanted.append([firsts[expert] + at, min(16, number - at), expert, to + at, NO_SLOT])
    assert units == wanted


def landing_row(shape: Shape, by_expert: list[list[object]], expert: int) -> int:
    """Where an expert's rows begin at its rank."""
    first = expert // shape.experts * shape.experts
    return sum(-(-len(rows) // shape.tile_rows) * shape.tile_rows for rows in by_expert[first:expert])


def test_the_plan_of_three_ranks_in_calls_that_follow_one_another() -> None:
    """Different tokens on each rank, one without any; -1 ids; a second call with other counts, then none at
    all."""
    ranks = Ranks(shape_of(3, 12))
    before = torch.empty(0)
    for number, tokens in enumerate([(40, 0, 7), (1, 64, 33), (0, 0, 0)], 1):
        calls = [random_call(ranks.shape, n, 10 * number + r) for r, n in enumerate(tokens)]
        planned(ranks, calls)
        check_plan(ranks, calls, number)
        told = counts_told(ranks)
        if number > 1:  # a rank may still read those of the call before while others tell the next
            assert torch.equal(told[(number - 1) % 2], before)
        before = told[number % 2]


def counts_told(ranks: Ranks) -> torch.Tensor:
    """[2][source][experts of all + 1], as the last rank has them."""
    shape = ranks.shape
    offsets, _ = offsets_of(shape)
    count = 2 * shape.world_size * (shape.num_experts + 1)
    part = ranks.parts[-1][offsets["counts"] : offsets["counts"] + 4 * count]
    return part.view(torch.int32).view(2, shape.world_size, shape.num_experts + 1).clone()


def test_all_tokens_to_one_expert() -> None:
    ranks = Ranks(shape_of(2, 4, topk=1, max_tokens=300))
    calls = [random_call(ranks.shape, n, r) for r, n in enumerate((300, 150))]
    for call in calls:
        call.ids.fill_(3)
    planned(ranks, calls)
    check_plan(ranks, calls, 1)


def test_many_experts_and_one_rank() -> None:
    """1024 experts: a thread each."""
    ranks = Ranks(shape_of(1, 1024, topk=8))
    calls = [random_call(ranks.shape, 64, 5)]
    planned(ranks, calls)
    check_plan(ranks, calls, 1)


def test_it_is_the_plan_of_the_host_target() -> None:
    """Without pairs, the same tiles and the same landing rows."""
    ranks = Ranks(shape_of(2, 8))
    calls = [random_call(ranks.shape, n, r) for r, n in enumerate((50, 29))]
    planned(ranks, calls)
    shape = ranks.shape
    problem = LayerProblem(shape.model_dim, shape.inter_dim, 8, shape.topk, 2, 64)
    counts = []
    for call in calls:
        flat = call.ids.flatten()
        number = torch.bincount(flat[flat >= 0].long(), minlength=8).tolist()
        counts.append([*number, 0, 0])
    for rank, place in enumerate(ranks.places):
        wanted = host_plan.destination(counts, problem, rank, shape.tile_rows, None)
        arrays, tiles = place.local.tiles, len(wanted.tiles)
        assert arrays.counts[params.NUM_TILES] == tiles
        got = list(zip(arrays.expert.tolist(), arrays.row_base.tolist(), strict=True))[:tiles]
        assert got == [(t.expert - rank * shape.experts, t.row) for t in wanted.tiles]
        assert arrays.counts[params.NUM_ROWS] == wanted.num_rows


def check_landed(ranks: Ranks, calls: Sequence[RankCall]) -> None:
    """Every row, scale, origin and weight at its place."""
    shape = ranks.shape
    by_expert = routes_by_expert(shape, calls)
    for expert, rows in enumerate(by_expert):
        place = ranks.places[expert // shape.experts]
        first = landing_row(shape, by_expert, expert)  # type: ignore[arg-type]
        for at, r in enumerate(rows, first):
            sent = ranks.places[r.rank].local
            assert torch.equal(place.landed.rows[at], sent.rows[r.token])
            assert place.landed.source[at] == r.rank * shape.max_tokens + r.token | r.slot << 24
            assert place.landed.weight[at] == calls[r.rank].weights[r.token, r.slot]
            if shape.body == "R":
                assert place.landed.row_scale[at] == sent.row_scale[r.token]


@pytest.mark.parametrize("body", ["R", "A"])
def test_rows_land_where_the_plan_says(body: str) -> None:
    """Two calls, the second into memory that the first has used, with ranks in another order."""
    ranks = Ranks(shape_of(3, 6, body=body))
    delays = random.Random(1)
    for number in range(2):
        calls = [random_call(ranks.shape, n, 100 * number + r) for r, n in enumerate((20, 3, 41))]

        def job(rank: int, calls: list[RankCall] = calls) -> None:
            ranks.prepare(rank, calls[rank])
            ranks.dispatch(rank, calls[rank])

        ranks.each(job, delays)
        check_landed(ranks, calls)
        for place in ranks.places:
            assert torch.equal(place.landed.arrived, place.local.due)
        assert not any(ranks.fault(rank)["code"] for rank in range(3))


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks(shape_of(2, 4), timeout_s=0.2)
    call = random_call(ranks.shape, 9, 0)
    ranks.plan_only(0, call)
    found = ranks.fault(0)
    assert (found["code"], found["peer"], found["what"]) == (1, 1, params.WAIT_COUNTS)
    assert isinstance(error_of(found, 0.2), PeerTimeout)
    assert "rank 1: its counts of call 1; seen 0, wanted 1" in str(error_of(found, 0.2))
    counts = ranks.places[0].local.tiles.counts.tolist()
    assert counts[params.NUM_ITEMS] == counts[params.NUM_UNITS] == 0  # so that Stage1 ends at once


def test_more_rows_than_a_rank_has_room_for_is_seen_by_all() -> None:
    ranks = Ranks(shape_of(2, 4, capacity=128))
    calls = [random_call(ranks.shape, 64, r, invalid=0) for r in range(2)]
    for call in calls:
        call.ids[:] = torch.tensor([2, 3, -1], dtype=torch.int32)  # 256 rows for rank 1
    planned(ranks, calls)
    for rank, place in enumerate(ranks.places):
        found = ranks.fault(rank)
        assert (found["peer"], found["seen"], found["wanted"]) == (1, 256, 128)
        assert isinstance(error_of(found, 1), UnsupportedShape)
        assert place.local.tiles.counts[params.NUM_UNITS] == 0
