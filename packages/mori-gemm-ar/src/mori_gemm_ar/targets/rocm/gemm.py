"""Operands as the kernel reads them: where they lie, in which order, kept alive for the call.

What is taken as it is and what is copied first:
    a, b         K a multiple of 128, rows at multiples of 16 bytes: as they are; others into padded rows
    blockscale   a's scales [M, K blocks] with strides (1, M), b's [N blocks, K blocks]: as they are
    ptpc         contiguous fp32 of rows and of columns
    mxfp8        four scale bytes of a row, for 128 of k, are a word: as they are where K is a multiple of
                 128 and rows begin at multiples of 4 bytes; others into padded rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mori_gemm_ar.quant.constant import constant_operands
from mori_gemm_ar.targets.rocm.gemm_kernel import Product
from mori_gemm_ar.targets.rocm.tiles import TileShape

ROW_BYTES = 16  # what a lane of a DMA instruction moves at once
WORD = 4
BLOCK = 128
NUM_CUS = 256

# The largest come first. At 256x256 the sums of eight waves fill half of the registers that a CU has.
SHAPES = (TileShape(256, 256, 2), TileShape(128, 256, 2), TileShape(128, 128, 2), TileShape(64, 128, 2))


def shape_for(m: int, n: int, num_ranks: int) -> TileShape:
    """The largest tile that leaves no compute unit idle and is less than half empty, or the smallest."""
    slice_rows = -(-m // num_ranks)
    for shape in SHAPES[:-1]:
        tiles = num_ranks * -(-slice_rows // shape.rows) * -(-n // shape.cols)
        if tiles >= NUM_CUS and 2 * slice_rows > shape.rows and 2 * n > shape.cols:
            return shape
    return SHAPES[-1]


@dataclass(frozen=True)
class Partials:
    """One call's operands. `kept` holds what the addresses point to."""

    addresses: tuple[int, int, int, int]  # a, b, a's scales, b's scales
    sizes: tuple[int, int, int, int, int, int]  # m, k, and the pitches, in a Product's order
    kept: tuple[torch.Tensor, ...]

    @property
    def m(self) -> int:
        """Rows."""
        return self.sizes[0]

    def product(self, where: int) -> Product:
        """The kernel's arguments; `where` is for its wire."""
        make: Any = Product
        made: Product = make(*self.addresses, where, *self.sizes)
        return made


class Gemm:
    """The way to make them for one op."""

    def __init__(self, n: int, k: int, quant: str, max_band_rows: int) -> None:
        self._n, self._k, self._quant = n, k, quant

    def partials(
        self, a: torch.Tensor, b: torch.Tensor, a_grid: torch.Tensor, b_grid: torch.Tensor
    ) -> Partials:
        """This rank's partial sums, to be computed. Grids: see quant/operands.py."""
        a, b = _addressable(a), _addressable(b)
        prepare = {"blockscale": _blockscale, "ptpc": _ptpc, "mxfp8": _mxfp8}[self._quant]
        a_scale, a_scale_pitch, b_scale, b_scale_pitch = prepare(a_grid, b_grid)
        kept = a, b, a_scale, b_scale
        return Partials(
            (a.data_ptr(), b.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr()),
            (a.shape[0], padded(self._k), _pitch(a), _pitch(b), a_scale_pitch, b_scale_pitch),
            kept,
        )

    def constant(self, value: float, m: int, device: torch.device) -> Partials:
        """Partial sums that are `value` everywhere, a whole number of at most 128: for a self-test."""
        return self.partials(*constant_operands(value, (m, self._n, self._k), self._quant, device))


def padded(k: int) -> int:
    """The k that the kernel computes with: codes behind the caller's are zeros."""
    return -(-k // BLOCK) * BLOCK


def _pitch(codes: torch.Tensor) -> int:
    return codes.stride(0) if codes.shape[0] > 1 else padded(codes.shape[1])


def _addressable(codes: torch.Tensor) -> torch.Tensor:
    """`codes`, or a copy in rows that the kernel can take."""
    rows, columns = codes.shape
    aligned = codes.data_ptr() % ROW_BYTES == 0 and (rows <= 1 or codes.stride(0) % ROW_BYTES == 0)
    if aligned and columns % BLOCK == 0:
        return codes
    copy = torch.zeros(rows, padded(columns), dtype=torch.uint8, device=codes.device)
    copy[:, :columns].copy_(codes.view(torch.uint8))
    return copy.view(torch.float8_e4m3fn)


def _blockscale(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    a = a.t()  # [K blocks, M], unit stride along M
    a = a if a.stride(1) == 1 or a.shape[1] == 1 else a.contiguous()
    b = b if b.stride(1) == 1 or b.shape[1] == 1 else b.contiguous()
    return a, a.stride(0), b, b.stride(0)


def _ptpc(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    return a.reshape(-1).contiguous(), 0, b.reshape(-1).contiguous(), 0


def _mxfp8(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    a, b = _words(a), _words(b)
    return a, a.stride(0) // WORD, b, b.stride(0) // WORD


def _words(grid: torch.Tensor) -> torch.Tensor:
    """[rows, columns] scale bytes whose rows are whole words; bytes past k are scales of 1 for zeros."""
    columns = grid.shape[1]
    aligned = grid.data_ptr() % WORD == 0 and grid.stride(0) % WORD == 0 and grid.stride(1) == 1
    if aligned and columns % WORD == 0:
        return grid
    return torch.nn.functional.pad(grid, (0, -columns % WORD), value=127).contiguous()
