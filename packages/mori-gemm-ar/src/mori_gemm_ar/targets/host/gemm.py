"""The matrix product on a CPU: operands widened to fp32 with their scales applied, then one fp32 GEMM per
band.

B is widened once per call into the op's own scratch, A band by band, so that neither is ever there twice.
Within a band every product and sum is fp32; the result is rounded to bf16 once, where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mori_gemm_ar.problem import Rows
from mori_gemm_ar.quant.formats import E4m3Decoder, decode_ue8m0
from mori_gemm_ar.quant.quantize import Blocks, blocks_of

WIDEN_ROWS = 128  # of B at once: [7168, 2048] in 7.0 ms, 10.4 ms with 32


class Gemm:
    """Scratch for one op's products, and the way to make them."""

    def __init__(self, n: int, k: int, quant: str, max_band_rows: int) -> None:
        self._quant = quant
        self._b = torch.empty(n, k)
        self._a = torch.empty(max_band_rows, k)
        self._c = torch.empty(max_band_rows, n)
        self._decoder = E4m3Decoder(max(WIDEN_ROWS, max_band_rows), k)

    def partials(
        self, a: torch.Tensor, b: torch.Tensor, a_grid: torch.Tensor, b_grid: torch.Tensor
    ) -> Partials:
        """This rank's partial sums, computed as they are asked for. Grids: see quant/operands.py."""
        return Partials(self, a, b, a_grid, b_grid)

    def load_b(self, b: torch.Tensor, grid: torch.Tensor) -> None:
        """Widen B into the scratch."""
        blocks = blocks_of(self._quant, "b")
        for start in range(0, b.shape[0], WIDEN_ROWS):
            rows = torch.arange(start, min(start + WIDEN_ROWS, b.shape[0]))
            scales = grid.index_select(0, rows // blocks.rows)
            self._widen(b[start : start + WIDEN_ROWS], scales, blocks, self._b[start : start + WIDEN_ROWS])

    def store(self, a: torch.Tensor, grid: torch.Tensor, into: torch.Tensor) -> None:
        """into = bf16(a @ B^T) for the rows of one band."""
        rows = a.shape[0]
        self._widen(a, grid, blocks_of(self._quant, "a"), self._a[:rows])
        torch.mm(self._a[:rows], self._b.t(), out=self._c[:rows])
        into.copy_(self._c[:rows])

    def _widen(self, codes: torch.Tensor, scales: torch.Tensor, blocks: Blocks, out: torch.Tensor) -> None:
        """out = code * scale, fp32. scales  # [rows, column blocks], one row of it for each row of codes"""
        halves, nan = self._decoder.halves(codes)
        out.copy_(halves)
        factors = decode_ue8m0(scales) if blocks.scale == "ue8m0" else scales
        _scale_columns(out, factors * E4m3Decoder.UNIT, blocks.columns or out.shape[1])
        if nan is not None:
            out.masked_fill_(nan, torch.nan)


def _scale_columns(x: torch.Tensor, factors: torch.Tensor, width: int) -> None:
    """Multiply each run of `width` columns by its factor; the last run may be shorter."""
    whole = x.shape[1] // width
    x[:, : whole * width].view(-1, whole, width).mul_(factors[:, :whole, None])
    if whole * width < x.shape[1]:
        x[:, whole * width :].mul_(factors[:, whole:])


@dataclass(frozen=True)
class Partials:
    """One call's operands. After `begin`, `store` may be called for any rows in any order."""

    gemm: Gemm
    a: torch.Tensor  # [m, k] e4m3fn
    b: torch.Tensor  # [n, k] e4m3fn
    a_grid: torch.Tensor
    b_grid: torch.Tensor

    def begin(self) -> None:
        """What is done once per call."""
        self.gemm.load_b(self.b, self.b_grid)

    def store(self, rows: Rows, into: torch.Tensor) -> None:
        """into = this rank's partial sums of these rows, bf16."""
        self.gemm.store(self.a[rows.start : rows.stop], self.a_grid[rows.start : rows.stop], into)


@contextmanager
def full_fp32() -> Iterator[None]:
    """fp32 products inside, even where the program asked torch for less (set_float32_matmul_precision)."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before
