"""Finished bf16 rows to fp8 and back, byte for byte as reference.fp8_wire: one scale per row, amax / 448."""

from __future__ import annotations

import torch

from mori_gemm_ar.quant.formats import E4m3Decoder
from mori_gemm_ar.quant.quantize import fp32_scales

BLOCK_BYTES = 512 * 1024  # of fp32 scratch: stays in a core's L2 between the passes over it


class Fp8Wire:
    """Narrows and widens rows, a cache-sized block at a time."""

    def __init__(self, n: int) -> None:
        self.block_rows = max(1, BLOCK_BYTES // (4 * n))
        self._values = torch.empty(self.block_rows, n)
        self._magnitudes = torch.empty(self.block_rows, n)
        self._decoder = E4m3Decoder(self.block_rows, n)

    def narrow(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """codes, scales = rows.  rows # [r, n] bf16, codes # [r, n] e4m3fn, scales # [r] fp32"""
        for start in range(0, rows.shape[0], self.block_rows):
            stop = min(start + self.block_rows, rows.shape[0])
            values = self._values[: stop - start].copy_(rows[start:stop])
            amax = torch.abs(values, out=self._magnitudes[: stop - start]).amax(dim=1)
            scales[start:stop] = fp32_scales(amax)
            codes[start:stop] = values.div_(scales[start:stop, None])

    def widen(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        """rows = codes * scales, the other way round."""
        for start in range(0, rows.shape[0], self.block_rows):
            stop = min(start + self.block_rows, rows.shape[0])
            halves, nan = self._decoder.halves(codes[start:stop])
            values = self._values[: stop - start].copy_(halves)
            values.mul_((scales[start:stop] * E4m3Decoder.UNIT)[:, None])
            if nan is not None:
                values.masked_fill_(nan, torch.nan)
            rows[start:stop] = values
