"""What one rank sends in a launch, in the order of sending. Pure.

Segment after segment (the pair's, then expert 0, 1, ... of every rank), and within each, rank after rank,
beginning with the next one, so that not all ranks send to the same; a rank's own rows are the last. Segments
without rows are not there: nobody waits for them.
"""

from __future__ import annotations

from typing import NamedTuple

from mori_megamoe.launch import Launch
from mori_megamoe.plan import segment_id, slab_starts
from mori_megamoe.problem import Problem


class Send(NamedTuple):
    """The rows of one segment on their way to one rank."""

    rank: int
    number: int  # of the segment, in the order of sending
    begin: int  # in launch.routes
    rows: int
    landing_row: int  # at the rank
    slab_row: int | None  # here, in between; None: own rows go straight to where they land

    @property
    def routes(self) -> slice:
        return slice(self.begin, self.begin + self.rows)


def sends_of(launch: Launch, problem: Problem) -> list[Send]:
    """All of them."""
    routes, me = launch.routes, launch.rank
    slab = slab_starts(routes.counts, problem, me)
    sends = []
    for number in range(problem.sends_per_rank):
        for step in range(1, problem.num_ranks + 1):
            rank = (me + step) % problem.num_ranks
            segment = segment_id(problem, rank, number)
            rows = routes.counts[segment]
            if rows:
                at = launch.plans[rank].landing_row(me, number)
                sends.append(Send(rank, number, routes.starts[segment], rows, at, slab.get((rank, number))))
    return sends
