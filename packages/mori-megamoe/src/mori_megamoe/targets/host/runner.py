"""The layer between processes that share memory: flags, buffers, epochs. Flags and regions: layout.py.

Launch e on rank r
  prepare   1. rows for each segment counted; the counts, and the size of r's tiles, to every rank's
               counts[e & 1][r]; counted[r] = e there
            2. x quantised, unless Stage1 does it
            3. wait for counted >= e of every rank; everybody's plan from everybody's counts
            4. r's origins say "padding"; ready[r] = e at every rank
  Stage1    5. for each rank d: wait for ready[d] >= e; rows, scales, headers to d; arrived[r] at d
            6. for each tile: wait for arrived of the sources that have rows in it; GEMM1 to `hidden`
  stage2    7. for each tile GEMM2; weighted rows to partials of their tokens' ranks
            8. returned[r] = e at every rank
  combine   9. wait for returned >= e of every rank; sum

Who may overwrite what
  counts     parity e & 1, written by s in launch e. s has seen everybody's counted = e - 1, and a rank sets
             that after it has read what came with e - 2.
  rows, row_scales, sources, row_weights of r
             written by s in launch e after ready[r] = e, which r sets when it is done with launch e - 1. This
             also holds where launches end after Stage1 and nobody waits in combine.
  hidden     r alone.
  partials   written by s in launch e, after it has seen counted[r] = e: r has summed up e - 1.
Nothing is reset. Every rank makes every launch, also without tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mori_shmem
import torch
from mori_shmem.settings import Snapshot

from mori_megamoe import arithmetic, mx, plan, routing, weights
from mori_megamoe.config import bucket_for
from mori_megamoe.launch import Call, Launch
from mori_megamoe.layout import Layout, layout_for
from mori_megamoe.problem import Problem
from mori_megamoe.reference import valid_slots
from mori_megamoe.routing import Pair
from mori_megamoe.settings import PAIRS, POISON
from mori_megamoe.weights import StoredWeights

_POISON = 0xFF  # a NaN as e4m3 and as e8m0


class Runner:
    """One layer's memory and flags on this rank; see mori_megamoe.targets.Runner."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        values: Snapshot,
        pairs: Sequence[Pair | None],
    ) -> None:
        self.comm, self.window, self.layout, self.values = comm, window, layout, values
        self.problem = problem = layout.problem
        self.epoch = 0
        self._pairs = list(pairs)  # of the next launch
        self._me = comm.rank
        self._peers = [p for p in range(comm.world_size) if p != comm.rank]
        self._set = {
            name: comm.words([window.at(layout.flag(name, comm.rank), p) for p in self._peers], self._peers)
            for name in ("counted", "ready", "returned")
        }
        self._came = {
            name: comm.words([window.at(layout.flag(name, p)) for p in self._peers], self._peers)
            for name in ("counted", "returned")
        }
        capacity = problem.capacity_rows
        self.hidden = torch.zeros(capacity, problem.inter_dim, dtype=torch.uint8)
        self.hidden_scales = torch.zeros(
            capacity * mx.padded_columns(problem.inter_scales), dtype=torch.uint8
        )
        ranks = range(comm.world_size)
        self._rows = [self._view("rows", p, (capacity, problem.model_dim), torch.uint8) for p in ranks]
        scales = (capacity, problem.model_scales)
        self._row_scales = [self._view("row_scales", p, scales, torch.uint8) for p in ranks]
        self._sources = [self._view("sources", p, (capacity,), torch.int32) for p in ranks]
        self._row_weights = [self._view("row_weights", p, (capacity,), torch.float32) for p in ranks]
        partials = (problem.max_tokens * problem.topk, problem.partial_bytes)
        self._partials = [self._view("partials", p, partials, torch.uint8) for p in ranks]
        output = (problem.max_tokens, problem.model_dim)
        self._output = self._view("output", comm.rank, output, torch.bfloat16)

    @staticmethod
    def layout_for(problem: Problem, values: Snapshot) -> Layout:
        return layout_for(problem)

    def _view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.window.peer(rank).tensor(shape, dtype, self.layout[name].offset_bytes)

    def take_weights(self, experts: StoredWeights) -> None:
        """All can be used, as they are."""

    # ---- prepare ----

    def prepare(self, call: Call, *, quantize: bool) -> Launch:
        self.epoch += 1
        if self.values[POISON]:
            self._partials[self._me].fill_(_POISON)  # peers write them once they have seen `counted`
        routes = routing.routes_of(call.ids, self.problem, self._pairs)
        self._tell_counts([*routes.counts, bucket_for(call.num_tokens).sort_block_m])
        x_q, x_scales = call.x_q, call.x_scales
        if call.x is not None and quantize:
            x_q, x_scales = mx.quantize_input(call.x)
        gathered = self._gather_counts()
        counts, blocks_m = [row[:-1] for row in gathered], [row[-1] for row in gathered]
        pairs = list(self._pairs)
        plans = plan.destinations(counts, self.problem, blocks_m, pairs)
        if self.values[PAIRS]:
            self._pairs = routing.next_pairs(counts, self.problem, pairs)
        launch = Launch(call, self.epoch, self._me, counts, pairs, routes, plans, x_q, x_scales)
        self._sources[self._me][: launch.plan.num_rows] = self.problem.padding_source
        if self.values[POISON]:
            self._poison()
        self._set["ready"].signal(self.epoch)
        return launch

    def _tell_counts(self, row: list[int]) -> None:
        offset = self.layout.count_row(plan.parity(self.epoch), self._me)
        counts = torch.tensor(row, dtype=torch.int32)
        for rank in range(self.problem.num_ranks):
            self.window.peer(rank).tensor(len(row), torch.int32, offset).copy_(counts)
        self._set["counted"].signal(self.epoch)

    def _gather_counts(self) -> list[list[int]]:
        self._came["counted"].wait(self.epoch, what=f"`counted` of launch {self.epoch}")
        shape = (self.problem.num_ranks, self.problem.num_segments + 1)
        offset = self.layout.count_row(plan.parity(self.epoch), 0)
        rows: list[list[int]] = self.window.tensor(shape, torch.int32, offset).tolist()
        return rows

    def _poison(self) -> None:
        """What others will write once they have seen `ready`, and what this rank will: NaN."""
        for part in (self._rows, self._row_scales):
            part[self._me].fill_(_POISON)
        self._row_weights[self._me].fill_(torch.nan)
        self.hidden.fill_(_POISON)
        self.hidden_scales.fill_(_POISON)

    # ---- for a Stage1 ----

    def rows(self, rank: int) -> torch.Tensor:
        return self._rows[rank]

    def row_scales(self, rank: int) -> torch.Tensor:
        return self._row_scales[rank]

    def at(self, name: str, rank: int, *, row: int, row_bytes: int) -> mori_shmem.Ref:
        return self.window.at(self.layout[name].offset_bytes + row * row_bytes, rank)

    def arrived_at(self, rank: int) -> mori_shmem.Ref:
        return self.window.at(self.layout.flag("arrived", self._me), rank)

    def arrived_from(self, source: int) -> mori_shmem.Ref:
        return self.window.at(self.layout.flag("arrived", source))

    def wait_ready(self, launch: Launch, rank: int) -> None:
        if rank != self._me:
            where = self.window.at(self.layout.flag("ready", rank))
            self.comm.wait(
                where, launch.epoch, peer=rank, what=f"`ready` of rank {rank}, launch {launch.epoch}"
            )

    def write_headers(self, launch: Launch, rank: int, number: int) -> None:
        mine = launch.routes.rows_of(plan.segment_id(self.problem, rank, number))
        token = launch.routes.token[mine]
        if not len(token):
            return
        slots = (launch.routes.slot[mine], launch.routes.slot_b[mine])
        for section, slot in zip(launch.plans[rank].sections_of(number), slots, strict=False):
            at = section.base(self._me)
            there = slice(at, at + len(token))
            source = self._me * self.problem.max_tokens + token
            self._sources[rank][there] = routing.encode_source(source, slot).to(torch.int32)
            self._row_weights[rank][there] = launch.call.weights[token, slot]

    def signal_arrived(self, launch: Launch, rank: int, number: int) -> None:
        self.comm.signal(self.arrived_at(rank), plan.value_after(self.problem, launch.epoch, number))

    def wait_arrived(self, launch: Launch, number: int) -> None:
        values = plan.needed(launch.counts, self.problem, launch.epoch, self._me, number)
        for source, value in enumerate(values):
            if value:
                what = f"`arrived` of rank {source}, segment {number} of launch {launch.epoch}"
                self.comm.wait(self.arrived_from(source), value, peer=source, what=what)

    def gemm1_tile(
        self,
        launch: Launch,
        tile: plan.Tile,
        *,
        rows: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        with launch.span(f"expert {tile.expert}", "tiles"):
            here = slice(tile.input_row, tile.input_row + launch.plan.block_m)
            rows = self._rows[self._me][here] if rows is None else rows
            scales = self._row_scales[self._me][here] if scales is None else scales
            w1, limit = self._matrix(launch, "w1", tile), self.problem.swiglu_limit
            hidden = arithmetic.hidden_rows(rows, scales, w1, limit)
            self.hidden[tile.row : tile.row + launch.plan.block_m] = hidden[0]
            form, stored = self._tile_scales(launch, tile)
            stored.copy_(form.shuffle(hidden[1]))

    def _tile_scales(self, launch: Launch, tile: plan.Tile) -> tuple[mx.Layout, torch.Tensor]:
        """Where the scales of a tile's hidden rows are: tiles are whole pieces of 32 rows."""
        form = mx.ActivationScales(launch.plan.block_m, self.problem.inter_scales)
        begin = tile.row * form.stored_columns
        return form, self.hidden_scales[begin : begin + form.nbytes]

    def _matrix(self, launch: Launch, which: str, tile: plan.Tile) -> arithmetic.Matrix:
        """Decoded weights of a tile's expert; the last ones are kept, since its tiles follow one another."""
        kept = launch.scratch.get("matrix")
        if kept is None or kept[0] != (which, tile.expert):
            decode = weights.w1_of if which == "w1" else weights.w2_of
            decoded = decode(launch.call.experts, self.problem, tile.expert % self.problem.experts_per_rank)
            kept = launch.scratch["matrix"] = ((which, tile.expert), decoded)
        matrix: arithmetic.Matrix = kept[1]
        return matrix

    # ---- stage2, combine ----

    def stage2(self, launch: Launch) -> None:
        for tile in launch.plan.tiles:
            here = slice(tile.row, tile.row + launch.plan.block_m)
            source, slot = routing.decode_source(self._sources[self._me][here].to(torch.int64))
            real = source < self.problem.padding_source
            form, stored = self._tile_scales(launch, tile)
            codes, scales = self.hidden[here][real], form.unshuffle(stored)[real]
            y = arithmetic.matmul(codes, scales, self._matrix(launch, "w2", tile))
            route = self._row_weights[self._me][here][real]
            back = arithmetic.partial_rows(y, route, self.problem.partial_format)
            self._bring_back(back, source[real], slot[real])
        self._set["returned"].signal(launch.epoch)

    def _bring_back(self, back: torch.Tensor, source: torch.Tensor, slot: torch.Tensor) -> None:
        """Each row to its token's rank: partials[token * topk + slot]."""
        rank, token = source // self.problem.max_tokens, source % self.problem.max_tokens
        at = token * self.problem.topk + slot
        for r in sorted(set(rank.tolist())):
            mine = rank == r
            self._partials[r][at[mine]] = back[mine]

    def combine(self, launch: Launch) -> torch.Tensor:
        self._came["returned"].wait(launch.epoch, what=f"`returned` of launch {launch.epoch}")
        n, topk = launch.call.ids.shape
        stored = self._partials[self._me][: n * topk].view(n, topk, self.problem.partial_bytes)
        rows = arithmetic.read_partials(stored, self.problem.model_dim, self.problem.partial_format)
        self._output[:n] = arithmetic.combine(rows, valid_slots(launch.call.ids, self.problem))
        return self._output
