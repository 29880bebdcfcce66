"""Stage1: from every rank's tokens to the rows that GEMM2 reads; and how to put another one in its place.

A launch of the layer goes through four phases, on every rank:

    launch = runner.prepare(call, quantize=not stage.quantizes)   counts exchanged, plans made, landing rows free
    stage.run(launch)                                             rows moved, GEMM1 + SwiGLU + requantise
    runner.stage2(launch)                                         GEMM2, weighted rows back to their tokens' ranks
    runner.combine(launch)                                        summed

A Stage1 is an object with `run`, and the two phases that it consists of, so that they can be timed alone:

    move_rows(launch)   send this rank's rows, whatever that takes (pack, put, store), and signal
    gemm1(launch)       every tile of my plan, as its rows come
    run(launch)         both. Here one after the other; a stage that overlaps them has its own

    previous = moe.replace_stage1(stage)     # collective; opens it on all ranks. `previous` stays open
    moe.replace_stage1(previous)             # and back

What it finds after `prepare` (launch: mori_megamoe.launch; runner: mori_megamoe.targets.Runner)
    launch.routes         my rows, segment after segment: token, slot, slot_b of each; counts, starts
    launch.x_q, x_scales  my tokens quantised, [n, D] and [n, D / 32] uint8; None if `quantizes`: then it takes
                          launch.call.x [n, D] bf16 and mx.quantize_input (a caller's forward_prequant brings x_q)
    launch.plans[d]       where rows land at rank d: landing_row(source, number), sections_of(number), tiles
    launch.plan           the plan of this rank
    runner.rows(d)        [capacity, D] uint8 at rank d, and row_scales(d) [capacity, D / 32], row-major: load/store
    runner.at(name, d, row=..., row_bytes=...)   the same as an address for copy queues
    runner.wait_ready(launch, d)   before anything is written at rank d: until then d may still read what lies there
    plan.slab_starts      where a sender that packs puts its segments; a slab is the stage's own window, made in `open`

What it must leave behind
    runner.hidden         [capacity, I] uint8 codes, and hidden_scales [capacity * padded columns] uint8 in the form
                          mx.ActivationScales, of every tile of launch.plan. Padding rows: anything
    headers               origin and weight of every row it sent, at the row's destination and for both experts of
                          a pair, before the segment's signal: runner.write_headers(launch, d, number)
    signals               for each rank d, itself included, its word at d stands at value_after(epoch, last number)
                          or is never waited for again: see below
    queues                idle: what `run` has sent has been read from where it lay

Signals. For rank d, source s owns one word, runner.arrived_at(d), which only grows. It sets it to
plan.value_after(problem, epoch, number) once its rows, scales and headers of segment `number`, and of all before
it in the order of sending, are at d: by runner.signal_arrived, or by a copy queue behind the copies. Segments
without rows may be left out. A tile of segment `number` waits with runner.wait_arrived(launch, number), for those
sources only that have rows in it. All waits end after the communicator's deadline, with a name.

Numbers do not depend on any of this. Rows inside a segment are in the order of (token, slot), so even `hidden` is the
same byte for byte from stage to stage, apart from padding rows.

A launch in which a stage raises leaves the layer unusable (its rows may be on their way); refuse what cannot be done
in `open`, on every rank.
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
        """Collective: take hold of the layer's buffers, make windows of its own. Refuses what it cannot do."""
        self.runner = runner

    @abstractmethod
    def move_rows(self, launch: Launch) -> None:
        """Send this rank's rows with their headers, and signal."""

    @abstractmethod
    def gemm1(self, launch: Launch) -> None:
        """Every tile of this rank's plan, once its rows are here."""

    def run(self, launch: Launch) -> None:
        """Both phases."""
        self.move_rows(launch)
        self.gemm1(launch)

    def close(self) -> None:  # noqa: B027 - most have nothing of their own
        """Give back what `open` made. Local; twice is fine."""
