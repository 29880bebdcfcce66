"""Launches of the GEMM kernel: its arguments for a shape and a way to communicate, and the copies around it.

    scatter  "lsa": tiles go straight into the owners' inboxes     "ce": staged here, copy engines take a
             band at a time
    gather   "lsa": finished tiles go straight to every rank       "ce": copy engines take a band at a time

The copies are queued before the kernel: wait until the band's flag is 1, copy, set the peer's flag; the
band's flags are cleared
at the end. Nothing in them depends on the call, so the same works eagerly and in a captured graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from mori_shmem.jit import driver

from mori_gemm_ar.targets.cuda.params import MAX_BANDS, Divisor, Maps, Params
from mori_gemm_ar.targets.cuda.regions import HALF_BYTES, Q_BYTES, Regions

BLOCK_THREADS = 384


@dataclass(frozen=True)
class Way:
    """How a call communicates, and in which order it computes."""

    scatter: str = "lsa"
    gather: str = "lsa"
    fp8: bool = False
    band_rows: int = 512
    lag: int | None = 2  # bands; None: all remote tiles first
    num_queues: int = 2


@dataclass(frozen=True)
class Operands:
    """Addresses of one rank's operands, and the distances between their k blocks or n blocks in elements."""

    a: int
    b: int
    a_scale: int
    b_scale: int
    a_scale_pitch: int
    b_scale_pitch: int
    a_pitch: int
    b_pitch: int


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
        timeout_s: float = 10.0,
        fault: int | None = None,
        into: str = "out",
    ) -> None:
        """`bases` of one rank make it a product alone, whose rows go to the region `into`.

        fault  where a wait that runs out of time is written down, in place of the window's own record
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
        self._maps = Maps()
        self._params = self._make_params(timeout_s)
        self.set_operands(operands)
        self._launch = driver.PreparedLaunch(kernel.function, grid, BLOCK_THREADS, [self._maps, self._params])
        self._queues = [torch.cuda.Stream() for _ in range(way.num_queues if self._copies else 0)]  # type: ignore[no-untyped-call]

    @property
    def _copies(self) -> bool:
        return "ce" in (self._way.scatter, self._way.gather) and self.num_ranks > 1

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
        p.toggles = self._copies
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
        flavour = "_t" if self._copies else ""
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
        for name in ("count", "step", "exits", "tickets", "fault"):
            setattr(p, name, bases[me] + at.offsets[name])
        if self._fault is not None:
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

    def set_operands(self, operands: Operands) -> None:
        """Where a, b and their scales lie from now on."""
        if operands == self._operands:
            return
        self._operands = operands
        box = {"box_columns": 128, "box_rows": 128}
        p, a_rows = self._params, self._kernel.tile_rows // 2
        self._maps.a = driver.tensor_map(
            operands.a,
            "u8",
            columns=self.k,
            rows=self.m,
            pitch_bytes=operands.a_pitch,
            box_columns=128,
            box_rows=a_rows,
        )
        self._maps.b = driver.tensor_map(
            operands.b, "u8", columns=self.k, rows=self.n, pitch_bytes=operands.b_pitch, **box
        )
        p.a_scale, p.b_scale = operands.a_scale, operands.b_scale
        p.a_scale_pitch, p.b_scale_pitch = operands.a_scale_pitch, operands.b_scale_pitch

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Everything of one call, ordered after what `stream` holds and before what follows on it."""
        for queue in self._queues:
            queue.wait_stream(stream)
        if self._queues:
            self._queue_copies()
        self._launch.launch(stream.cuda_stream)
        for queue in self._queues:
            stream.wait_stream(queue)
        if self._queues:  # all triggers at once: one by one, behind each copy, they cost 2.5 us a band
            triggers = self._bases[self._rank] + self._regions.offsets["ready"]
            driver.stream_fill(stream.cuda_stream, triggers, 0, (self.num_ranks + 1) * MAX_BANDS)

    def _queue_copies(self) -> None:
        """In the order in which the kernel finishes bands, alternating over the queues."""
        for i, (trigger, copies, flags) in enumerate(self._copies_in_order()):
            queue = self._queues[i % len(self._queues)].cuda_stream
            driver.stream_wait(queue, trigger, 1)
            for dst, src, nbytes in copies:
                driver.stream_copy(queue, dst, src, nbytes)
            for flag in flags:
                driver.stream_write(queue, flag, 1)

    def _copies_in_order(self) -> Iterator[tuple[int, list[tuple[int, int, int]], list[int]]]:
        lag = self._params.lag
        for i in range(self._bands + lag):
            if i < self._bands and self._way.scatter == "ce":
                for d in range(1, self.num_ranks):
                    yield from self._scatter_of((self._rank + d) % self.num_ranks, i)
            if i >= lag and self._way.gather == "ce":
                yield from self._gather_of(i - lag)

    def _rows_of_band(self, owner: int, band: int) -> tuple[int, int]:
        """(first row of the slice, rows), none past the end."""
        height, first = (
            self._start[owner + 1] - self._start[owner],
            band * self._band * self._kernel.tile_rows,
        )
        return first, max(0, min(height - first, self._band * self._kernel.tile_rows))

    def _tile_bytes(self, first: int, rows: int, half_bytes: int) -> tuple[int, int]:
        """(offset, bytes) in a slot of tiles."""
        tile_rows = self._kernel.tile_rows
        row_of_tiles = tile_rows // 64 * (-(-self.n // 256) * 2) * half_bytes
        return first // tile_rows * row_of_tiles, -(-rows // tile_rows) * row_of_tiles

    def _scatter_of(
        self, owner: int, band: int
    ) -> Iterator[tuple[int, list[tuple[int, int, int]], list[int]]]:
        first, rows = self._rows_of_band(owner, band)
        if rows:
            at, mine, theirs = self._regions, self._bases[self._rank], self._bases[owner]
            offset, nbytes = self._tile_bytes(first, rows, HALF_BYTES)
            copy = (
                theirs + at.slot("inbox", self._rank) + offset,
                mine + at.slot("staging", owner) + offset,
                nbytes,
            )
            yield (
                mine + at.flag("ready", owner) + 4 * band,
                [copy],
                [theirs + at.flag("arrived_t", self._rank) + 4 * band],
            )

    def _gather_of(self, band: int) -> Iterator[tuple[int, list[tuple[int, int, int]], list[int]]]:
        first, rows = self._rows_of_band(self._rank, band)
        if not rows:
            return
        at, mine, copies, flags = self._regions, self._bases[self._rank], [], []
        for d in range(1, self.num_ranks):
            theirs = self._bases[(self._rank + d) % self.num_ranks]
            if self._way.fp8:
                offset, nbytes = self._tile_bytes(first, rows, Q_BYTES)
                copies.append(
                    (
                        theirs + at.slot("q_inbox", self._rank) + offset,
                        mine + at.slot("q_staging") + offset,
                        nbytes,
                    )
                )
            else:
                offset, nbytes = (
                    at.offsets["out"] + (self._start[self._rank] + first) * self.n * 2,
                    rows * self.n * 2,
                )
                copies.append((theirs + offset, mine + offset, nbytes))
            flags.append(theirs + at.flag("gathered_t", self._rank) + 4 * band)
        yield mine + at.flag("finished") + 4 * band, copies, flags
