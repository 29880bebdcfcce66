"""The exact fixture GX(m, n, k, W, quant): operands whose partial sums are exact in bf16, in any order of
addition.

Row m of A has a 1 wherever (k - m - 3 * (m // 128)) is a multiple of 128, so that C picks out columns of B:
whole numbers from -3 to 3 that differ between neighbouring rows, columns, 128-tiles and ranks. Scales are 1
and 2 (ptpc: 1/2, 1, 2). With the bf16 wire the result is therefore the exact sum, rounded once, and any
exchange of two rows, columns, tiles or ranks shows. Needs k <= 2048.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mori_gemm_ar import reference
from mori_gemm_ar.quant.formats import UE8M0_BIAS
from mori_gemm_ar.quant.operands import FP8, a_scale_grid, b_scale_grid
from mori_gemm_ar.quant.quantize import blocks_of

# (m, n, k, W) -> for blockscale and ptpc: first element, last element, sum of magnitudes of the reduced
# output.
ANCHORS = {
    (17, 7168, 2048, 2): ((-14, -10, 783374), (-2.5, -10, 525312)),
    (129, 7168, 2048, 2): ((-14, 2, 5944323), (-2.5, 4, 4161024)),
    (1000, 7168, 2048, 2): ((-14, -1, 46080005), (-2.5, -1, 32237568)),
    (129, 384, 2048, 2): ((-14, 6, 318607), (-2.5, 12, 222912.5)),
    (129, 384, 2048, 8): ((-3, 7, 233691), (-1.5, 4, 148614.5)),
    (130, 320, 320, 2): ((-11, -12, 284307), (-1, -6, 207368.5)),
    (257, 576, 1024, 2): ((-11, 7, 697942), (-1, 2, 442850.5)),
    (128, 256, 256, 1): ((-3, -12, 154476), (-1.5, -6, 97756.5)),
}


@dataclass(frozen=True)
class Operands:
    """One rank's arguments for the op, and what they stand for."""

    quant: str
    a: torch.Tensor  # [m, k] e4m3fn
    b: torch.Tensor  # [n, k] e4m3fn
    a_scale: torch.Tensor
    b_scale: torch.Tensor

    def to(self, device: torch.device) -> Operands:
        """The same on a device; itself where it is there already."""
        tensors = (x.to(device) for x in (self.a, self.b, self.a_scale, self.b_scale))
        return Operands(self.quant, *tensors)

    def grids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of A and B, one per block."""
        (m, k), (n, _) = self.a.shape, self.b.shape
        return (
            a_scale_grid(self.a_scale, self.quant, m, k, self.a.device),
            b_scale_grid(self.b_scale, self.quant, n, k, self.b.device),
        )

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What A and B stand for, in float64."""
        a_grid, b_grid = self.grids()
        return (
            reference.dequantized(self.a, a_grid, self.quant, "a"),
            reference.dequantized(self.b, b_grid, self.quant, "b"),
        )

    def exact(self) -> torch.Tensor:
        """This rank's partial sums in float64, [m, n]."""
        a, b = self.values()
        return a @ b.t()


def gx(m: int, n: int, k: int, rank: int, quant: str, *, turn: int = 0) -> Operands:
    """The operands of `rank`. `turn` changes B, for calls that must not repeat the last result."""
    a_scale, b_scale = _scales("a", m, k, quant), _scales("b", n, k, quant)
    if quant == "blockscale":
        a_scale = a_scale.t().contiguous()
    return Operands(quant, _a(m, k).to(FP8), _b(n, k, rank, turn).to(FP8), a_scale, b_scale)


def _a(m: int, k: int) -> torch.Tensor:
    """A's values: 1 where (k - m - 3 * (m // 128)) % 128 == 0, of which there are 128 different rows."""
    row = torch.arange(m)
    rows = ((torch.arange(k) - torch.arange(128)[:, None]) % 128 == 0).to(torch.float32)
    return rows[(row + 3 * (row // 128)) % 128]


def _b(n: int, k: int, rank: int, turn: int) -> torch.Tensor:
    """B's values: (3n + 5k + 11 * rank + turn + n // 896) % 7 - 3, of which there are 7 different rows."""
    row = torch.arange(n)
    rows = ((5 * torch.arange(k) + torch.arange(7)[:, None]) % 7 - 3).to(torch.float32)
    return rows[(3 * row + 11 * rank + turn + row // 896) % 7]


def _scales(operand: str, rows: int, k: int, quant: str) -> torch.Tensor:
    if quant == "ptpc":
        row = torch.arange(rows)
        return torch.exp2((row % 3 - 1 if operand == "a" else row % 2).to(torch.float32))
    num_rows, num_columns = blocks_of(quant, operand).grid(rows, k)
    exponent = (torch.arange(num_rows)[:, None] + torch.arange(num_columns)) % 2
    if quant == "mxfp8":
        return (exponent + UE8M0_BIAS).to(torch.uint8)
    return torch.exp2(exponent.to(torch.float32))


def gx_sum(m: int, n: int, k: int, num_ranks: int, quant: str, *, turn: int = 0) -> torch.Tensor:
    """The exact sum over all ranks, [m, n]. A and both scales are everyone's, so one product is enough.

    In fp32, which is exact here: at most k / 128 terms, each a small number of halves.
    """
    a = _a(m, k).mul_(_spread(_scales("a", m, k, quant), "a", quant, m, k))
    b = torch.stack([_b(n, k, rank, turn) for rank in range(num_ranks)]).sum(0)
    b.mul_(_spread(_scales("b", n, k, quant), "b", quant, n, k))
    return (a @ b.t()).to(torch.float64)


def _spread(scales: torch.Tensor, operand: str, quant: str, rows: int, k: int) -> torch.Tensor:
    """One scale per element, or one per row."""
    if quant == "ptpc":
        return scales[:, None]
    blocks = blocks_of(quant, operand)
    values = torch.exp2(scales.to(torch.float32) - UE8M0_BIAS) if quant == "mxfp8" else scales
    return values.repeat_interleave(blocks.rows, 0)[:rows].repeat_interleave(blocks.columns or k, 1)[:, :k]


def gx_want(
    m: int,
    n: int,
    k: int,
    num_ranks: int,
    quant: str,
    gather_dtype: str | None = "bf16",
    *,
    turn: int = 0,
    gather_scale: str | None = "row",
) -> torch.Tensor:
    """What every rank must end with, bit for bit."""
    rounded = gx_sum(m, n, k, num_ranks, quant, turn=turn).to(torch.bfloat16)
    return reference.fp8_wire(rounded, gather_scale) if gather_dtype == "fp8" else rounded
