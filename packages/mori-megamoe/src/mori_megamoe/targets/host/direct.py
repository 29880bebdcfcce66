"""The baseline of Stage1: every row stored straight to where it lands, then every tile."""

from __future__ import annotations

from mori_megamoe.launch import Launch
from mori_megamoe.plan import PAIR_NUMBER, segment_id
from mori_megamoe.stage1 import Stage1


class DirectStores(Stage1):
    """Rank after rank, beginning with the next one, so that not all write to the same; one signal for all."""

    name = "direct"

    def move_rows(self, launch: Launch) -> None:
        num_ranks = self.runner.problem.num_ranks
        for step in range(1, num_ranks + 1):
            rank = (launch.rank + step) % num_ranks
            for number in range(self.runner.problem.sends_per_rank):
                self._store(launch, rank, number)
            self.runner.signal_arrived(launch, rank, self.runner.problem.experts_per_rank)

    def _store(self, launch: Launch, rank: int, number: int) -> None:
        """My rows of one segment, with scales and headers."""
        mine = launch.routes.rows_of(segment_id(self.runner.problem, rank, number))
        token = launch.routes.token[mine]
        if not len(token):
            return
        assert launch.x_q is not None, "this stage does not quantise, so prepare has"
        assert launch.x_scales is not None
        self.runner.wait_ready(launch, rank)
        at = launch.plans[rank].landing_row(launch.rank, number)
        there = slice(at, at + len(token))
        self.runner.rows(rank)[there] = launch.x_q[token]
        self.runner.row_scales(rank)[there] = launch.x_scales[token]
        self.runner.write_headers(launch, rank, number)

    def gemm1(self, launch: Launch) -> None:
        for number in range(PAIR_NUMBER, self.runner.problem.sends_per_rank):
            self.runner.wait_arrived(launch, number)
        for tile in launch.plan.tiles:
            self.runner.gemm1_tile(launch, tile)
