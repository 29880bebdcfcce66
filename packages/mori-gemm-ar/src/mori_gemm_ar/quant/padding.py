"""Zero rows under A, for callers who keep buffers of whole tiles."""

from __future__ import annotations

import torch

from mori_gemm_ar.quant.formats import UE8M0_BIAS
from mori_gemm_ar.quant.operands import FP8, a_scale_grid


def pad_rows(
    a: torch.Tensor, a_scale: torch.Tensor, quant: str, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, a_scale) with zero rows up to a multiple; the very same tensors if there is nothing to add.

    The rows that are added have codes 0 and scales 1: they give rows of zeros.
    """
    m, k = a.shape
    padded_m = -(-m // multiple) * multiple
    if padded_m == m:
        return a, a_scale
    grid = a_scale_grid(a_scale, quant, m, k, a.device)
    codes = torch.zeros(padded_m, k, dtype=torch.uint8, device=a.device).view(FP8)
    codes[:m] = a
    one = UE8M0_BIAS if quant == "mxfp8" else 1
    scales = torch.full((grid.shape[1], padded_m), one, dtype=grid.dtype, device=grid.device).t()
    scales[:m] = grid
    if quant == "blockscale":
        return codes, scales.t()
    return codes, scales.contiguous() if quant == "mxfp8" else scales[:, 0].contiguous()
