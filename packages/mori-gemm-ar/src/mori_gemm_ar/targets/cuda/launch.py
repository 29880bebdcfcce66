"""Launches of the GEMM kernel: its arguments for a shape and a way to communicate, and the copies around it.

    scatter  "lsa": tiles go straight into the owners' inboxes     "ce": staged here, copy engines take a
             band at a time (copies.py)
    gather   "lsa": finished tiles go straight to every rank       "ce": copy engines take a band at a time

Nothing that is enqueued depends on the call but the operands' addresses, which are arguments of the kernel:
so a call is prepared once a shape (prepared.py), and the same works eagerly and in a captured graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mori_shmem.jit import driver
from mori_shmem.targets.cuda import stream_calls

from mori_gemm_ar.targets.cuda.copies import Bands, Copies
from mori_gemm_ar.targets.cuda.params import MAX_BANDS, Divisor, Maps, Params
from mori_gemm_ar.targets.cuda.regions import Regions

BLOCK_THREADS = 384
Mark = Callable[[str], None]  # told the name of each phase behind its last operation


def unmarked(phase: str) -> None:
    """For who does not want to know."""


@dataclass(frozen=True)
class Way:
    """How a call communicates, and in which order it computes."""

    scatter: str = "lsa"
    gather: str = "lsa"
    fp8: bool = False
    band_rows: int = 512
    lag: int | None = 2  # bands; None: all remote tiles first

    @property
    def copies(self) -> bool:
        """Whether copy engines take part."""
        return "ce" in (self.scatter, self.gather)


class Operands(NamedTuple):
    """Addresses of one rank's operands, and the distances between their k blocks or n blocks in elements."""

    a: int
    b: int
    a_scale: int
    b_scale: int
    a_scale_pitch: int
    b_scale_pitch: int
    a_pitch: int
    b_pitch: int


class SideStreams:
    """Streams that a call forks off its own, and the events that tie them to it."""

    def __init__(self, count: int) -> None:
        self.streams = [stream_calls.new_stream() for _ in range(count)]
        self._events = [stream_calls.new_event() for _ in range(count)]

    def fork(self, stream: int) -> None:
        """They go on behind what `stream` holds now."""
        for side, event in zip(self.streams, self._events, strict=True):
            stream_calls.record(event, stream)
            stream_calls.follow(side, event)

    def join(self, stream: int) -> None:
        """`stream` goes on behind what they hold."""
        for side, event in zip(self.streams, self._events, strict=True):
            stream_calls.record(event, side)
            stream_calls.follow(stream, event)

    def close(self) -> None:
        for stream, event in zip(self.streams, self._events, strict=True):
            stream_calls.drop_stream(stream)
            stream_calls.drop_event(event)
        self.streams, self._events = [], []


class Kernel:
    """A compiled variant on the current device."""

    def __init__(self, cubin: bytes, tile_rows: int, fp8: bool) -> None:
        module = driver.Module(cubin)
        self.tile_rows, self.fp8 = tile_rows, fp8
        self.function = module.function("gemm_allreduce", module.constant("shared_bytes"))
        self.piece_rows = module.constant("piece_rows")
        if module.constant("params_bytes") != ctypes.sizeof(Params):
            raise RuntimeError(
                f"params.py has {ctypes.sizeof(Params)} bytes, params.cuh {module.constant('params_bytes')}: "
                "the two files must hold the same fields"
            )


class Call:
    """One shape on one rank, prepared: `launch(stream)` is all that a call does."""

    def __init__(
        self,
        kernel: Kernel,
        shape: tuple[int, int, int],
        rank: int,
        bases: Sequence[int],
        regions: Regions,
        operands: Operands,
        way: Way,
        *,
        grid: int,
        queues: SideStreams | None = None,
        fault: int,
        timeout_s: float,
        into: str = "out",
    ) -> None:
        """`bases` of one rank make it a product alone, whose rows go to the region `into`.

        queues what copies are spread over, where the way has any
        fault  where a wait that runs out of time is written down
        """
        self.m, self.n, self.k = shape
        self._kernel, self._rank, self._bases, self._regions, self._way = kernel, rank, bases, regions, way
        self._fault, self._into = fault, into
        self._operands: Operands | None = None
        self.num_ranks = len(bases)
        slice_rows = -(-self.m // self.num_ranks)
        self._start = [min(self.m, r * slice_rows) for r in range(self.num_ranks + 1)]
        blocks = -(-slice_rows // kernel.tile_rows)
        self._band = max(1, way.band_rows // kernel.tile_rows, -(-blocks // MAX_BANDS))
        self._bands = -(-blocks // self._band)
        self._maps = driver.aligned(Maps)
        self._params = self._make_params(timeout_s)
        self.set_operands(operands)
        self.kernel_launch = driver.PreparedLaunch(
            kernel.function, grid, BLOCK_THREADS, [self._maps, self._params]
        )
        self._queues = queues if way.copies and self.num_ranks > 1 else None
        self.is_one_kernel = self._queues is None
        bands = Bands(self._start, kernel.tile_rows, self._band, self._bands, self._params.lag)
        carries = {"scatters": way.scatter == "ce", "gathers": way.gather == "ce", "fp8": way.fp8}
        self._transfers = (
            tuple(Copies(bands, rank, bases, regions, **carries).in_order()) if self._queues else ()
        )

    @property
    def product(self) -> Call:
        """What takes the operands: this very call."""
        return self

    def out(self, rank: int) -> int:
        return self._bases[rank] + self._regions.offsets[self._into]

    def _make_params(self, timeout_s: float) -> Params:
        p, way, at, bases, me = Params(), self._way, self._regions, self._bases, self._rank
        p.nbytes, p.n, p.k, p.world, p.rank = ctypes.sizeof(Params), self.n, self.k, self.num_ranks, me
        p.start[: self.num_ranks + 1] = self._start
        p.band, p.bands = self._band, self._bands
        p.lag = 0 if self.num_ranks == 1 else self._bands if way.lag is None else min(way.lag, self._bands)
        p.by_band_tiles, p.by_band = Divisor.of(self._band * -(-self.n // 256)), Divisor.of(self._band)
        p.by_others, p.by_world = Divisor.of(self.num_ranks - 1), Divisor.of(self.num_ranks)
        p.toggles = way.copies and self.num_ranks > 1
        others = [(me + d) % self.num_ranks for d in range(1, self.num_ranks)]
        pushes, copies_out = way.gather == "lsa", way.gather == "ce"
        targets = [me, *(others if pushes and not way.fp8 else [])]
        p.num_outs = 0 if way.fp8 and others else len(targets)
        for i, r in enumerate(targets):
            p_out = self.out(r) + self._start[me] * self.n * 2
            self._maps.out[i] = self._out_map(p_out)
        if way.fp8:
            sinks = (
                [bases[me] + at.slot("q_staging")]
                if copies_out
                else [bases[r] + at.slot("q_inbox", me) for r in others]
            )
            p.num_q_sinks = len(sinks)
            p.q_sink[: len(sinks)] = sinks
        flavour = "_t" if p.toggles else ""
        listeners = (
            [bases[me] + at.flag("finished")]
            if copies_out
            else [bases[r] + at.flag("gathered" + flavour, me) for r in others]
        )
        p.num_listeners = len(listeners) if self.num_ranks > 1 else 0
        p.gather_flag[: p.num_listeners] = listeners[: p.num_listeners]
        p.widens = way.fp8
        for r in range(self.num_ranks):
            p.inbox[r], p.q_inbox[r] = bases[me] + at.slot("inbox", r), bases[me] + at.slot("q_inbox", r)
            p.arrived[r], p.gathered[r] = (
                bases[me] + at.flag("arrived" + flavour, r),
                bases[me] + at.flag("gathered" + flavour, r),
            )
            if way.scatter == "ce":
                p.sink[r], p.scatter_flag[r] = (
                    bases[me] + at.slot("staging", r),
                    bases[me] + at.flag("ready", r),
                )
            else:
                p.sink[r], p.scatter_flag[r] = (
                    bases[r] + at.slot("inbox", me),
                    bases[r] + at.flag("arrived" + flavour, me),
                )
        p.out = self.out(me)
        for name in ("count", "step", "exits", "tickets"):
            setattr(p, name, bases[me] + at.offsets[name])
        p.fault = self._fault
        p.timeout_ns = int(timeout_s * 1e9)
        return p

    def _out_map(self, address: int) -> driver.TensorMap:
        rows = max(1, self._start[self._rank + 1] - self._start[self._rank])
        return driver.tensor_map(
            address,
            "bf16",
            columns=self.n,
            rows=rows,
            pitch_bytes=2 * self.n,
            box_columns=64,
            box_rows=self._kernel.piece_rows,
        )

    def set_operands(self, operands: Operands) -> bool:
        """Where a, b and their scales lie from now on; whether anything is different."""
        before = self._operands
        if operands == before:
            return False
        self._operands = operands
        p, maps = self._params, self._maps
        p.a_scale, p.b_scale = operands.a_scale, operands.b_scale
        if before is not None and operands[4:] == before[4:]:  # the same matrices at other addresses
            if operands.a != before.a:
                driver.point_at(maps.a, operands.a)
            if operands.b != before.b:
                driver.point_at(maps.b, operands.b)
            return True
        p.a_scale_pitch, p.b_scale_pitch = operands.a_scale_pitch, operands.b_scale_pitch
        a_rows = self._kernel.tile_rows // 2
        maps.a = self._codes(operands.a, self.m, operands.a_pitch, a_rows)
        maps.b = self._codes(operands.b, self.n, operands.b_pitch, 128)
        return True

    def _codes(self, address: int, rows: int, pitch_bytes: int, box_rows: int) -> driver.TensorMap:
        box = {"box_columns": 128, "box_rows": box_rows}
        return driver.tensor_map(address, "u8", columns=self.k, rows=rows, pitch_bytes=pitch_bytes, **box)

    def enqueue(self, stream: int, mark: Mark = unmarked) -> None:
        """Everything of one call, ordered after what `stream` holds and before what follows on it."""
        if self._queues is None:
            self.kernel_launch.launch(stream)
            mark("gemm")
            return
        self._queues.fork(stream)
        for i, transfer in enumerate(self._transfers):
            queue = self._queues.streams[i % len(self._queues.streams)]
            driver.stream_wait(queue, transfer.trigger, 1)
            for dst, src, nbytes in transfer.copies:
                driver.stream_copy(queue, dst, src, nbytes)
            for flag in transfer.flags:
                driver.stream_write(queue, flag, 1)
        self.kernel_launch.launch(stream)
        mark("gemm")
        self._queues.join(stream)
        triggers = self._bases[self._rank] + self._regions.offsets["ready"]
        driver.stream_fill(stream, triggers, 0, (self.num_ranks + 1) * MAX_BANDS)
        mark("drain")
