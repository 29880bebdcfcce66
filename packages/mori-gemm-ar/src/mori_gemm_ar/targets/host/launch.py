"""The fused GEMM + all-reduce on processes that share memory: from partial sums to the finished matrix.

Call e on rank r, with S(o) the slice of owner o; a mode has some of these phases (plan.py):

  gemm        fused-sdma first queues, for every peer o and chunk c:
                wait done[o][c] == e  ->  put these rows of C to o's landing[r]  ->  arrived[r][c] = e at o
              Bands are computed, those of rank r+1 first, r's own last. Each is rounded to bf16 once and
              stored in C (sdma modes, split-lsa), in the owner's landing[r] (fused-lsa), or in the output
              (gemm-only). After the last band of a chunk: done[o][c] = e (fused-sdma). After the last band
              of a slice: arrived[r][0] = e at its owner (fused-lsa); after all, at all peers (split-lsa).
  scatter     the puts of partial sums, without waiting for `done` (split-sdma)
  drain       wait for arrived[s][c] >= e from every peer s, for every chunk c
  reduce      S(r) = the W partial sums, r's own in its place, added in rank order in fp32, rounded once
  quantize    S(r) -> e4m3fn codes and row scales in staging (fp8; within reduce if fuse_quantize)
  gather      put S(r) to every peer -> gathered[r][part] = e there; wait for all gathered[s] >= e
  dequantize  everyone's slot of staging -> output
  pull        ready[r] = e at every peer; for every owner o: wait ready[o] >= e, its staging -> output

A call returns when its phases are done and this rank's queues are idle (`quiet`): a flag can be seen before
the queue that set it is past it, since a queue writes its two halves one after the other.

Every flag is set in every call, also for a slice without rows: the proofs below rest on that. A flag has one
writer and only grows. It holds e << 24 | m, so that ranks which were called with different M find out before
they use each other's data; `done` and `pushed`, which queues read, hold plain e. Nothing is reset, and no
barrier is needed.

Who may overwrite what, and why nobody reads it any more. "p is done with e" means that its call e returned;
in its gather or pull it then saw gathered[q] or ready[q] of e from every rank q.
  (1) r has drained e+1  =>  every p is in call e+1 (arrived[p] of e+1)  =>  every p is done with e
  (2) some p is done with e  =>  every q has reduced e  =>  every q had all of arrived of e
  landing[s] of r  Written by s in its gemm or scatter of e+1: s is done with e, so r has reduced e (2).
  C of r           Written by r's gemm of e+1. Puts out of it are complete: r is done with e, so every owner
                   had arrived[r] of e (2), and that follows the copy on its queue. Peers that read C in
                   place (split-lsa) have reduced e (2).
  staging of r     Pulled: written in r's reduce or quantize of e+1, after its drain; all are done with e (1).
                   Pushed, slot s: written by s after it drained e+1; r is done with e (1), it has widened it.
                   Pushed, slot r, where r's own puts begin: complete when r's call returns (`quiet`).
  output of r      Written by pushes of s after it drained e+1, so r is in call e+1 (1): the caller has given
                   its view back. Read by r's own puts, complete when r's call returns (`quiet`): the caller
                   may write into its view, or close the op, at once. What peers pull is in staging, not here.
  done, pushed     Set to e+1 when the queue is past e: the put behind that wait is complete, as shown above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import mori_shmem
import torch
from mori_shmem.device.host import sum_bf16
from mori_shmem.errors import CollectiveMismatch, PeerDied

from mori_gemm_ar.layout import Layout
from mori_gemm_ar.options import Options
from mori_gemm_ar.plan import Phase, Plan, Wire
from mori_gemm_ar.problem import Rows
from mori_gemm_ar.targets.host.fp8_wire import Fp8Wire
from mori_gemm_ar.targets.host.gemm import full_fp32
from mori_gemm_ar.targets.host.puts import GATHER, SCATTER, Puts

M_BITS = 24


class PartialSums(Protocol):
    """Where a rank's [m, n] bf16 partial sums come from: a product, or a self-test's constant."""

    def begin(self) -> None:
        """Once per call."""

    def store(self, rows: Rows, into: torch.Tensor) -> None:
        """into = the partial sums of these rows."""


@dataclass(frozen=True)
class Span:
    """A stretch of work on time.monotonic_ns, for a trace."""

    name: str
    lane: str
    start_ns: int
    end_ns: int


@dataclass
class Call:
    """One call under way."""

    plan: Plan
    number: int
    partials: PartialSums
    timed: bool  # whether single bands and puts are recorded, and not phases alone
    spans: list[Span] = field(default_factory=list)

    @property
    def tag(self) -> int:
        """What this call's flags are set to."""
        return self.number << M_BITS | self.plan.problem.m

    @contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        """Record what happens inside."""
        start_ns = time.monotonic_ns()
        yield
        self.spans.append(Span(name, lane, start_ns, time.monotonic_ns()))


class Runner:
    """One op's buffers and flags on this rank, and the phases that work on them."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        options: Options,
        m_max: int,
    ) -> None:
        self._comm, self._window, self._layout, self._options = comm, window, layout, options
        self._rank, self._world_size = comm.rank, comm.world_size
        self._peers = [p for p in range(comm.world_size) if p != comm.rank]
        self._puts = Puts(comm, window, layout, options) if options.uses_queues else None
        self._fp8 = Fp8Wire(layout.n) if options.gather_dtype == "fp8" else None
        self.on_step: Callable[[str], None] = lambda step: None  # for tests: told before each phase and band
        self._views(m_max)

    def _views(self, m_max: int) -> None:
        """Tensors over the window, made once. A region that the mode does not use gives empty ones."""
        layout, window = self._layout, self._window
        codes = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        slots = 1 if self._options.gather_transport == "lsa" else self._world_size

        def view(
            part: mori_shmem.Part, name: str, shape: tuple[int, ...], dtype: torch.dtype
        ) -> torch.Tensor:
            region = layout.regions()[name]
            return part.tensor(shape if region.nbytes else (0,), dtype, region.offset_bytes)

        parts = [window.peer(rank) for rank in range(self._world_size)]
        slices = (self._world_size, layout.slice_rows, layout.n)
        self._c = [view(part, "c", (m_max, layout.n), torch.bfloat16) for part in parts]
        self._landing = [view(part, "landing", slices, torch.bfloat16) for part in parts]
        self._staging = [view(part, "staging", (slots, *slices[1:]), codes) for part in parts]
        self._scales = [view(part, "scales", (slots, layout.slice_rows), torch.float32) for part in parts]
        self._output = view(parts[self._rank], "output", (m_max, layout.n), torch.bfloat16)
        if self._fp8 and self._options.fuse_quantize:
            self._block = torch.empty(self._fp8.block_rows, layout.n, dtype=torch.bfloat16)

    def run(
        self, plan: Plan, number: int, partials: PartialSums, *, timed: bool = False
    ) -> tuple[torch.Tensor, list[Span]]:
        """(the finished rows, a view of the window; what ran when: phases, with `timed` bands and puts)."""
        call = Call(plan, number, partials, timed)
        steps = {
            Phase.GEMM: self._gemm,
            Phase.SCATTER: self._scatter,
            Phase.DRAIN: self._drain,
            Phase.REDUCE: self._reduce,
            Phase.QUANTIZE: self._quantize,
            Phase.GATHER: self._gather,
            Phase.DEQUANTIZE: self._dequantize,
            Phase.PULL: self._pull,
        }
        if timed and self._puts:
            self._puts.forget_times()
        with torch.no_grad(), full_fp32():
            for phase in plan.phases:
                self.on_step(phase)
                with call.span(phase, "phase"), self._naming_the_dead(call):
                    steps[phase](call)
        if self._puts:
            with self._naming_the_dead(call):
                self._puts.quiet()
            if timed:
                self._record_puts(call)
        return self._output[: plan.problem.m], call.spans

    def ready(self, plan: Plan, partials: PartialSums) -> None:
        """Nothing is kept from call to call: checks are cheap beside the product."""

    def ran(self, m: int) -> str:
        """Every call goes the op's own way."""
        return self._options.mode

    def close(self) -> None:
        """Nothing is held beside the window."""

    def poison(self, m: int) -> None:
        """Fill what a call of m rows reads and writes with NaN, so that nothing old can pass for new."""
        slice_rows = -(-m // self._world_size)
        for rows in (self._c[self._rank][:m], self._output[:m]):
            rows.fill_(torch.nan)
        for slots in (self._landing[self._rank], self._staging[self._rank], self._scales[self._rank]):
            if slots.numel():
                slots[:, :slice_rows].fill_(torch.nan)

    # ---- partial sums ----

    def _gemm(self, call: Call) -> None:
        plan = call.plan
        fused = plan.options.mode == "fused-sdma"
        if fused:
            self._queue_scatter(call, triggered=True)
        call.partials.begin()
        for owner in plan.owners_from(self._rank):
            for chunk, bands in enumerate(plan.bands_by_chunk(owner)):
                for band in bands:
                    self._band(call, owner, band)
                if fused and owner != self._rank:
                    self._comm.signal(self._window.at(self._layout.done_flag(owner, chunk)), call.number)
            if plan.wire == Wire.PEERS:
                self._announce(call, owner)
        if plan.wire == Wire.IN_PLACE:
            for owner in self._peers:
                self._announce(call, owner)

    def _band(self, call: Call, owner: int, rows: Rows) -> None:
        if rows.height == 0:
            return
        self.on_step("band")
        name = "own band" if owner == self._rank else "band"
        with call.span(name, "gemm") if call.timed else nullcontext():
            call.partials.store(rows, self._destination(call.plan, owner, rows))
        if call.plan.options.communicates:
            self._check_peers(call)

    def _destination(self, plan: Plan, owner: int, rows: Rows) -> torch.Tensor:
        """Where the partial sums of a band belong."""
        if plan.wire == Wire.OUTPUT:
            return self._output[rows.start : rows.stop]
        if plan.wire == Wire.PEERS:
            first = plan.problem.slice_of(owner).start
            return self._landing[owner][self._rank, rows.start - first : rows.stop - first]
        return self._c[self._rank][rows.start : rows.stop]

    def _announce(self, call: Call, owner: int) -> None:
        """Tell an owner that it can read my partial sums of its slice."""
        if owner != self._rank:
            self._comm.signal(self._window.at(self._layout.arrived_flag(self._rank, 0), owner), call.tag)

    def _check_peers(self, call: Call) -> None:
        """A long GEMM must not be what keeps this rank from hearing that another died."""
        dead = self._dead()
        if dead:
            raise self._died(dead, call)

    @contextmanager
    def _naming_the_dead(self, call: Call) -> Iterator[None]:
        """A peer that left because a third rank had died is not the one to name."""
        try:
            yield
        except PeerDied as error:
            dead = self._dead()
            if dead and set(dead) != set(error.peers):
                raise self._died(dead, call) from error
            raise

    def _dead(self) -> list[int]:
        return [rank for rank, state in enumerate(self._comm.core.peer_states()) if state == "dead"]

    def _died(self, dead: list[int], call: Call) -> PeerDied:
        who = f"rank {self._rank} of {self._world_size}, in call {call.number} of its GEMM + all-reduce"
        return PeerDied(f"{who}: rank {', '.join(map(str, dead))} died", rank=self._rank, peers=dead)

    def _scatter(self, call: Call) -> None:
        self._queue_scatter(call, triggered=False)

    def _queue_scatter(self, call: Call, *, triggered: bool) -> None:
        assert self._puts is not None
        for owner in call.plan.owners_from(self._rank):
            if owner != self._rank:
                self._puts.scatter(
                    call.plan, owner, call.number, call.tag, triggered=triggered, timed=call.timed
                )

    # ---- my slice ----

    def _drain(self, call: Call) -> None:
        for source in self._peers:
            for chunk in range(call.plan.num_chunks):
                flag = self._window.at(self._layout.arrived_flag(source, chunk))
                self._await(call, flag, source, f"partial sums, chunk {chunk}")

    def _await(self, call: Call, flag: mori_shmem.Ref, source: int, what: str) -> None:
        """Until `source` has set the flag in this call, with the same M as mine."""
        seen = self._comm.wait(
            flag,
            call.number << M_BITS,
            peer=source,
            what=f"rank {source}'s {what} (call {call.number})",
        )
        m = seen & ((1 << M_BITS) - 1)
        if m != call.plan.problem.m:
            raise CollectiveMismatch(
                f"rank {self._rank} called with M={call.plan.problem.m}, rank {source} with M={m} (call "
                f"{call.number} of this op): all ranks must call with the same M, in the same order"
            )

    def _sources(self, call: Call, rows: Rows) -> list[torch.Tensor]:
        """The W partial sums of some rows of my slice, in rank order."""
        plan, first = call.plan, call.plan.problem.slice_of(self._rank).start
        if plan.wire == Wire.IN_PLACE:
            return [c[rows.start : rows.stop] for c in self._c]
        landing = self._landing[self._rank]
        sources = [landing[s, rows.start - first : rows.stop - first] for s in range(self._world_size)]
        if plan.wire == Wire.QUEUES:
            sources[self._rank] = self._c[self._rank][rows.start : rows.stop]
        return sources

    def _reduce(self, call: Call) -> None:
        plan = call.plan
        if not plan.options.fuse_reduce_push:
            self._reduce_rows(call, plan.problem.slice_of(self._rank))
            return
        assert self._puts is not None
        eager = plan.options.publish == "fence"
        if not eager:
            self._push(call, range(plan.num_parts), triggered=True)
        for part, rows in enumerate(plan.parts(self._rank)):
            self._reduce_rows(call, rows)
            if eager:
                self._push(call, [part], triggered=False)
            else:
                self._comm.signal(self._window.at(self._layout.pushed_flag(part)), call.number)

    def _reduce_rows(self, call: Call, rows: Rows) -> None:
        """Add up some rows of my slice, into the form in which the next phase wants them."""
        if rows.height == 0:
            return
        options, first = call.plan.options, call.plan.problem.slice_of(self._rank).start
        if not options.fuse_quantize:
            sum_bf16(self._finished(call.plan, rows), self._sources(call, rows))
            return
        assert self._fp8 is not None
        for start in range(rows.start, rows.stop, self._fp8.block_rows):
            block = Rows(start, min(start + self._fp8.block_rows, rows.stop))
            summed = self._block[: block.height]
            sum_bf16(summed, self._sources(call, block))
            self._narrow(summed, Rows(block.start - first, block.stop - first))

    def _finished(self, plan: Plan, rows: Rows) -> torch.Tensor:
        """Where finished bf16 rows of my slice go: to staging if they are pulled as they are."""
        if plan.options.gather_transport == "lsa" and not self._fp8:
            first = plan.problem.slice_of(self._rank).start
            return self._staging[self._rank][0, rows.start - first : rows.stop - first]
        return self._output[rows.start : rows.stop]

    def _narrow(self, rows: torch.Tensor, place: Rows) -> None:
        """Finished rows to fp8, at their place in my slot of staging."""
        assert self._fp8 is not None
        slot = 0 if self._options.gather_transport == "lsa" else self._rank
        codes, scales = self._staging[self._rank][slot], self._scales[self._rank][slot]
        self._fp8.narrow(rows, codes[place.start : place.stop], scales[place.start : place.stop])

    def _quantize(self, call: Call) -> None:
        rows = call.plan.problem.slice_of(self._rank)
        self._narrow(self._output[rows.start : rows.stop], Rows(0, rows.height))

    # ---- everyone's slices ----

    def _push(self, call: Call, parts: range | list[int], *, triggered: bool) -> None:
        assert self._puts is not None
        for peer in call.plan.owners_from(self._rank):
            if peer != self._rank:
                self._puts.gather(
                    call.plan, peer, parts, call.number, call.tag, triggered=triggered, timed=call.timed
                )

    def _gather(self, call: Call) -> None:
        assert self._puts is not None
        parts = range(call.plan.num_parts)
        if not call.plan.options.fuse_reduce_push:
            self._push(call, parts, triggered=False)
        for source in self._peers:
            for part in parts:
                flag = self._window.at(self._layout.gathered_flag(source, part))
                self._await(call, flag, source, f"finished rows, part {part}")

    def _dequantize(self, call: Call) -> None:
        for owner in range(self._world_size):
            self._widen(call.plan, owner, owner, call.plan.problem.slice_of(owner), self._rank)

    def _widen(self, plan: Plan, owner: int, slot: int, rows: Rows, holder: int) -> None:
        """Rows of an owner's slice, from a slot of the holder's staging into the output."""
        assert self._fp8 is not None
        first = plan.problem.slice_of(owner).start
        place = slice(rows.start - first, rows.stop - first)
        codes, scales = self._staging[holder][slot, place], self._scales[holder][slot, place]
        self._fp8.widen(codes, scales, self._output[rows.start : rows.stop])

    def _pull(self, call: Call) -> None:
        plan = call.plan
        for peer in self._peers:
            self._comm.signal(self._window.at(self._layout.ready_flag(self._rank), peer), call.tag)
        for owner in plan.owners_from(self._rank):
            if owner != self._rank:
                flag = self._window.at(self._layout.ready_flag(owner))
                self._await(call, flag, owner, "finished rows")
            first = plan.problem.slice_of(owner).start
            for rows in plan.pull_blocks(owner):
                if self._fp8:
                    self._widen(plan, owner, 0, rows, owner)
                else:
                    staged = self._staging[owner][0, rows.start - first : rows.stop - first]
                    self._output[rows.start : rows.stop] = staged

    # ---- the record ----

    def _record_puts(self, call: Call) -> None:
        assert self._puts is not None
        for peer in self._peers:
            lane = f"copies to {peer}"
            for began, ended in self._puts.times(SCATTER, peer, call.plan.num_chunks):
                call.spans.append(Span("chunk", lane, began, ended))
            for began, ended in self._puts.times(GATHER, peer, call.plan.num_parts):
                call.spans.append(Span("finished rows", lane, began, ended))
