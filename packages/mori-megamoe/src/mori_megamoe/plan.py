"""Where every row of a launch goes: pure functions of the counts that all ranks have gathered.

For destination d with tiles of M rows, experts in order, each expert gets

    [the pair's rows, if it belongs to the pair, padded to M] [its own rows, padded to M]

and within each of the two, sources follow one another in rank order: what one rank sends to one segment is
one run of rows. Both experts of a pair have the section of the pair's rows, but its inputs are only once, in
the section of a; tiles of b's section read them there.

Order of sending, and of work: the pair's segment is number 0, expert e's (counted within d) is number 1 + e.
A source sends to d in this order and then says so in one word at d, which only it writes:

    value_after(epoch, number) = (epoch - 1) * (1 + L) + number + 1

The word only grows. To know that source s's rows for a tile are here, d waits for the value of the tile's
segment, or for nothing if s has none there. So a source may skip segments without rows, or signal them too.

Launches are numbered by epochs 1, 2, 3, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mori_megamoe.problem import Problem
from mori_megamoe.routing import Pair, Pairs

Counts = Sequence[Sequence[int]]  # [ranks][segments]: rows that each rank sends

PAIR_NUMBER = 0  # of a pair's segment in the order of sending


class Tile(NamedTuple):
    """M rows of one expert."""

    expert: int  # global id
    row: int  # first row of its outputs and of its rows' origins
    input_row: int  # first row of its inputs
    number: int  # of the segment that it needs, in the order of sending


@dataclass(frozen=True)
class Section:
    """Rows of one expert, of one kind."""

    number: int
    expert: int  # within the rank
    row: int
    input_row: int
    rows: int  # without padding
    source_rows: tuple[int, ...]  # by source: where its rows begin, from `row`

    def base(self, source: int) -> int:
        """The row at which this source's rows begin."""
        return self.row + self.source_rows[source]


@dataclass(frozen=True)
class Destination:
    """What one rank receives in a launch."""

    rank: int
    block_m: int
    pair: Pair | None
    sections: tuple[Section, ...]  # in the order of rows
    num_rows: int  # with padding
    tiles: tuple[Tile, ...]  # in the order of rows

    def sections_of(self, number: int) -> list[Section]:
        """The sections of a segment: for a pair a's, which holds the inputs, and b's."""
        return [s for s in self.sections if s.number == number]

    def landing_row(self, source: int, number: int) -> int:
        """Where this source's rows of a segment begin. Only of segments that the plan has."""
        return self.sections_of(number)[0].base(source)


def segment_id(problem: Problem, rank: int, number: int) -> int:
    """The segment that is `number` in the order of sending to `rank`."""
    if number == PAIR_NUMBER:
        return problem.num_experts + rank
    return rank * problem.experts_per_rank + number - 1


def destination(counts: Counts, problem: Problem, rank: int, block_m: int, pair: Pair | None) -> Destination:
    """The plan of one rank. The same on whatever rank it is made."""
    sections: list[Section] = []
    pair_row, end = 0, 0
    for expert in range(problem.experts_per_rank):
        numbers = [PAIR_NUMBER] if pair is not None and expert in pair else []
        for number in [*numbers, 1 + expert]:
            rows = [row[segment_id(problem, rank, number)] for row in counts]
            input_row = end
            if number == PAIR_NUMBER and pair is not None:
                pair_row = end if expert == pair.a else pair_row
                input_row = pair_row
            before = tuple(itertools.accumulate(rows[:-1], initial=0))
            sections.append(Section(number, expert, end, input_row, sum(rows), before))
            end += padded(sum(rows), block_m)
    first = rank * problem.experts_per_rank
    tiles = tuple(
        Tile(first + s.expert, s.row + at, s.input_row + at, s.number)
        for s in sections
        for at in range(0, s.rows, block_m)
    )
    return Destination(rank, block_m, pair, tuple(sections), end, tiles)


def destinations(
    counts: Counts, problem: Problem, blocks_m: Sequence[int], pairs: Pairs
) -> list[Destination]:
    """Of all ranks. blocks_m: each rank's own, it follows from its number of tokens."""
    ranks = range(problem.num_ranks)
    return [destination(counts, problem, d, blocks_m[d], pairs[d]) for d in ranks]


def padded(rows: int, block_m: int) -> int:
    """Rounded up to whole tiles."""
    return -(-rows // block_m) * block_m


def slab_starts(counts: Sequence[int], problem: Problem, me: int) -> dict[tuple[int, int], int]:
    """Where a sender that packs its rows puts each (rank, number): rank after rank, in the order of sending.
    Its own rows are not packed.

    counts  # [segments]: rows that this rank sends
    """
    starts, at = {}, 0
    for rank in range(problem.num_ranks):
        for number in range(problem.sends_per_rank):
            if rank != me:
                starts[rank, number] = at
                at += counts[segment_id(problem, rank, number)]
    return starts


# ---- signals ----


def value_after(problem: Problem, epoch: int, number: int) -> int:
    """The word of a source once its segment `number`, and all before it, have come."""
    return (epoch - 1) * problem.sends_per_rank + number + 1


def needed(counts: Counts, problem: Problem, epoch: int, rank: int, number: int) -> list[int]:
    """By source: the value at which its rows of a segment are here at `rank`; 0 where it has none."""
    segment = segment_id(problem, rank, number)
    value = value_after(problem, epoch, number)
    return [value if row[segment] else 0 for row in counts]


# ---- epochs ----


def parity(epoch: int) -> int:
    return epoch & 1
