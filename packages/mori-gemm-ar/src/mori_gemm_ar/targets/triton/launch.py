"""One call as a row of kernels, with two barriers between them:

    gemm      C = this rank's partial sums, rounded to bf16 once      (gemm-only: into the output; the end)
    barrier   all C are there
    reduce    staging = my slice of everybody's C, added in rank order  (fp8: then quantised into staging)
    barrier   all slices are there
    pull      output = every owner's staging

Barriers are mori-shmem's, in the order of the caller's work: on a GPU they are captured with it. C is
overwritten by the next call's gemm: its readers were done before this call's second barrier. Staging is
overwritten behind the next call's first barrier, which its readers reach when they have pulled. Ranks must
call with the same M: it is not compared here.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import mori_shmem
import torch
from mori_shmem.errors import TransportInert

from mori_gemm_ar.layout import Layout
from mori_gemm_ar.options import Options
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.settings import KERNELS
from mori_gemm_ar.targets.triton import kernels
from mori_gemm_ar.targets.triton.gemm import INTERPRETED, launch

_LOG = logging.getLogger("mori_gemm_ar")
_said: list[bool] = []
BLOCK = 1024  # elements of a program


class Runner:
    """One op's buffers on this rank, and the kernels that work on them."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        options: Options,
        m_max: int,
    ) -> None:
        if (comm.backend == "host") != INTERPRETED:
            raise TransportInert(
                f"kernels='triton' on the {comm.backend} backend with TRITON_INTERPRET="
                f"{int(INTERPRETED)}: the host needs it to be 1 when triton is imported, a GPU needs it unset"
            )
        if not _said and comm.rank == 0:
            _said.append(True)
            _LOG.warning("the Triton kernels were chosen (%s): nothing is fused", KERNELS.variable)
        self._comm, self._window, self._layout, self._options = comm, window, layout, options
        self._m_max, self._fp8 = m_max, options.gather_dtype == "fp8"
        num_elements = layout.slice_rows * layout.n if self._fp8 else 0
        self._sum = torch.empty(num_elements, dtype=torch.bfloat16, device=comm.device)  # what is quantised
        c = [address + layout.c.offset_bytes for address in window.addresses]
        self._c = torch.tensor(c, dtype=torch.int64, device=comm.device)  # everybody's, in rank order

    def run(
        self, plan: Plan, number: int, partials: Any, *, timed: bool = False
    ) -> tuple[torch.Tensor, list[Any]]:
        """(the finished rows, a view of the window; no spans: on a GPU the host does not wait)."""
        problem, options = plan.problem, plan.options
        into = self._rows("c" if options.communicates else "output", problem.m)
        with self._on_device():
            partials.begin()
            partials.store(problem.all_rows, into)
            if options.communicates:
                self._comm.stream_barrier()
                self._reduce(plan)
                self._comm.stream_barrier()
                for owner in plan.owners_from(self._comm.rank):
                    self._pull(plan, owner)
        return self._rows("output", problem.m), []

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return (
            torch.cuda.device(self._comm.device)
            if self._comm.device.type == "cuda"
            else contextlib.nullcontext()
        )

    def _rows(self, region: str, m: int) -> torch.Tensor:
        """[m, n] bf16 of my part."""
        offset = self._layout.regions()[region].offset_bytes
        return self._window.tensor((m, self._layout.n), torch.bfloat16, offset)

    def _address(self, rank: int, offset_bytes: int) -> int:
        return int(self._window.addresses[rank]) + offset_bytes

    def _reduce(self, plan: Plan) -> None:
        layout, rank, n = self._layout, self._comm.rank, self._layout.n
        mine = plan.problem.slice_of(rank)
        staging = self._address(rank, layout.staging.offset_bytes)
        first, elements = mine.start * n, mine.height * n
        launch(
            kernels.reduce,
            (-(-elements // BLOCK),),
            *(self._c.data_ptr(), first, self._sum.data_ptr() if self._fp8 else staging, elements),
            WORLD_SIZE=self._comm.world_size,
            BLOCK=BLOCK,
        )
        if self._fp8:
            scales = self._address(rank, layout.scales.offset_bytes)
            arguments = (self._sum.data_ptr(), staging, scales, n)
            launch(kernels.quantize, (mine.height,), *arguments, BLOCK=BLOCK)

    def _pull(self, plan: Plan, owner: int) -> None:
        layout, rows = self._layout, plan.problem.slice_of(owner)
        launch(
            kernels.pull,
            (rows.height, -(-layout.n // BLOCK)),
            *(self._address(owner, region.offset_bytes) for region in (layout.staging, layout.scales)),
            *(self._address(self._comm.rank, layout.output_row(rows.start)), layout.n),
            FP8=self._fp8,
            BLOCK=BLOCK,
        )

    def ready(self, plan: Plan, partials: Any) -> None:
        """Nothing is kept from call to call."""

    def ran(self, m: int) -> str:
        """Every call goes the op's own way."""
        return self._options.mode

    def close(self) -> None:
        """Nothing is held beside the window."""

    def poison(self, m: int) -> None:
        """Fill what a call of m rows writes with NaN, so that nothing old can pass for new."""
        self._rows("output", m).fill_(torch.nan)
        if self._options.communicates:
            self._rows("c", m).fill_(torch.nan)
        if self._comm.device.type == "cuda":
            torch.cuda.synchronize(self._comm.device)
