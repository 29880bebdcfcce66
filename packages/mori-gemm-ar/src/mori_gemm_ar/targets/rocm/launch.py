"""The fused GEMM + all-reduce on MI355X: which kernels a call launches, with which arguments, and why they
are right.

Call e on rank r, with S(o) the slice of owner o. All kernels go to one stream; nothing of them depends on e,
which they read from the window: a captured call is replayed as it is.

  start       epoch = e; called[r] = (e, M) at every peer; `arrived_due` and `finished_due` grow by what each
              peer will send; the counters' positions are noted
  gemm        fused-sdma: tiles into C, and chunk by chunk onto the queues (ToQueues); own slice last
              fused-lsa: tiles into the owners' landing[r] (ToPeers, both in wires.py)
              split: into C     gemm-only: into the output
  scatter     split-sdma: a put of each owner's rows of C to its landing[r], then 1 is added to its arrived[r]
  drain       lsa: arrived[r] = arrived_due at every peer. Then: called[p] says (e, M), arrived[p] >=
              arrived_due, for every p
  reduce      S(r) = the W partial sums in rank order, in fp32, rounded once -> output, or staging where it is
              pulled. split-lsa reads them in the peers' C; a small matrix is added up whole by every rank
              ("one stage")
  quantize    S(r) -> codes and row scales in staging (fp8; within reduce if fuse_quantize)
  gather      a put of S(r) to every peer, then 1 is added to its finished[r] (fuse_reduce_push: reduce has
              posted them). Then finished[p] >= finished_due for every p, and my own puts are complete
              (`quiet`)
  dequantize  everyone's slot of staging -> output
  pull        finished[r] = finished_due at every peer. Then finished[p] >= finished_due for every p, its
              staging -> output. One stage: this meeting alone

Flags have one writer and only grow; both ends add up what is due, call by call, so the sums agree as long as
all ranks call with the same M. That is what called[] is for: it is compared before any other wait.

What has to be in memory when somebody else reads it, and what puts it there:
  between kernels of a rank   the end of a kernel: what it stored is visible to later kernels, copy engines,
                              and peers that are told afterwards. But not what it stored into *peers'* memory,
                              on hardware whose kernels end with an agent-scope release: ToPeers therefore
                              stores past the caches
  within a kernel             ToQueues and reduce_push post while they run: wires.py and reduce.py say how
  bytes of a put              complete before the addition behind them on the same queue

Who may overwrite what, and why nobody reads it any more. "p is done with e": all kernels of its call e have
ended; its gather or pull saw finished[q] of e from every q.
  (1) r's drain of e+1 has ended  =>  every p is in call e+1 (called, arrived)  =>  every p is done with e
  (2) some p is done with e  =>  every q has reduced e  =>  every q had all that arrived in e
  landing[s] of r  Written by s in its gemm or scatter of e+1: s is done with e, so r has reduced e (2).
  C of r           Written by r's gemm of e+1. Puts out of it are complete: r is done with e, so every owner
                   had what arrived in e (2), and that was added behind the copy. Peers that read C in place
                   have reduced e (2).
  staging of r     Pulled: written in r's reduce or quantize of e+1, after its drain; all are done with e (1).
                   Pushed, slot s: written by s after it drained e+1; r is done with e (1), it has widened it.
                   Pushed, slot r: r's own puts out of it are complete when its gather ends (`quiet`).
  output of r      Written by pushes of s after it drained e+1, so r is in call e+1 (1): what the caller
                   queued behind call e has read it. Read by r's own puts, complete when its gather ends
                   (`quiet`).
  counters         Complete when the kernel that counts has ended; noted again by the next start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mori_shmem
from mori_shmem.device.queue_words import ticks

from mori_gemm_ar.options import Options
from mori_gemm_ar.plan import Phase, Plan, Wire
from mori_gemm_ar.problem import FP8_BYTES
from mori_gemm_ar.targets.rocm import limits
from mori_gemm_ar.targets.rocm.kernel import Kernel, filled
from mori_gemm_ar.targets.rocm.meet import FINISHED, PARTIALS, Meet, Start, meeter, starter
from mori_gemm_ar.targets.rocm.pull import Pull, puller
from mori_gemm_ar.targets.rocm.push import Gather, Scatter, gatherer, scatterer
from mori_gemm_ar.targets.rocm.quantize import Narrow, Widen, dequantizer, quantizer
from mori_gemm_ar.targets.rocm.reduce import THREADS, WAVES, Push, Sum, pusher, reducer
from mori_gemm_ar.targets.rocm.regions import Regions, control_of
from mori_gemm_ar.targets.rocm.tiles import Slices, TileShape
from mori_gemm_ar.targets.rocm.wires import WORDS


@dataclass(frozen=True)
class Launch:
    """One kernel of a call, with all its arguments."""

    phase: Phase
    kernel: Kernel
    args: Any
    blocks: int


@dataclass(frozen=True)
class Here:
    """What this rank's kernels are told of the window and the communicator."""

    base: int
    stride: int
    rank: int
    queues: int
    record: int
    timeout_ticks: int

    @property
    def mine(self) -> int:
        """Where this rank's part begins."""
        return self.base + self.rank * self.stride

    @property
    def place(self) -> tuple[int, int, int]:
        """What most kernels begin with."""
        return self.base, self.stride, self.rank

    @property
    def waiting(self) -> tuple[int, int]:
        """What those that wait end with."""
        return self.record, self.timeout_ticks


class Launches:
    """All of them for one op on one rank, but for the GEMM."""

    def __init__(self, here: Here, layout: Regions, options: Options) -> None:
        self._here, self._layout, self._options = here, layout, options
        self._num_ranks, self._n = layout.num_ranks, layout.n
        self._fp8 = options.gather_dtype == "fp8"

    def start(self, plan: Plan) -> Launch:
        """Comes first, and only where ranks meet."""
        args = filled(
            Start, *self._here.place, plan.problem.m, self._puts(plan), plan.options.gather_bands or 1
        )
        return Launch(Phase.GEMM, starter(self._num_ranks), args, 1)

    def after_gemm(self, plan: Plan) -> list[Launch]:
        """In order; kernels that would have nothing to do are left out."""
        makers = {
            Phase.SCATTER: self._scatter,
            Phase.DRAIN: self._drain,
            Phase.REDUCE: self._reduce,
            Phase.QUANTIZE: self._quantize,
            Phase.GATHER: self._gather,
            Phase.DEQUANTIZE: self._dequantize,
            Phase.PULL: self._pull,
        }
        return [launch for phase in plan.phases[1:] for launch in makers[phase](plan)]

    # ---- partial sums ----

    def _puts(self, plan: Plan) -> int:
        """How often each peer raises my `arrived` in such a call."""
        if plan.options.mode != "fused-sdma":
            return 1
        return plan.num_chunks if plan.problem.m else 0  # a GEMM without tiles posts nothing

    def slices(self, plan: Plan, shape: TileShape) -> Slices:
        """The cut of C for tiles of this shape; chunks as the plan wants them."""
        problem, chunks = plan.problem, plan.num_chunks
        per_chunk = max(1, -(-problem.slice_rows // (chunks * shape.rows)))
        bands = chunks * per_chunk
        return Slices(
            problem.m,
            self._here.rank,
            self._num_ranks,
            problem.slice_rows,
            bands,
            max(1, -(-problem.slice_rows // bands)),
            per_chunk,
        )

    def table(self, cut: Slices) -> list[int]:
        """What ToQueues and ToPeers read, as wires.py names it."""
        here, layout, control = self._here, self._layout, control_of(self._num_ranks)
        words = {
            **dict(zip(("base", "stride", "rank"), here.place, strict=True)),
            "num_ranks": cut.num_ranks,
            "slice_rows": cut.slice_rows,
            "bands": cut.bands,
            "band_rows": cut.band_rows,
            "bands_per_chunk": cut.bands_per_chunk,
            "c": layout.c_row(0),
            "landing": layout.landing_row(here.rank),
            "queues": here.queues,
            "arrived": control.arrived + 8 * here.rank,
            "tiles": here.mine + control.counters,
            "then": control.then,
        }
        return [words[name] for name in WORDS]

    def plain_rows(self, plan: Plan) -> int:
        """Where the GEMM's rows begin if they are neither sent nor stored at peers."""
        first = self._layout.output_row(0) if plan.wire == Wire.OUTPUT else self._layout.c_row(0)
        return self._here.mine + first

    def _scatter(self, plan: Plan) -> Iterator[Launch]:
        here, layout, problem = self._here, self._layout, plan.problem
        rows = problem.m, problem.slice_rows
        args = filled(
            Scatter, *here.place, here.queues, layout.c_row(0), layout.landing_row(here.rank), *rows
        )
        yield Launch(Phase.SCATTER, scatterer(self._num_ranks, self._n), args, 1)

    def _drain(self, plan: Plan) -> Iterator[Launch]:
        yield self._meet(plan, Phase.DRAIN, PARTIALS, tells=not plan.options.scatters_by_sdma)

    def _meet(self, plan: Plan, phase: Phase, what: int, *, tells: bool) -> Launch:
        here = self._here
        args = filled(Meet, *here.place, plan.problem.m, *here.waiting)
        return Launch(phase, meeter(self._num_ranks, what, tells=tells), args, 1)

    # ---- my slice ----

    def one_stage(self, plan: Plan) -> bool:
        """Whether every rank adds up everything: one meeting less, W times the reads."""
        small = plan.problem.m * self._n * 2 <= limits.ONE_STAGE_BYTES
        return (
            plan.wire == Wire.IN_PLACE and plan.options.gather_transport == "lsa" and not self._fp8 and small
        )

    def _sources(self, plan: Plan, first_row: int) -> tuple[int, int, int, int]:
        """(that of rank 0, the distance to the next rank's, my own, my rank), for rows from first_row on."""
        here, layout = self._here, self._layout
        own = here.mine + layout.c_row(first_row)
        if plan.wire == Wire.IN_PLACE:
            return here.base + layout.c_row(first_row), here.stride, own, here.rank
        first, step = here.mine + layout.landing_row(0), layout.landing_row(1) - layout.landing_row(0)
        if plan.wire == Wire.PEERS:
            own = first + here.rank * step
        return first, step, own, here.rank

    def _finished(self, plan: Plan) -> tuple[int, int]:
        """(where the reduce puts my finished rows, or their codes, and where their scales)."""
        here, layout, options = self._here, self._layout, plan.options
        if self._fp8 and options.fuse_quantize:
            return self._staged()
        if options.gather_transport == "lsa" and not self._fp8:
            return self._staged()
        return here.mine + layout.output_row(plan.problem.slice_of(here.rank).start), 0

    def _staged(self) -> tuple[int, int]:
        """My slot of staging: (rows, scales)."""
        here, layout = self._here, self._layout
        return here.mine + self._staging_at(), here.mine + layout.scale_row(self._slot)

    @property
    def _slot(self) -> int:
        """Which slot of staging is mine."""
        return self._here.rank if self._options.gather_transport == "sdma" else 0

    def _staging_at(self) -> int:
        return self._layout.staging_row(self._slot, 0, self._n * (FP8_BYTES if self._fp8 else 2))

    def _reduce(self, plan: Plan) -> Iterator[Launch]:
        here, problem, options = self._here, plan.problem, plan.options
        if self.one_stage(plan):
            if problem.m:
                out = here.mine + self._layout.output_row(0)
                args = filled(Sum, *self._sources(plan, 0), problem.m, out, 0)
                yield Launch(Phase.REDUCE, self._reducer(plan), args, self._blocks(plan, problem.m))
            return
        rows = problem.slice_of(here.rank)
        sum_args = (*self._sources(plan, rows.start), rows.height, *self._finished(plan))
        if options.fuse_reduce_push:
            parts = options.gather_bands or 1
            part_rows = -(-problem.slice_rows // parts)
            push = filled(Push, *sum_args, here.base, here.stride, here.queues, part_rows, parts)
            kernel = pusher(self._num_ranks, self._n, quantises=self._fp8, publish=options.publish or "")
            yield Launch(Phase.REDUCE, kernel, push, max(1, self._blocks(plan, part_rows)))
        elif rows.height:
            yield Launch(
                Phase.REDUCE, self._reducer(plan), filled(Sum, *sum_args), self._blocks(plan, rows.height)
            )

    def _reducer(self, plan: Plan) -> Kernel:
        return reducer(self._num_ranks, self._n, quantises=plan.options.fuse_quantize)

    def _blocks(self, plan: Plan, rows: int) -> int:
        """Workgroups that share some rows: as many as have something to do, up to what the memory wants."""
        most = limits.REMOTE_BLOCKS if plan.wire == Wire.IN_PLACE else limits.LOCAL_BLOCKS
        if plan.options.fuse_quantize:
            return min(most, -(-rows // WAVES))
        return min(most, -(-rows * (self._n // limits.PACK) // THREADS))

    def _quantize(self, plan: Plan) -> Iterator[Launch]:
        rows = plan.problem.slice_of(self._here.rank)
        if rows.height:
            values = self._here.mine + self._layout.output_row(rows.start)
            args = filled(Narrow, values, *self._staged(), rows.height)
            blocks = min(limits.LOCAL_BLOCKS, -(-rows.height // WAVES))
            yield Launch(Phase.QUANTIZE, quantizer(self._n), args, blocks)

    # ---- everyone's slices ----

    def _gather(self, plan: Plan) -> Iterator[Launch]:
        here, layout = self._here, self._layout
        rows = plan.problem.slice_of(here.rank)
        at = self._staging_at() if self._fp8 else layout.output_row(rows.start)
        args = filled(
            Gather, *here.place, here.queues, at, layout.scale_row(self._slot), rows.height, *here.waiting
        )
        sends = not plan.options.fuse_reduce_push
        yield Launch(Phase.GATHER, gatherer(self._num_ranks, self._n, fp8=self._fp8, sends=sends), args, 1)

    def _dequantize(self, plan: Plan) -> Iterator[Launch]:
        here, layout, problem = self._here, self._layout, plan.problem
        if problem.m:
            places = (layout.staging_row(0, 0, self._n), layout.scale_row(0), layout.output_row(0))
            args = filled(
                Widen,
                *(here.mine + place for place in places),
                problem.m,
                problem.slice_rows,
                layout.slice_rows,
            )
            blocks = min(limits.LOCAL_BLOCKS, -(-problem.m // WAVES))
            yield Launch(Phase.DEQUANTIZE, dequantizer(self._n), args, blocks)

    def _pull(self, plan: Plan) -> Iterator[Launch]:
        here, layout, problem = self._here, self._layout, plan.problem
        if self.one_stage(plan):
            yield self._meet(plan, Phase.PULL, FINISHED, tells=True)
            return
        most = plan.options.pull_blocks or 1
        pieces = max(1, min(-(-most // self._num_ranks), problem.slice_rows))
        args = filled(
            Pull,
            *here.place,
            self._staging_at(),
            layout.scale_row(0),
            layout.output_row(0),
            problem.m,
            problem.slice_rows,
            pieces,
            -(-problem.slice_rows // pieces),
            *here.waiting,
        )
        blocks = min(most, pieces * self._num_ranks)
        yield Launch(Phase.PULL, puller(self._num_ranks, self._n, fp8=self._fp8), args, blocks)


def here_of(comm: mori_shmem.Communicator, window: mori_shmem.Window, options: Options) -> Here:
    """This rank's place. Queues are opened if the op uses them: one that cannot be had is an error now."""
    handle = window.handle
    queues = comm.core.device_queues().table if options.uses_queues and comm.world_size > 1 else 0
    record = comm.core.record.address
    return Here(handle.base, handle.stride, handle.rank, queues, record, ticks(comm.timeout_s))
