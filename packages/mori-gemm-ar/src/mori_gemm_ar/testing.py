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
from mori_gemm_ar.quant.operands import a_scale_grid, b_scale_grid
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
    """One rank's arguments for the op, and the grids of their scales for the reference."""

    quant: str
    a: torch.Tensor  # [m, k] e4m3fn
    b: torch.Tensor  # [n, k] e4m3fn
    a_scale: torch.Tensor
    b_scale: torch.Tensor

    def exact(self) -> torch.Tensor:
        """This rank's partial sums in float64, [m, n]."""
        (m, k), (n, _) = self.a.shape, self.b.shape
        a_grid = a_scale_grid(self.a_scale, self.quant, m, k, self.a.device)
        b_grid = b_scale_grid(self.b_scale, self.quant, n, k, self.b.device)
        return reference.partial(self.a, self.b, a_grid, b_grid, self.quant)


def gx(m: int, n: int, k: int, rank: int, quant: str, *, turn: int = 0) -> Operands:
    """The operands of `rank`. `turn` changes B, for calls that must not repeat the last result."""
    row, column, output = torch.arange(m)[:, None], torch.arange(k), torch.arange(n)[:, None]
    a = ((column - row - 3 * (row // 128)) % 128 == 0).to(torch.float32)
    b = ((3 * output + 5 * column + 11 * rank + turn + output // 896) % 7 - 3).to(torch.float32)
    a_scale, b_scale = _scales("a", m, k, quant), _scales("b", n, k, quant)
    if quant == "blockscale":
        a_scale = a_scale.t().contiguous()
    return Operands(quant, a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), a_scale, b_scale)


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
    """The exact sum over all ranks in float64, [m, n]."""
    ranks = [gx(m, n, k, rank, quant, turn=turn) for rank in range(num_ranks)]
    b_grid = b_scale_grid(ranks[0].b_scale, quant, n, k, ranks[0].b.device)
    b = torch.stack([reference.dequantized(rank.b, b_grid, quant, "b") for rank in ranks]).sum(
        0
    )  # A is everyone's
    a = reference.dequantized(
        ranks[0].a, a_scale_grid(ranks[0].a_scale, quant, m, k, ranks[0].a.device), quant, "a"
    )
    return (a.to(torch.float32) @ b.to(torch.float32).t()).to(torch.float64)  # small numbers: exact in fp32
