"""Rows that a rank sends: once for every slot that names an expert, once for both experts of a pair, in "
"order."""

from __future__ import annotations

import random

import pytest
import torch
from mori_megamoe.problem import Problem
from mori_megamoe.routing import (
    Pair,
    Pairs,
    decode_source,
    encode_source,
    next_pairs,
    routes_of,
)


def problem(ranks: int, local: int, topk: int, tokens: int = 64) -> Problem:
    return Problem(256, 256, ranks * local, topk, ranks, tokens)


def random_ids(rng: random.Random, n: int, p: Problem, invalid: float = 0.1) -> torch.Tensor:
    rows = []
    for _ in range(n):
        row = rng.sample(range(p.num_experts), p.topk)
        rows.append([rng.choice([-1, p.num_experts, -(2**31)]) if rng.random() < invalid else e for e in row])
    return torch.tensor(rows, dtype=torch.int32).reshape(n, p.topk)


def random_pairs(rng: random.Random, p: Problem) -> list[Pair | None]:
    if p.experts_per_rank < 2:
        return [None] * p.num_ranks
    local = range(p.experts_per_rank)
    return [rng.choice([None, Pair(*sorted(rng.sample(local, 2)))]) for _ in range(p.num_ranks)]


def rows_by_hand(ids: torch.Tensor, p: Problem, pairs: Pairs) -> list[list[tuple[int, int, int]]]:
    """(token, slot, slot of b) of each segment, the plain way."""
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(p.num_segments)]
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if not 0 <= expert < p.num_experts:
                continue
            rank, local = divmod(expert, p.experts_per_rank)
            pair = pairs[rank]
            both = pair and all(rank * p.experts_per_rank + member in row for member in pair)
            if both and pair and local == pair.a:
                other = row.index(rank * p.experts_per_rank + pair.b)
                segments[p.num_experts + rank].append((token, slot, other))
            elif not (both and pair and local == pair.b):
                segments[expert].append((token, slot, -1))
    return segments


@pytest.mark.parametrize("seed", range(12))
def test_routes_are_those_made_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    p = problem(rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 5]), 1)
    p = problem(p.num_ranks, p.experts_per_rank, rng.randint(1, min(16, p.num_experts)))
    ids, pairs = random_ids(rng, rng.choice([0, 1, 17, 40]), p), random_pairs(rng, p)
    routes, want = routes_of(ids, p, pairs), rows_by_hand(ids, p, pairs)
    assert routes.counts == [len(rows) for rows in want]
    assert routes.starts == [sum(routes.counts[:s]) for s in range(p.num_segments)]
    for segment, rows in enumerate(want):
        here = routes.rows_of(segment)
        got = zip(
            routes.token[here].tolist(), routes.slot[here].tolist(), routes.slot_b[here].tolist(), strict=True
        )
        assert list(got) == rows
        assert rows == sorted(rows)


def test_a_pair_saves_one_row_per_token_that_goes_to_both() -> None:
    p = problem(2, 4, 3)
    ids = torch.tensor([[0, 2, 5], [2, 0, 7], [0, 1, 2], [0, 1, 3]], dtype=torch.int32)
    without, paired = routes_of(ids, p, [None, None]), routes_of(ids, p, [Pair(0, 2), None])
    assert sum(without.counts) == 12
    assert sum(paired.counts) == 9
    here = paired.rows_of(p.num_experts)
    assert paired.token[here].tolist() == [0, 1, 2]
    assert paired.slot[here].tolist() == [0, 1, 0]
    assert paired.slot_b[here].tolist() == [1, 0, 2]
    assert paired.counts[0] == 1  # the last token goes to a alone


def test_words_come_back() -> None:
    for source, slot in ((0, 0), ((1 << 24) - 1, 15), (12345, 8)):
        assert decode_source(encode_source(source, slot)) == (source, slot)
        assert encode_source(source, slot) < 1 << 31


def test_next_pairs_are_the_two_busiest_with_ties_to_the_lower() -> None:
    p = problem(2, 4, 2)
    counts = [[5, 9, 5, 0, 0, 0, 3, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert next_pairs(counts, p, [None, None]) == [
        Pair(0, 1),
        None,
    ]  # 6, 9, 6 rows; one busy expert is no pair
    counts[0][8] = 4  # rows of the pair (2, 3) count for both
    assert next_pairs(counts, p, [Pair(2, 3), None]) == [Pair(1, 2), None]
    assert next_pairs([[0] * 10] * 2, p, [None, None]) == [None, None]


def test_one_expert_per_rank_has_no_pair() -> None:
    assert next_pairs([[3, 4, 0, 0]], problem(2, 1, 1), [None, None]) == [None, None]
