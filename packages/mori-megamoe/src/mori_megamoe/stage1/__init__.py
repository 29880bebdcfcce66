"""Stage1: from every rank's tokens to the rows that GEMM2 reads; and how to put another one in its place.

A launch of the layer goes through four phases, on every rank:

    launch = runner.prepare(call, quantize=not stage.quantizes)   counts exchanged, plans made
    stage.run(launch)                                             rows moved, GEMM1 + SwiGLU + requantise
    runner.stage2(launch)                                         GEMM2, weighted rows to their tokens' ranks
    runner.combine(launch)                                        summed

A Stage1 is an object with `run`, and the two phases that it consists of, so that they can be timed alone:

    move_rows(launch)   send this rank's rows, whatever that takes (pack, put, store), and signal
    gemm1(launch)       every tile of my plan, as its rows come
    run(launch)         both. Here one after the other; a stage that overlaps them has its own

    previous = moe.replace_stage1(stage)     # collective; opens it on all ranks. `previous` stays open
    moe.replace_stage1(previous)             # and back

What it finds after `prepare`. launch is a mori_megamoe.launch.Launch, runner a mori_megamoe.targets.Runner.

    launch.routes           my rows, segment after segment: token, slot, slot_b of each; counts, starts
    launch.x_q, .x_scales   my tokens quantised, uint8 [n, D] and [n, D / 32]. None if the stage `quantizes`:
                            then mx.quantize_input of launch.call.x [n, D] bf16. (Where the caller brought
                            quantised rows, call.x is None and these are there all the same.)
    launch.plans[d]         where rows land at rank d: landing_row(source, number), sections_of(number)
    launch.plan             this rank's: tiles, in the order of rows
    launch.scratch          a dict for the stage's own use
    launch.span(name, lane) around what a picture of the launch should show
    runner.wait_ready(launch, d)
                            before anything is written at rank d: until then d may read what lies there
    runner.rows(d)          uint8 [capacity, D] at rank d; runner.row_scales(d): [capacity, D / 32] row-major
    runner.at(name, d, row=, row_bytes=)
                            the address of such a row, for copy queues; name: "rows", "row_scales"
    plan.slab_starts(...)   where a sender that packs puts its segments. A slab is the stage's own window

What it must leave behind.

    hidden                  runner.hidden uint8 [capacity, I], and runner.hidden_scales uint8 in the form
                            mx.ActivationScales, of every tile of launch.plan; of padding rows anything.
                            runner.gemm1_tile does both for one tile
    headers                 origin and weight of every row that it sent, at the row's rank, for both experts
                            of a pair, before the segment is signalled: runner.write_headers(launch, d,
                            number)
    signals                 at each rank d, itself included, for every segment that it has rows in
    queues                  idle: all that `run` has sent has been read from where it lay

Signals. Source s owns one word at rank d, runner.arrived_at(d) as s sees it, runner.arrived_from(s) as d
does. It only grows: to plan.value_after(problem, epoch, number) once s's rows, scales and headers of segment
`number`, and of all before it in the order of sending, are at d. A store (runner.signal_arrived) sets it, or
a copy queue, with "set", behind its copies. Segments without rows may be left out. A tile waits with
runner.wait_arrived(launch, tile.number), for those sources only that have rows in its segment; plan.needed
says which and for what value. All waits end at the communicator's deadline, with names.

Numbers do not depend on any of this. Rows inside a segment are in the order of (token, slot), so even
`hidden` is the same from stage to stage, byte for byte, apart from padding rows.

On another target, launch and runner are its own, with tables on the device under the same names: the layer
only hands them on, and a stage belongs to one target (runner.comm.backend says which).

A stage that raises in a launch leaves the layer unusable, for its rows may be on their way. What cannot be
done is refused in `open`. If that raises on some rank, all are told why, and the stage is closed on all of
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mori_megamoe.launch import Launch
    from mori_megamoe.targets import Runner


class Stage1(ABC):
    """One way of moving rows and starting on them, for one layer."""

    name: str = ""  # equal on all ranks
    quantizes: bool = False  # whether it quantises rows itself, so that prepare need not

    def open(self, runner: Runner) -> None:
        """Collective: take hold of the layer's buffers, make windows of its own. Refuses what it cannot
        do; what can be seen without other ranks, before it meets them."""
        self.runner = runner

    @abstractmethod
    def move_rows(self, launch: Launch) -> None:
        """Send this rank's rows with their headers, and signal."""

    @abstractmethod
    def gemm1(self, launch: Launch) -> None:
        """Every tile of this rank's plan, once its rows are here."""

    def run(self, launch: Launch) -> None:
        """Both phases."""
        with launch.span("move rows", "stage1"):
            self.move_rows(launch)
        with launch.span("gemm1", "stage1"):
            self.gemm1(launch)

    def put_in(self) -> None:  # noqa: B027 - most have nothing to do
        """This is the layer's stage from the next call on. Local; it is open on all ranks."""

    def close(self) -> None:  # noqa: B027 - most have nothing of their own
        """Give back what `open` made, also where that has failed half-way. Local; twice is fine."""
