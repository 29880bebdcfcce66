"""Operands as the kernel reads them: where they lie, in which order, kept alive for the call.

What is taken as it is and what is copied first:
    a, b         rows at multiples of 16 bytes: as they are; others into padded rows
    blockscale   a's scales [M, K blocks] with strides (1, M), b's [N blocks, K blocks]: as they are
    ptpc         contiguous fp32 of rows and of columns
    mxfp8        four scale bytes of a row, for 128 of k, become one word: [K / 128, M] and [N / 32, K / 128]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mori_gemm_ar.quant.constant import constant_operands
from mori_gemm_ar.targets.cuda.launch import Operands

_ROW_BYTES = 16


@dataclass(frozen=True)
class Partials:
    """One call's operands. `kept` holds what `operands` points to."""

    operands: Operands
    kept: tuple[torch.Tensor, ...]
    m: int
    k: int
    direct: bool = False  # the operands are the caller's own, nothing was copied


class Gemm:
    """The way to make them for one op."""

    def __init__(self, n: int, k: int, quant: str, max_band_rows: int) -> None:
        self._n, self._k, self._quant = n, k, quant

    def partials(
        self, a: torch.Tensor, b: torch.Tensor, a_grid: torch.Tensor, b_grid: torch.Tensor
    ) -> Partials:
        """This rank's partial sums, to be computed. Grids: see quant/operands.py."""
        given = [x.data_ptr() for x in (a, b, a_grid, b_grid)]
        a, b = _addressable(a), _addressable(b)
        prepare = {"blockscale": _blockscale, "ptpc": _ptpc, "mxfp8": _mxfp8}[self._quant]
        a_scale, a_pitch, b_scale, b_pitch = prepare(a_grid, b_grid)
        operands = Operands(
            *[a.data_ptr(), b.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr()],
            *[a_pitch, b_pitch, a.stride(0) if a.shape[0] > 1 else _round_up(self._k), b.stride(0)],
        )
        direct = list(operands[:4]) == given
        return Partials(operands, (a, b, a_scale, b_scale), a.shape[0], self._k, direct)

    def constant(self, value: float, m: int, device: torch.device) -> Partials:
        """Partial sums that are `value` everywhere, a whole number of at most 128: for a self-test."""
        return self.partials(*constant_operands(value, (m, self._n, self._k), self._quant, device))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ROW_BYTES) * _ROW_BYTES


def _addressable(codes: torch.Tensor) -> torch.Tensor:
    """`codes`, or a copy in rows that a tensor map can address."""
    rows, columns = codes.shape
    if codes.data_ptr() % _ROW_BYTES == 0 and (rows <= 1 or codes.stride(0) % _ROW_BYTES == 0):
        return codes
    padded = torch.empty(rows, _round_up(columns), dtype=torch.uint8, device=codes.device)
    padded[:, :columns].copy_(codes.view(torch.uint8))
    return padded.view(torch.float8_e4m3fn)[:, :columns]


def _blockscale(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    a = a.t()  # [K blocks, M], unit stride along M
    a = a if a.stride(1) == 1 or a.shape[1] == 1 else a.contiguous()
    b = b if b.stride(1) == 1 or b.shape[1] == 1 else b.contiguous()
    return a, a.stride(0), b, b.stride(0)


def _ptpc(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    b = b.reshape(-1).contiguous()
    return a.reshape(-1).contiguous(), 0, b if b.data_ptr() % 8 == 0 else b.clone(), 0


def _mxfp8(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    a_words, b_words = _words(a).t().contiguous(), _words(b)
    return a_words, a_words.stride(0), b_words, b_words.stride(0)


def _words(grid: torch.Tensor) -> torch.Tensor:
    """[rows, K / 128] of four scale bytes each; bytes past k are scales of 1 for zeros."""
    padding = -grid.shape[1] % 4
    return torch.nn.functional.pad(grid, (0, padding), value=127).contiguous().view(torch.int32)
