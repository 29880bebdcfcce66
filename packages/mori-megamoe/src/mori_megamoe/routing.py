"""From the expert ids of one rank's tokens to the rows that it sends. Pure; every rank could do it for every
other.

A *segment* is what one rank sends to one expert: ids 0 .. E-1, one for each expert. Besides, each rank d has
a segment E + d for its *pair*, two of its experts: a token that goes to both sends one row there, which both
read. A token's other routes to d go to their experts' segments.

Rows inside a segment are in the order of (token, slot). A segment names an expert at most once per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from mori_megamoe.problem import Problem

N = TypeVar("N", int, torch.Tensor)

SOURCE_BITS = 24
SOURCE_MASK = (1 << SOURCE_BITS) - 1


class Pair(NamedTuple):
    """Two experts of one rank, numbered within it, a < b."""

    a: int
    b: int


Pairs = Sequence[Pair | None]  # by rank


def encode_source(source: N, slot: N) -> N:
    """A row's origin in 32 bits: `source` is rank * max_tokens + token, `slot` the place in the token's
    top-k."""
    return source | slot << SOURCE_BITS


def decode_source(word: N) -> tuple[N, N]:
    """(source, slot)."""
    return word & SOURCE_MASK, word >> SOURCE_BITS


@dataclass(frozen=True)
class Routes:
    """The rows that one rank sends, segment after segment."""

    counts: list[int]  # [segments]: rows of each
    starts: list[int]  # [segments]: rows before it
    token: torch.Tensor  # [rows] int64
    slot: torch.Tensor  # [rows] int64: of the expert, or of the pair's a
    slot_b: torch.Tensor  # [rows] int64: of the pair's b; -1 in the segment of an expert

    def rows_of(self, segment: int) -> slice:
        """Where the rows of a segment are in the tensors."""
        return slice(self.starts[segment], self.starts[segment] + self.counts[segment])


def routes_of(ids: torch.Tensor, problem: Problem, pairs: Pairs) -> Routes:
    """ids [n, k] int32: global expert ids; others name no expert and go nowhere."""
    segment, slot_b = _segments(ids, problem, pairs)
    flat = segment.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=problem.num_segments + 1)
    order = order[: len(order) - int(counts[-1])]  # without what emits no row
    starts = (counts.cumsum(0) - counts).tolist()
    topk = ids.shape[1]
    return Routes(counts.tolist()[:-1], starts[:-1], order // topk, order % topk, slot_b.flatten()[order])


def _segments(ids: torch.Tensor, problem: Problem, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] int64 each: the segment that a slot sends a row to (the number of segments: none), and the slot
    of the pair's other expert, or -1."""
    local = problem.experts_per_rank
    ids = ids.to(torch.int64)
    nowhere = (ids < 0) | (ids >= problem.num_experts)
    segment = ids.masked_fill(nowhere, problem.num_segments)
    slot_b = torch.full_like(segment, -1)
    for rank, pair in enumerate(pairs):
        if pair is None:
            continue
        is_a, is_b = ids == rank * local + pair.a, ids == rank * local + pair.b
        both = is_a.any(1, keepdim=True) & is_b.any(1, keepdim=True)
        segment[is_a & both] = problem.num_experts + rank
        segment[is_b & both] = problem.num_segments
        other = is_b.to(torch.int64).argmax(1, keepdim=True).expand_as(slot_b)
        slot_b = torch.where(is_a & both, other, slot_b)
    return segment, slot_b


def next_pairs(counts: Sequence[Sequence[int]], problem: Problem, pairs: Pairs) -> list[Pair | None]:
    """The pairs of the next launch, from the rows of this one: each rank's two busiest experts, ties to the
    lower number; none where fewer than two had any.

    counts  # [ranks][segments]: rows that each rank sent, with `pairs`
    """
    return [_busiest(counts, problem, rank, pairs[rank]) for rank in range(problem.num_ranks)]


def _busiest(counts: Sequence[Sequence[int]], problem: Problem, rank: int, pair: Pair | None) -> Pair | None:
    local = problem.experts_per_rank
    rows = [sum(row[rank * local + e] for row in counts) for e in range(local)]
    for member in pair or ():
        rows[member] += sum(row[problem.num_experts + rank] for row in counts)
    first_two = sorted(range(local), key=lambda e: (-rows[e], e))[:2]
    if len(first_two) < 2 or rows[first_two[1]] == 0:
        return None
    return Pair(*sorted(first_two))
