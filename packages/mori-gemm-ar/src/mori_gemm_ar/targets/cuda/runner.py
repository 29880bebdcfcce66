"""Calls of one op on this rank: which way a call goes, prepared once a shape, and what a repeated call costs.

first call of an M        a Prepared (prepared.py) is made: arguments, tensor maps, kernels already loaded
first call with operands  they are checked (op.py); where the kernel reads them as they lie, a `Ready` is
that look so              made of them
every further call        the Ready is told where they lie now, and launches
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mori_shmem
import torch
from mori_shmem.jit import build

from mori_gemm_ar.options import Options
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.targets.cuda import limits
from mori_gemm_ar.targets.cuda.gemm import Gemm, Partials
from mori_gemm_ar.targets.cuda.launch import Call, Kernel, Operands, SideStreams, Way
from mori_gemm_ar.targets.cuda.prepared import Prepared
from mori_gemm_ar.targets.cuda.regions import Regions, regions_for
from mori_gemm_ar.targets.cuda.split import Split, split_kernels
from mori_gemm_ar.targets.cuda.variants import variant

PREPARED_KEPT = 256  # shapes; one that comes again after so many others is prepared anew


def layout_for(m_max: int, n: int, num_ranks: int, options: Options) -> Regions:
    """The window's layout; see regions.py."""
    return regions_for(
        *[m_max, n, num_ranks, _tile_rows(m_max, num_ranks)],
        copies=options.uses_queues and options.mode.startswith("fused"),
        fp8=options.gather_dtype == "fp8",
        split=options.mode.startswith("split"),
        communicates=options.communicates,
        scale_groups=1 if options.gather_scale == "row" else -(-n // 128),
        one_stage_rows=max(0, min(m_max, limits.small_m_below(options) - 1)),
    )


def _tile_rows(m: int, num_ranks: int) -> int:
    return 256 if -(-m // num_ranks) >= limits.SHORT_SLICE else 128


@functools.cache
def _kernel(quant: str, tile_rows: int, fp8: bool, device: int) -> Kernel:
    """One a process and device: the module stays loaded."""
    return Kernel(build(variant(quant, tile_rows, fp8_gather=fp8)), tile_rows, fp8)


class Span(NamedTuple):
    """One phase of a call."""

    name: str
    lane: str
    start_ns: int
    end_ns: int


Work = tuple[torch.Tensor, Sequence[Span]]  # a call's rows, and its phases where it was timed


class Runner:
    """One op's window on this rank."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Regions,
        options: Options,
        m_max: int,
    ) -> None:
        self._comm, self._window, self._layout, self._options = comm, window, layout, options
        self._bases = list(window.addresses)
        self._grid = self._ctas()
        self._device: int = comm.device.index or 0
        self._fault: int = comm.core.record.address
        self._prepared: OrderedDict[int, Prepared] = OrderedDict()  # by m; graphs captured earlier are apart
        self._load_kernels(m_max)
        self._recorder, self._queues = SideStreams(1), SideStreams(2 * (options.sdma_queues or 1))

    def _load_kernels(self, m_max: int) -> None:
        """All that any call may need: loading one later could wait for streams that wait for peers."""
        with self._comm.core.on_device():
            for rows in {_tile_rows(1, self._comm.world_size), self._tile_rows(m_max)}:
                _kernel(self._options.quant, rows, self._fused_fp8, self._device)
                if self._options.small_m:
                    _kernel(self._options.quant, rows, False, self._device)
            if self._splits or self._options.small_m:
                split_kernels(self._device)

    @property
    def _splits(self) -> bool:
        return self._options.mode.startswith("split") and self._comm.world_size > 1

    @property
    def _fuses(self) -> bool:
        return self._options.mode.startswith("fused")

    @property
    def _fused_fp8(self) -> bool:
        return self._fuses and self._options.gather_dtype == "fp8" and self._comm.world_size > 1

    def _tile_rows(self, m: int) -> int:
        """A product alone has all rows as one slice."""
        return _tile_rows(m, self._comm.world_size if self._fuses else 1)

    def _ctas(self) -> int:
        """An even share of the SMs: all CTAs of all ranks on a device must be resident at once."""
        properties = torch.cuda.get_device_properties(self._comm.device)
        sharing = self._comm.all_gather(str(properties.uuid)).count(str(properties.uuid))
        return max(2, properties.multi_processor_count // sharing // 2 * 2)

    # ---- the way of a call ----

    def _way(self, plan: Plan) -> Way:
        options, fp8 = plan.options, self._options.gather_dtype == "fp8"
        scatter = "ce" if options.mode == "fused-sdma" else "lsa"
        gather = "ce" if options.gather_transport == "sdma" else "lsa"
        if "ce" in (scatter, gather):  # few large copies: each costs some 7 us beside its bytes
            slice_rows, chunks = plan.problem.slice_rows, options.chunks or limits.DEFAULT_CHUNKS
            by_chunks = max(-(-slice_rows // chunks), limits.LEAST_CHUNK_ROWS)
            return Way(scatter, gather, fp8, options.band_rows or by_chunks, None)
        band_rows = options.band_rows or (limits.FP8_BAND_ROWS if fp8 else limits.BF16_BAND_ROWS)
        return Way(scatter, gather, fp8, band_rows, options.lag or limits.LAG)

    def _make(self, plan: Plan, operands: Operands) -> Prepared:
        m, options = plan.problem.m, self._options
        small = limits.small_m_way(m, self._comm.world_size, options)
        if small is not None or self._splits:
            product = self._call(plan, operands, alone=True, into="c")
            return Prepared(self._split(product, plan, small), small or options.mode, self._recorder)
        call = self._call(plan, operands, alone=not self._fuses, into="out")
        return Prepared(call, options.mode, self._recorder)

    def _call(self, plan: Plan, operands: Operands, *, alone: bool, into: str) -> Call:
        m, comm = plan.problem.m, self._comm
        way = Way() if alone else self._way(plan)
        tile_rows = _tile_rows(m, 1 if alone else comm.world_size)
        kernel = _kernel(self._options.quant, tile_rows, self._fused_fp8 and not alone, self._device)
        return Call(
            kernel,
            (m, self._layout.n, plan.problem.k),
            0 if alone else comm.rank,
            [self._bases[comm.rank]] if alone else self._bases,
            self._layout,
            operands,
            way,
            grid=self._grid,
            queues=self._queues,
            timeout_s=comm.timeout_s,
            fault=self._fault,
            into=into,
        )

    def _split(self, product: Call, plan: Plan, small: str | None) -> Split:
        options = plan.options
        return Split(
            product,
            self._layout,
            self._bases,
            self._comm.rank,
            split_kernels(self._device),
            one_stage=small == "one-stage",
            pulls=small is not None or options.gather_transport == "lsa",
            fp8=small is None and options.gather_dtype == "fp8",
            row_scale=options.gather_scale == "row",
            fuse_quantize=options.fuse_quantize,
            grid=self._grid,
            pull_grid=min(self._grid, options.pull_blocks or limits.DEFAULT_PULL_BLOCKS),
            fault=self._fault,
            timeout_s=self._comm.timeout_s,
        )

    def _prepare(self, plan: Plan, operands: Operands) -> Prepared:
        m = plan.problem.m
        prepared = self._prepared.get(m)
        if prepared is None:
            prepared = self._prepared[m] = self._make(plan, operands)
            if len(self._prepared) > PREPARED_KEPT:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(m)
            prepared.set_operands(operands)
        return prepared

    # ---- calls ----

    def run(
        self, plan: Plan, number: int, partials: Any, *, timed: bool = False
    ) -> tuple[torch.Tensor, list[Span]]:
        """(the finished rows, a view of the window; the phases if `timed`, else the host does not wait)."""
        core, m = self._comm.core, plan.problem.m
        core.check()  # what a kernel of an earlier call has left
        if not isinstance(partials, Partials):  # a self-test's constant
            partials = Gemm(plan.problem.n, plan.problem.k, self._options.quant, 0).constant(
                partials.value, m, self._comm.device
            )
        spans: list[Span] = []
        if m:
            with core.on_device():
                prepared = self._prepare(plan, partials.operands)
                if timed:
                    spans = self._timed(prepared)
                else:
                    prepared.launch(core.callers_stream())
        return self.output(m), spans

    def ready(self, plan: Plan, partials: Partials) -> Ready | None:
        """What calls with operands that look like these may use; None where they have to be copied first."""
        m = plan.problem.m
        if not m or not partials.direct:
            return None
        return Ready(self, plan, partials.operands)

    def ran(self, m: int) -> str:
        """Which way the last call of m rows went: the mode, or what a small call did instead."""
        prepared = self._prepared.get(m)
        return prepared.name if prepared else self._options.mode

    def _timed(self, prepared: Prepared) -> list[Span]:
        """One call, waited for, phase by phase."""
        marks = [("", _event())]
        prepared.launch_marked(
            self._comm.core.callers_stream(), lambda phase: marks.append((phase, _event()))
        )
        torch.cuda.synchronize(self._comm.device)
        end_ns = time.monotonic_ns()
        last = marks[-1][1]
        ends = [end_ns - int(event.elapsed_time(last) * 1e6) for _, event in marks]
        return [
            Span(phase, "phase", began, ended)
            for (phase, _), began, ended in zip(marks[1:], ends, ends[1:], strict=False)
        ]

    def output(self, m: int) -> torch.Tensor:
        """[m, n], a view of my part of the window."""
        return self._window.tensor((m, self._layout.n), torch.bfloat16, self._layout.offsets["out"])

    def poison(self, m: int) -> None:
        """Make sure that nothing an earlier call left can pass for a result."""
        self.output(m).fill_(float("nan"))
        torch.cuda.synchronize(self._comm.device)

    def close(self) -> None:
        """Calls under way still end. Twice is fine."""
        self._prepared.clear()
        with self._comm.core.on_device():
            self._recorder.close()
            self._queues.close()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Ready:
    """Calls whose operands look like checked ones: nothing is left to do but to say where they lie."""

    def __init__(self, runner: Runner, plan: Plan, operands: Operands) -> None:
        self.m: int = plan.problem.m
        self._runner, self._core, self._plan = runner, runner._comm.core, plan
        self._pitches = operands[4:]
        self._view = runner.output(self.m)

    def at(self, a: int, b: int, a_scale: int, b_scale: int) -> Callable[[int], Work] | None:
        """The call with operands at these addresses, as `Runner.run`, not timed. None: one of them lies
        where the kernel cannot read it."""
        if (a | b) & 15 or b_scale & 7:
            return None
        return functools.partial(self._run, Operands(a, b, a_scale, b_scale, *self._pitches))

    def _run(self, operands: Operands, number: int) -> Work:
        core = self._core
        core.check()
        with core.on_device():
            self._runner._prepare(self._plan, operands).launch(core.callers_stream())
        return self._view.detach(), ()
