"""The product as a launch: addresses, strides and tile sizes for the operands of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

from mori_gemm_ar.problem import Rows
from mori_gemm_ar.quant.quantize import blocks_of
from mori_gemm_ar.targets.triton import kernels

ROWS, COLUMNS = 128, 128
INTERPRETED = bool(triton.knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: int, num_warps: int = 4, **constants: Any) -> None:
    """Start a kernel over `grid` programs; over none, nothing."""
    if all(grid):
        kernel[grid](*arguments, **constants, num_warps=num_warps)


class Gemm:
    """The way to make one op's products."""

    def __init__(self, n: int, k: int, quant: str, max_band_rows: int) -> None:
        self.n, self.k, self.quant = n, k, quant

    def partials(
        self, a: torch.Tensor, b: torch.Tensor, a_grid: torch.Tensor, b_grid: torch.Tensor
    ) -> Partials:
        """This rank's partial sums, computed when they are asked for. Grids: see quant/operands.py."""
        return Partials(self, a, b, a_grid, b_grid)


@dataclass(frozen=True)
class Partials:
    """One call's operands."""

    gemm: Gemm
    a: torch.Tensor  # [m, k] e4m3fn
    b: torch.Tensor  # [n, k] e4m3fn
    a_grid: torch.Tensor
    b_grid: torch.Tensor

    def begin(self) -> None:
        """Nothing is prepared."""

    def store(self, rows: Rows, into: torch.Tensor) -> None:
        """into = this rank's partial sums, bf16 [m, n]; all rows at once."""
        quant, n, k = self.gemm.quant, self.gemm.n, self.gemm.k
        blocks = blocks_of(quant, "b")
        deep = 1 if quant == "ptpc" else 0  # one scale for all of k: its stride along k is 0
        launch(
            kernels.gemm,
            (-(-rows.height // ROWS), -(-n // COLUMNS)),
            *(x.data_ptr() for x in (self.a, self.b, self.a_grid, self.b_grid, into)),
            *(rows.height, n, k, self.a.stride(0), self.b.stride(0)),
            *(self.a_grid.stride(0), 0 if deep else self.a_grid.stride(1)),
            *(self.b_grid.stride(0), 0 if deep else self.b_grid.stride(1)),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            DEPTH=32 if quant == "mxfp8" else 128,
            SCALE_ROWS=blocks.rows,
            UE8M0=blocks.scale == "ue8m0",
            INTERPRETED=INTERPRETED,
            num_warps=8,
        )
