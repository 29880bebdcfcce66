"""MORI_GEMM_AR_DEBUG_REL_L2=1: every call of a layer beside the unfused path, its relative error logged.

The unfused path shares nothing with the op but the operands: torch multiplies what they stand for in fp32,
the product is rounded to bf16, and mori-shmem's two-stage all-reduce adds the ranks up in a window of its
own. Both round where the other does, so that with the bf16 wire the difference is that of the order of
additions within a product, mostly none; a rank that is missing shows as 0.7 or so.

Rank 0 logs the largest error of all ranks, at WARNING. Calls cost many times as much, and wait for the host;
inside the capture of a CUDA graph, where the host cannot look, it says once that it does not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import mori_shmem
import torch
from mori_shmem.collectives import all_reduce_lsa, reduced_bytes

from mori_gemm_ar.op import GemmAllReduce
from mori_gemm_ar.quant.operands import a_scale_grid, b_scale_grid
from mori_gemm_ar.quant.quantize import blocks_of, dequantize_blocks
from mori_gemm_ar.reference import rel_l2, tolerance
from mori_gemm_ar.settings import DEBUG_REL_L2

_LOG = logging.getLogger("mori_gemm_ar")
_ALIGNMENT = 256
_watched: MutableMapping[GemmAllReduce, Unfused] = weakref.WeakKeyDictionary()
_said: set[str] = set()


@dataclass
class Unfused:
    """The window of one op's unfused path, as large as its largest call so far."""

    comm: mori_shmem.Communicator
    calls: int = 0
    window: mori_shmem.Window | None = field(default=None, repr=False)

    def sum_of(self, partial: torch.Tensor) -> torch.Tensor:
        """The ranks' bf16 partial sums added up. Collective."""
        out = torch.empty_like(partial)
        if self.comm.world_size == 1 or not partial.numel():
            return out.copy_(partial)
        nbytes = -(-partial.numel() * partial.element_size() // _ALIGNMENT) * _ALIGNMENT
        needed = nbytes + reduced_bytes(partial.numel(), self.comm.world_size)
        if self.window is None or self.window.nbytes < needed:
            if self.window is not None:
                self.comm.barrier()  # a peer may still read
                self.window.close()
            self.window = self.comm.alloc(needed)
        self.window.tensor(tuple(partial.shape), partial.dtype).copy_(partial)
        all_reduce_lsa(self.window, out, partials_offset_bytes=0, reduced_offset_bytes=nbytes)
        self.comm.barrier()  # the window may be overwritten, or closed
        return out


def watch(
    op: GemmAllReduce,
    result: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
) -> None:
    """Compare and log, if the setting says so. Collective then."""
    if not op.settings[DEBUG_REL_L2]:
        return
    if result.is_cuda and torch.cuda.is_current_stream_capturing():
        if "capture" not in _said:
            _said.add("capture")
            _LOG.warning("%s: calls that are captured in a graph are not compared", DEBUG_REL_L2.variable)
        return
    unfused = _watched.setdefault(op, Unfused(op.comm))
    unfused.calls += 1
    quant = op.options.quant
    a_grid = a_scale_grid(a_scale, quant, a.shape[0], op.k, op.comm.device)
    b_grid = b_scale_grid(b_scale, quant, op.n, op.k, op.comm.device)
    partial = values_of(a, a_grid, quant, "a") @ values_of(b, b_grid, quant, "b").t()
    rounded = partial.to(torch.bfloat16)
    want = unfused.sum_of(rounded) if op.options.communicates else rounded
    error = max(op.comm.all_gather(rel_l2(result, want)))
    if op.comm.rank == 0:
        allowed = tolerance(op.options.gather_dtype or "bf16", op.k, op.comm.world_size).rel_l2
        _LOG.warning(
            "%s call %d, M=%d: rel_l2 %.2e against the unfused path, %s %.1e",
            *(op.options.mode, unfused.calls, a.shape[0], error),
            *("within" if error <= allowed else "OUTSIDE", allowed),
        )


def values_of(codes: torch.Tensor, grid: torch.Tensor, quant: str, operand: str) -> torch.Tensor:
    """What codes under a grid of scales stand for, in fp32."""
    return dequantize_blocks(codes, grid, blocks_of(quant, operand))
