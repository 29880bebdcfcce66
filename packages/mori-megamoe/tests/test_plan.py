"""Properties of the plan, for random counts, pairs and tile sizes."""

from __future__ import annotations

import random

import pytest
import torch
from mori_megamoe import plan
from mori_megamoe.config import BUCKETS, bucket_for
from mori_megamoe.problem import Problem
from mori_megamoe.routing import Pair, Routes, next_pairs, routes_of

SEEDS = range(25)


class Case:
    """Ids of all ranks, and everything that a launch derives from them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        ranks, local = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 3, 6])
        topk = rng.randint(1, min(16, ranks * local))
        self.problem = p = Problem(256, 256, ranks * local, topk, ranks, 64)
        how = rng.choice(["even", "even", "one expert", "one rank", "pair"])
        self.tokens = [rng.choice([0, 1, 5, 33, 64]) for _ in range(ranks)]
        self.ids = [self._ids(rng, n, how) for n in self.tokens]
        no_pairs = [None] * ranks
        first = [routes_of(ids, p, no_pairs).counts for ids in self.ids]
        self.pairs: list[Pair | None] = rng.choice([no_pairs, next_pairs(first, p, no_pairs)])
        self.routes = [routes_of(ids, p, self.pairs) for ids in self.ids]
        self.counts = [routes.counts for routes in self.routes]
        self.blocks_m = [rng.choice([32, 64, 128]) for _ in range(ranks)]
        self.plans = plan.destinations(self.counts, p, self.blocks_m, self.pairs)

    def _ids(self, rng: random.Random, n: int, how: str) -> torch.Tensor:
        p = self.problem
        rows = []
        for _ in range(n):
            first = {"one expert": 1, "one rank": p.experts_per_rank, "pair": 2}.get(how, 0)
            first = min(first, p.topk)
            row = list(range(first))
            row += rng.sample([e for e in range(p.num_experts) if e not in row], p.topk - first)
            rows.append([-1 if rng.random() < 0.1 else e for e in row])
        return torch.tensor(rows, dtype=torch.int32).reshape(n, p.topk)


@pytest.fixture(params=SEEDS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def rows_at(case: Case, rank: int) -> dict[int, tuple[int, int, int]]:
    """Output row -> (source, token, slot), for every row that any source sends to `rank`; twice is an "
    "error."""
    found: dict[int, tuple[int, int, int]] = {}
    for source, routes in enumerate(case.routes):
        for number in range(case.problem.sends_per_rank):
            rows = routes.rows_of(plan.segment_id(case.problem, rank, number))
            slots = (routes.slot[rows].tolist(), routes.slot_b[rows].tolist())
            sections = case.plans[rank].sections_of(number)
            for section, member_slots in zip(sections, slots, strict=False):
                for i, (token, slot) in enumerate(
                    zip(routes.token[rows].tolist(), member_slots, strict=True)
                ):
                    row = section.base(source) + i
                    assert row not in found
                    found[row] = (source, token, slot)
    return found


def test_every_routed_slot_has_exactly_one_row_at_its_expert(case: Case) -> None:
    seen = set()
    for rank in range(case.problem.num_ranks):
        expert_of = {
            tile.row + i: tile.expert for tile in case.plans[rank].tiles for i in range(case.blocks_m[rank])
        }
        for row, (source, token, slot) in rows_at(case, rank).items():
            assert case.ids[source][token, slot] == expert_of[row]
            seen.add((source, token, slot))
    valid = {
        (source, token, slot)
        for source, ids in enumerate(case.ids)
        for token, row in enumerate(ids.tolist())
        for slot, expert in enumerate(row)
        if 0 <= expert < case.problem.num_experts
    }
    assert seen == valid


def test_no_two_sections_overlap_and_all_fit(case: Case) -> None:
    p = case.problem
    for rank, here in enumerate(case.plans):
        end = 0
        for section in here.sections:
            assert section.row == end
            assert section.row % case.blocks_m[rank] == 0
            end += plan.padded(section.rows, case.blocks_m[rank])
        assert end == here.num_rows
        routed = sum(s.rows for s in here.sections)
        assert here.num_rows <= routed + (p.experts_per_rank + 2) * (case.blocks_m[rank] - 1)
        assert routed <= p.num_ranks * p.max_tokens * min(p.topk, p.experts_per_rank)


def test_capacity_holds_with_the_launchs_own_tile_size(case: Case) -> None:
    p = case.problem
    blocks_m = [bucket_for(n).sort_block_m for n in case.tokens]
    plans = plan.destinations(case.counts, p, blocks_m, case.pairs)
    assert all(d.num_rows <= p.capacity_rows for d in plans)
    assert p.capacity_rows % p.max_block_m == 0


def test_capacity_holds_in_the_worst_case() -> None:
    """Each of a rank's experts one row past a whole tile, and a pair."""
    p = Problem(256, 256, 8, 4, 2, 8192)
    counts = [[129] * 8 + [129, 0], [0] * 10]
    worst = plan.destination(counts, p, 0, 128, Pair(1, 2))
    assert worst.num_rows - sum(s.rows for s in worst.sections) == 6 * 127
    assert worst.num_rows <= p.capacity_rows


def test_tiles_cover_every_row_once_in_order_and_read_only_what_their_segment_brings(case: Case) -> None:
    for rank, here in enumerate(case.plans):
        block = case.blocks_m[rank]
        covered = [tile.row for tile in here.tiles]
        assert covered == sorted(set(covered))
        assert {row // block * block for row in rows_at(case, rank)} <= set(covered)
        assert [tile.expert for tile in here.tiles] == sorted(tile.expert for tile in here.tiles)
        landed = {}  # input row -> number of the segment that brings it
        for source, counts in enumerate(case.counts):
            for number in range(case.problem.sends_per_rank):
                for i in range(counts[plan.segment_id(case.problem, rank, number)]):
                    row = here.landing_row(source, number) + i
                    assert row not in landed
                    landed[row] = number
        for tile in here.tiles:
            numbers = {landed[r] for r in range(tile.input_row, tile.input_row + block) if r in landed}
            assert numbers == {tile.number}


def test_rows_are_those_of_the_tiles(case: Case) -> None:
    for here in case.plans:
        assert here.num_rows == len(here.tiles) * here.block_m


def test_a_slab_holds_what_is_sent_to_others_without_gaps(case: Case) -> None:
    for me, routes in enumerate(case.routes):
        starts = plan.slab_starts(routes.counts, case.problem, me)
        at = 0
        for (rank, number), start in starts.items():
            assert rank != me
            assert start == at
            at += routes.counts[plan.segment_id(case.problem, rank, number)]
        assert at <= case.problem.max_tokens * case.problem.topk


def test_a_tile_waits_for_exactly_those_sources_that_have_rows_in_its_segment(case: Case) -> None:
    p = case.problem
    for rank, here in enumerate(case.plans):
        for tile in here.tiles:
            values = plan.needed(case.counts, p, 5, rank, tile.number)
            segment = plan.segment_id(p, rank, tile.number)
            for source in range(p.num_ranks):
                rows = case.counts[source][segment]
                assert values[source] == (plan.value_after(p, 5, tile.number) if rows else 0)
        assert all(any(plan.needed(case.counts, p, 5, rank, t.number)) for t in here.tiles)


def test_signal_values_grow_over_segments_and_launches(case: Case) -> None:
    p = case.problem
    values = [plan.value_after(p, epoch, number) for epoch in (1, 2, 3) for number in range(p.sends_per_rank)]
    assert values == list(range(1, len(values) + 1))


def test_the_same_counts_give_the_same_plan(case: Case) -> None:
    again = plan.destinations([list(c) for c in case.counts], case.problem, case.blocks_m, list(case.pairs))
    assert again == case.plans


def test_a_pairs_rows_land_once_and_are_read_by_both() -> None:
    p = Problem(256, 256, 6, 2, 2, 64)
    ids = [
        torch.tensor([[0, 2], [2, 0], [0, 1]], dtype=torch.int32),
        torch.tensor([[2, 0]], dtype=torch.int32),
    ]
    pairs = [Pair(0, 2), None]
    routes: list[Routes] = [routes_of(i, p, pairs) for i in ids]
    here = plan.destination([r.counts for r in routes], p, 0, 32, pairs[0])
    # a: 3 of the pair, 1 alone; b: the same 3, none alone; expert 1: 1.
    assert [(s.number, s.expert, s.row, s.input_row, s.rows) for s in here.sections] == [
        (0, 0, 0, 0, 3),
        (1, 0, 32, 32, 1),
        (2, 1, 64, 64, 1),
        (0, 2, 96, 0, 3),
        (3, 2, 128, 128, 0),
    ]
    assert here.tiles == ((0, 0, 0, 0), (0, 32, 32, 1), (1, 64, 64, 2), (2, 96, 0, 0))
    assert here.landing_row(1, 0) == 2
    assert here.sections_of(0)[1].base(1) == 98


def test_every_bucket_makes_whole_pieces_of_scales() -> None:
    assert all(b.sort_block_m % 32 == 0 for b in BUCKETS)
