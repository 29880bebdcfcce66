"""Calls of one op on this rank: the fused ways are one kernel (launch.py), the split ones
that kernel for the product alone, and then the steps of split.py.
"""

from __future__ import annotations

import functools
from typing import Any

import mori_shmem
import torch
from mori_shmem.errors import UnsupportedShape
from mori_shmem.jit import build

from mori_gemm_ar.options import Options
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.targets.cuda import limits
from mori_gemm_ar.targets.cuda.gemm import Gemm, Partials
from mori_gemm_ar.targets.cuda.launch import Call, Kernel, Way
from mori_gemm_ar.targets.cuda.regions import Regions, regions_for
from mori_gemm_ar.targets.cuda.split import Split
from mori_gemm_ar.targets.cuda.variants import variant


def layout_for(m_max: int, n: int, num_ranks: int, options: Options) -> Regions:
    """The window's layout; see regions.py."""
    return regions_for(
        *[m_max, n, num_ranks, _tile_rows(m_max, num_ranks)],
        copies=options.uses_queues and options.mode.startswith("fused"),
        fp8=options.gather_dtype == "fp8",
        split=options.mode.startswith("split"),
        communicates=options.communicates,
    )


def _tile_rows(m_max: int, num_ranks: int) -> int:
    return 256 if -(-m_max // num_ranks) >= limits.SHORT_SLICE else 128


@functools.cache
def _kernel(quant: str, tile_rows: int, fp8: bool, device: int) -> Kernel:
    """One a process and device: the module stays loaded."""
    return Kernel(build(variant(quant, tile_rows, fp8_gather=fp8)), tile_rows, fp8)


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
        if options.gather_dtype == "fp8" and not options.mode.startswith("fused"):
            raise UnsupportedShape(
                f"mode={options.mode!r} with gather_dtype='fp8' is not part of the cuda target: "
                "quantising is in the fused kernel's epilogue; use mode='fused-lsa' or 'fused-sdma'"
            )
        self._comm, self._window, self._layout, self._options = comm, window, layout, options
        self._tile_rows = _tile_rows(m_max, comm.world_size)
        self._bases = list(window.addresses)
        self._grid = self._ctas()
        self._calls: dict[int, Call] = {}  # by m; a captured graph keeps its own copy of the arguments
        splits = options.mode.startswith("split") and comm.world_size > 1
        self._split = (
            Split(window, layout, comm.rank, pulls=options.gather_transport == "lsa") if splits else None
        )

    def _ctas(self) -> int:
        """An even share of the SMs: all CTAs of all ranks on a device must be resident at once."""
        properties = torch.cuda.get_device_properties(self._comm.device)
        sharing = self._comm.all_gather(str(properties.uuid)).count(str(properties.uuid))
        return max(2, properties.multi_processor_count // sharing // 2 * 2)

    def _way(self, plan: Plan) -> Way:
        m, options, fp8 = plan.problem.m, plan.options, self._options.gather_dtype == "fp8"
        scatter = "ce" if options.mode == "fused-sdma" else "lsa"
        gather = "ce" if options.gather_transport == "sdma" else "lsa"
        if "ce" in (scatter, gather):  # few large copies: each costs some 5 us beside its bytes
            slice_rows, chunks = -(-m // self._comm.world_size), options.chunks or 8
            chunk_rows = -(-slice_rows // chunks)
            return Way(scatter, gather, fp8, chunk_rows, None, 2 * (options.sdma_queues or 1))
        band_rows = options.band_rows or (limits.FP8_BAND_ROWS if fp8 else limits.BF16_BAND_ROWS)
        return Way(scatter, gather, fp8, band_rows, options.lag or limits.LAG)

    def _make_call(self, plan: Plan, partials: Partials) -> Call:
        m, options, layout, comm = plan.problem.m, self._options, self._layout, self._comm
        fused = options.mode.startswith("fused")
        way = self._way(plan) if fused else Way()
        fp8 = fused and way.fp8 and comm.world_size > 1
        kernel = _kernel(options.quant, self._tile_rows, fp8, comm.device.index or 0)
        return Call(
            kernel,
            (m, layout.n, partials.k),
            comm.rank if fused else 0,
            self._bases if fused else [self._bases[comm.rank]],
            layout,
            partials.operands,
            way,
            grid=self._grid,
            timeout_s=comm.timeout_s,
            fault=comm.core.record.address,
            into="c" if options.mode.startswith("split") and comm.world_size > 1 else "out",
        )

    def run(
        self, plan: Plan, number: int, partials: Any, *, timed: bool = False
    ) -> tuple[torch.Tensor, list[Any]]:
        """(the finished rows, a view of the window; no spans: the host does not wait for it)."""
        self._comm.core.check()  # what a kernel of an earlier call has left
        m = plan.problem.m
        if not isinstance(partials, Partials):  # a self-test's constant
            partials = Gemm(plan.problem.n, plan.problem.k, self._options.quant, 0).constant(
                partials.value, m, self._comm.device
            )
        if m:
            call = self._calls.get(m)
            if call is None:
                call = self._calls[m] = self._make_call(plan, partials)
            call.set_operands(partials.operands)
            stream = torch.cuda.current_stream(self._comm.device)
            call.launch(stream)
            if self._split is not None:
                self._split.run(m, stream.cuda_stream)
        return self.output(m), []

    def output(self, m: int) -> torch.Tensor:
        """[m, n], a view of my part of the window."""
        return self._window.tensor((m, self._layout.n), torch.bfloat16, self._layout.offsets["out"])

    def poison(self, m: int) -> None:
        """Make sure that nothing an earlier call left can pass for a result."""
        self.output(m).fill_(float("nan"))
        torch.cuda.synchronize(self._comm.device)
