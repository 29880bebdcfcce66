"""What "right" means: the same call in float64, the same collective byte for byte, and how far off is too
far.

    exact        sum over ranks of dequantised A * dequantised B^T, all in float64
    byte for byte, from the ranks' bf16 partial sums:
                 their sum in fp32, added in rank order, rounded once to bf16; with the fp8 wire that bf16 row
                 is quantised (e4m3fn, scale = amax / 448 of what gather_scale says) and widened again: every
                 rank, the owner too, ends with the bf16 of code * scale
Tolerances come from the wire's dtype, k and the number of ranks, and only from here.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mori_gemm_ar.problem import SCALE_COLUMNS
from mori_gemm_ar.quant.quantize import (
    BLOCKS,
    SMALLEST_SCALE,
    blocks_of,
    dequantize_blocks,
    quantize_blocks,
)

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


def fp8_wire(rows: torch.Tensor, gather_scale: str | None = "row") -> torch.Tensor:
    """What becomes of finished bf16 rows that travel as fp8, byte for byte."""
    if gather_scale == "row":
        return dequantize_blocks(*quantize_blocks(rows, ROW_BLOCKS), ROW_BLOCKS).to(torch.bfloat16)
    (m, n), columns = rows.shape, SCALE_COLUMNS
    values = torch.nn.functional.pad(rows.float(), (0, -n % columns)).view(m, -1, columns)
    scales = values.abs().amax(2, keepdim=True).div_(448)
    inverses = torch.where(scales >= SMALLEST_SCALE, 1 / scales, 0.0)  # a NaN is a NaN by its scale
    codes = (values * inverses).to(torch.float8_e4m3fn)
    return (codes.float() * scales).to(torch.bfloat16).view(m, -1)[:, :n].contiguous()


def fingerprint(x: torch.Tensor) -> str:
    """A digest of a contiguous CPU tensor's bytes: equal on two ranks exactly where the bits are."""
    data = (ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr()) if x.numel() else b""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Tolerance:
    """What a result may be off by. Each element by element * |want| + floor * rms(want)."""

    rel_l2: float
    element: float
    floor: float

    def times(self, factor: float) -> Tolerance:
        """Wider limits, for results that are rounded more often."""
        return Tolerance(self.rel_l2 * factor, self.element * factor, self.floor * factor)


def tolerance(gather_dtype: str, k: int, num_ranks: int) -> Tolerance:
    """The limits for one wire.

    bf16: rounding is off by 2^-8 of a value at most, by 1.66e-3 in the mean square; two roundings, of the
    partial sums and of their sum, make 2.35e-3. The partial sums of an element may be larger than their sum:
    each is 1 / sqrt(W) of the rms on average, so W of them allow for 2^-8 * sqrt(W), and twice that plus 2
    for the largest of millions. fp8: 3 mantissa bits, 2^-4 of a value at most, 2.65e-2 in the mean square.
    fp32 accumulation adds k * 2^-24.
    """
    accumulation = k * 2.0**-24
    floor = 2.0**-8 * (2 + 2 * math.sqrt(num_ranks)) + accumulation
    if gather_dtype == "fp8":
        return Tolerance(rel_l2=3e-2 + accumulation, element=2.0**-4 + 2.0**-7, floor=floor + 2.0**-8)
    return Tolerance(rel_l2=4e-3 + accumulation, element=2.0**-8, floor=floor)


@dataclass(frozen=True)
class Errors:
    """How some rows of a result compare with the exact ones. Those of several parts can be pooled."""

    square_error: float
    square_want: float
    worst_element: float  # largest error as a fraction of what is allowed for that element
    non_finite: int

    @staticmethod
    def pool(parts: Sequence[Errors]) -> Errors:
        """Of all parts together."""
        return Errors(
            sum(part.square_error for part in parts),
            sum(part.square_want for part in parts),
            max((part.worst_element for part in parts), default=0.0),
            sum(part.non_finite for part in parts),
        )

    @property
    def rel_l2(self) -> float:
        """Norm of the error over the norm of what is wanted; 0 where both are zero."""
        if not math.isfinite(self.square_error):
            return math.inf
        if self.square_want == 0:
            return 0.0 if self.square_error == 0 else math.inf
        return math.sqrt(self.square_error / self.square_want)

    def within(self, allowed: Tolerance) -> bool:
        """Whether the result passes: as a whole, and in every element."""
        return self.non_finite == 0 and self.rel_l2 <= allowed.rel_l2 and self.worst_element <= 1.0


def errors_of(
    got: torch.Tensor, want: torch.Tensor, allowed: Tolerance, *, rms: float | None = None
) -> Errors:
    """Compare rows of a result. `rms` is that of the whole exact result, where `want` is only a part of it.

    Every element is bounded, and not only the whole, so that two exchanged columns of thousands are seen.
    """
    got, want = got.to(torch.float64), want.to(torch.float64)
    if want.numel() == 0:
        return Errors(0.0, 0.0, 0.0, 0)
    rms = want.square().mean().sqrt().item() if rms is None else rms
    bound = want.abs().mul_(allowed.element).add_(allowed.floor * rms)
    error = (got - want).abs_()
    worst = (error / bound.clamp_(min=torch.finfo(torch.float64).tiny)).max().item()
    return Errors(
        error.square().sum().item(),
        want.square().sum().item(),
        worst if math.isfinite(worst) else math.inf,
        int((~torch.isfinite(got)).sum()),
    )


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """The relative error of a whole result in the mean square."""
    difference = got.to(torch.float64) - want.to(torch.float64)
    square_want = want.to(torch.float64).square().sum().item()
    return Errors(difference.square().sum().item(), square_want, 0.0, 0).rel_l2
