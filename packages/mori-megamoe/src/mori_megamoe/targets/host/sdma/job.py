"""One launch on one rank: what its workgroups do, role by role. The protocol: stage.py."""

from __future__ import annotations

import time
from dataclasses import replace

import mori_shmem
import torch
from mori_shmem import PutProgram

from mori_megamoe import mx
from mori_megamoe.launch import Launch
from mori_megamoe.plan import Tile, needed, value_after
from mori_megamoe.stage1.options import Options
from mori_megamoe.stage1.sends import Send, sends_of
from mori_megamoe.targets import Runner
from mori_megamoe.targets.host.sdma import packing
from mori_megamoe.targets.host.sdma.crew import Board
from mori_megamoe.targets.host.sdma.slab import Slab
from mori_megamoe.targets.host.sdma.waits import Word, check_alive, late, limit_s, slept, wait_word

_FIRST_SLICE_S, _LONGEST_SLICE_S = 0.001, 0.016


class Job:
    """Made anew in each launch. `shuffled` is the stage's: a scale form for each tile of inputs."""

    def __init__(
        self, launch: Launch, runner: Runner, slab: Slab, options: Options, shuffled: torch.Tensor
    ) -> None:
        self.launch, self.runner, self.slab, self.options = launch, runner, slab, options
        self.comm: mori_shmem.Communicator = runner.comm
        self.me, self.problem = launch.rank, runner.problem
        self.sends = sends_of(launch, runner.problem)
        self.tiles = launch.plan.tiles
        self.shuffles = options.shuffles(launch.call.num_tokens)
        self.shuffled = shuffled
        self.input_tiles = list({tile.input_row: tile for tile in self.tiles}.values())
        self.ready: list[Tile] = []  # in the order in which they were published
        self.board = Board(
            timeout_s=self.comm.timeout_s,
            doing=f"rank {self.me} of {self.comm.world_size}, Stage1 of launch {launch.epoch}",
        )

    def workgroup(self, number: int) -> None:
        """All that this workgroup does in a fused launch: its role, then work items."""
        role = self.options.roles[number]
        if role == "put":
            self.put()
        elif role == "pack":
            self.pack_some(f"workgroup {number}")
        self.multiply(number)

    def multiply(self, number: int) -> None:
        """The same without what sends."""
        role = self.options.roles[number]
        if role == "shuffle" and self.shuffles:
            self.shuffle()
        elif role == "schedule":
            self.schedule()
        self.work(number)

    # ---- sending ----

    def pack(self) -> None:
        """Everything, before it is put."""
        if self.options.fuse_quant:
            with self.launch.span("route", "stage1"):
                to = packing.route(self.launch, self.runner, self.slab, self.sends, self.wait_ready)
            with self.launch.span("qpack", "stage1"):
                packing.qpack(self.launch, self.slab, self.sends, to)
        else:
            with self.launch.span("pack", "stage1"):
                for send in self.sends:
                    packing.pack(self.launch, self.runner, self.slab, send, self.wait_ready)
        for number in range(len(self.sends)):
            self.board.set(("packed", number))

    def pack_some(self, lane: str) -> None:
        """Segment after segment in the order of sending, as other workgroups do too."""
        while (number := self.board.draw("pack")) < len(self.sends):
            send = self.sends[number]
            with self.launch.span(f"pack segment {send.number} for rank {send.rank}", lane):
                packing.pack(self.launch, self.runner, self.slab, send, self.wait_ready)
            self.board.set(("packed", number))

    def wait_ready(self, rank: int) -> None:
        """Until the rank's landing rows and headers may be written."""
        if rank != self.me:
            epoch = self.launch.epoch
            where = self.runner.window.at(self.runner.layout.flag("ready", rank))
            wait_word(
                self.comm, self.board, Word(where, epoch, rank, f"`ready` of rank {rank}, launch {epoch}")
            )

    def put(self) -> None:
        """Every segment, once it is packed, in the order of sending; small ones of a rank together."""
        last = {send.rank: number for number, send in enumerate(self.sends)}
        batches: dict[int, list[Send]] = {}
        for number, send in enumerate(self.sends):
            self.board.wait(("packed", number))
            if send.rank == self.me:
                self.runner.signal_arrived(self.launch, self.me, send.number)
                continue
            batch = batches.setdefault(send.rank, [])
            batch.append(send)
            if number == last[send.rank] or sum(s.rows for s in batch) >= self.options.merge_rows:
                self.comm.queue(send.rank).submit(self._program(batches.pop(send.rank)))

    def _program(self, batch: list[Send]) -> PutProgram:
        """The copies of some segments to one rank, and behind them the signal of the last."""
        program = PutProgram()
        for send in batch:
            if self.launch.trace is not None:
                program.timestamp(self.slab.stamp(send, end=False))
            for copy in self.slab.copies(send):
                program.put(copy.to, copy.source, copy.nbytes)
            if self.launch.trace is not None:
                program.timestamp(self.slab.stamp(send, end=True))
        value = value_after(self.problem, self.launch.epoch, batch[-1].number)
        program.signal(self.runner.arrived_at(batch[-1].rank), value)
        return program

    def quiet(self) -> None:
        """Until the queues have read all that was sent."""
        for rank in sorted({send.rank for send in self.sends} - {self.me}):
            self.comm.queue(rank).quiet()

    def add_landings(self) -> None:
        """The puts of this launch into the trace, where they landed. After `quiet`."""
        for send in self.sends:
            if self.launch.trace is not None and send.rank != self.me:
                name = f"segment {send.number}, {send.rows} rows"
                lane = f"landing from rank {self.me}"
                self.launch.trace.add(name, lane, *self.slab.times_ns(send), rank=send.rank)

    # ---- receiving ----

    def words(self, number: int) -> list[Word]:
        """Those that say that a segment is here, of the ranks that have rows in it."""
        values = needed(self.launch.counts, self.problem, self.launch.epoch, self.me, number)
        what = f"segment {number} of launch {self.launch.epoch}"
        return [
            Word(self.runner.arrived_from(rank), value, rank, f"`arrived` of rank {rank}, {what}")
            for rank, value in enumerate(values)
            if value
        ]

    def short(self, words: list[Word]) -> list[Word]:
        """Those that have not come to their value yet; all are looked at in one round."""
        return [word for word in words if self.comm.read(word.where) < word.value]

    def wait_arrived(self, number: int) -> None:
        for word in self.short(self.words(number)):
            wait_word(self.comm, self.board, word)

    def shuffle(self) -> None:
        """Landed scales of each tile of inputs, once its rows are here, into the form that work items
        read."""
        while (number := self.board.draw("shuffle")) < len(self.input_tiles):
            tile = self.input_tiles[number]
            self.wait_arrived(tile.number)
            self._shuffle_tile(tile)

    def _shuffle_tile(self, tile: Tile) -> None:
        form, stored = self._shuffled(tile)
        with self.launch.span(f"scales of expert {tile.expert}", "shuffler"):
            stored.copy_(form.shuffle(self.slab.landed.scales[self._inputs(tile)]))
        self.board.set(("scales", tile.input_row))

    def _shuffled(self, tile: Tile) -> tuple[mx.ActivationScales, torch.Tensor]:
        form = mx.ActivationScales(self.launch.plan.block_m, self.problem.model_scales)
        begin = tile.input_row * form.stored_columns
        return form, self.shuffled[begin : begin + form.nbytes]

    def _inputs(self, tile: Tile) -> slice:
        return slice(tile.input_row, tile.input_row + self.launch.plan.block_m)

    def schedule(self) -> None:
        """Publish tiles as they become ready. Every round reads every rank's word once. Where scales are
        shuffled, they are before their tile is published."""
        waiting = {number: self.words(number) for number in sorted({tile.number for tile in self.tiles})}
        shuffled: set[int] = set()
        while waiting:
            short = {number: self.short(words) for number, words in waiting.items()}
            come = [number for number, words in short.items() if not words]
            for tile in self.tiles:
                if tile.number in come:
                    if self.shuffles and tile.input_row not in shuffled:
                        self._shuffle_tile(tile)
                        shuffled.add(tile.input_row)
                    self.ready.append(tile)
                    self.board.set(("ready", len(self.ready) - 1))
            for number in come:
                del waiting[number]
            if waiting and not come:
                self._wait_any({word for words in short.values() for word in words})

    def _wait_any(self, short: set[Word]) -> None:
        """Until one of them is there, whichever it is: a slice of sleep for the lowest word of each rank in
        turn."""
        lowest = {word.peer: word for word in sorted(short, key=lambda w: -w.value)}
        oldest = min(lowest.values(), key=lambda w: (w.peer == self.me, w.value, w.peer))
        slice_s, end_s = _FIRST_SLICE_S, time.monotonic() + limit_s(self.comm, oldest)
        while time.monotonic() < end_s:
            for word in lowest.values():
                self.board.check()
                if slept(self.comm, word, slice_s) or len(self.short([*lowest.values()])) < len(lowest):
                    return
            slice_s = min(2 * slice_s, _LONGEST_SLICE_S)
        check_alive(self.comm, oldest.what)
        raise late(self.comm, oldest)

    # ---- work items ----

    def work(self, number: int) -> None:
        """Tiles, one after the other, until none is left. Each workgroup keeps the expert that it has
        decoded."""
        mine = replace(self.launch, scratch={}, trace=None)
        take = self._next_ready if self.options.ready_first else self._next_in_order
        while (tile := take()) is not None:
            with self.launch.span(f"expert {tile.expert}", f"workgroup {number}"):
                self.runner.gemm1_tile(
                    mine,
                    tile,
                    rows=self.slab.landed.codes[self._inputs(tile)],
                    scales=self._scales(tile),
                )

    def _next_in_order(self) -> Tile | None:
        number = self.board.draw("tile")
        if number >= len(self.tiles):
            return None
        tile = self.tiles[number]
        if self.shuffles:
            self.board.wait(("scales", tile.input_row))
        else:
            self.wait_arrived(tile.number)
        return tile

    def _next_ready(self) -> Tile | None:
        number = self.board.draw("tile")
        if number >= len(self.tiles):
            return None
        self.board.wait(("ready", number))
        return self.ready[number]

    def _scales(self, tile: Tile) -> torch.Tensor:
        """[M, D / 32] of a tile's inputs: as the shuffler left them, or staged from where they landed."""
        if self.shuffles:
            form, stored = self._shuffled(tile)
            return form.unshuffle(stored)
        return self.slab.landed.scales[self._inputs(tile)].clone()
