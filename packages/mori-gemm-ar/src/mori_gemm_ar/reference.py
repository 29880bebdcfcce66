"""What "right" means: the same call in float64, the same collective byte for byte, and how far off is too
far.

    exact        sum over ranks of dequantised A * dequantised B^T, all in float64
    byte for byte, from the ranks' bf16 partial sums:
                 their sum in fp32, added in rank order, rounded once to bf16; with the fp8 wire that bf16 row
                 is quantised (e4m3fn, scale = amax / 448) and widened again: every rank, the owner too, ends
                 with the bf16 of code * scale
Tolerances come from the wire's dtype, k and the number of ranks, and only from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mori_gemm_ar.quant.quantize import BLOCKS, blocks_of, dequantize_blocks, quantize_blocks

ROW_BLOCKS = BLOCKS["ptpc", "a"]  # what the fp8 wire uses: one fp32 scale per row


def dequantized(codes: torch.Tensor, grid: torch.Tensor, quant: str, operand: str) -> torch.Tensor:
    """float64 values of an operand; `grid` holds one scale per block (see quant/operands.py)."""
    blocks = blocks_of(quant, operand)
    one = torch.full_like(grid, 127) if blocks.scale == "ue8m0" else torch.ones_like(grid)
    values = dequantize_blocks(codes, one, blocks).to(torch.float64)
    scales = dequantize_blocks(torch.ones_like(values).to(torch.float8_e4m3fn), grid, blocks)
    return values * scales.to(torch.float64)


def partial(
    a: torch.Tensor, b: torch.Tensor, a_grid: torch.Tensor, b_grid: torch.Tensor, quant: str
) -> torch.Tensor:
    """One rank's [M, N] product in float64."""
    return dequantized(a, a_grid, quant, "a") @ dequantized(b, b_grid, quant, "b").t()


def reduced(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """bf16 [M, N] from every rank's partial sums, byte for byte."""
    total = partials[0].to(torch.bfloat16).to(torch.float32)
    for part in partials[1:]:
        total = total + part.to(torch.bfloat16).to(torch.float32)
    return total.to(torch.bfloat16)


def fp8_wire(rows: torch.Tensor) -> torch.Tensor:
    """What becomes of finished bf16 rows that travel as fp8, byte for byte."""
    return dequantize_blocks(*quantize_blocks(rows, ROW_BLOCKS), ROW_BLOCKS).to(torch.bfloat16)


@dataclass(frozen=True)
class Tolerance:
    """What a result may be off by. Each element by element * |want| + floor * rms(want)."""

    rel_l2: float
    element: float
    floor: float


def tolerance(gather_dtype: str, k: int, num_ranks: int) -> Tolerance:
    """The limits for one wire.

    bf16: half an ulp is at most 2^-9 of a value, 1.66e-3 of it in the mean square; two roundings, of the
    partial sums and of their sum, make 2.35e-3. The partial sums may be larger than their sum: sqrt(W) times
    in the mean square, twice that where several large ones cancel. fp8: 3 mantissa bits, 2^-4 of a value at
    most, 2.5e-2 in the mean square. fp32 accumulation over k adds k * 2^-24 at most.
    """
    accumulation = k * 2.0**-24
    floor = 2.0**-9 * (1 + 2 * math.sqrt(num_ranks)) + accumulation
    if gather_dtype == "fp8":
        return Tolerance(rel_l2=3e-2 + accumulation, element=2.0**-4 + 2.0**-8, floor=floor + 2.0**-8)
    return Tolerance(rel_l2=4e-3 + accumulation, element=2.0**-8, floor=floor)


@dataclass(frozen=True)
class Verdict:
    """How a result compares with the exact one."""

    rel_l2: float
    worst_element: float  # largest error as a fraction of what is allowed for that element
    non_finite: int
    ok: bool


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the error over the norm of what is wanted; 0 where both are zero, inf where only `want` is."""
    error = torch.linalg.vector_norm(got.to(torch.float64) - want.to(torch.float64)).item()
    scale = torch.linalg.vector_norm(want.to(torch.float64)).item()
    return error / scale if scale else (0.0 if error == 0 else math.inf)


def compare(
    got: torch.Tensor, want: torch.Tensor, allowed: Tolerance, *, rms: float | None = None
) -> Verdict:
    """Judge rows of a result. `rms` is that of the whole exact result, where `want` is only a part of it.

    The error is bounded as a whole and for every element, so that two exchanged columns of thousands are
    seen.
    """
    got, want = got.to(torch.float64), want.to(torch.float64)
    non_finite = int((~torch.isfinite(got)).sum())
    if want.numel() == 0:
        return Verdict(0.0, 0.0, non_finite, non_finite == 0)
    rms = want.square().mean().sqrt().item() if rms is None else rms
    bound = want.abs().mul_(allowed.element).add_(allowed.floor * rms)
    error = (got - want).abs_()
    worst = (error / bound.clamp_(min=torch.finfo(torch.float64).tiny)).max().item()
    whole = rel_l2(got, want)
    return Verdict(whole, worst, non_finite, non_finite == 0 and whole <= allowed.rel_l2 and worst <= 1.0)
