"""The cast that low-latency dispatch makes: e4m3fn, one fp32 scale for each 128 elements of a row."""

from __future__ import annotations

import torch

BLOCK = 128
LARGEST = 448.0  # of e4m3fn
SMALLEST_BLOCK = 1e-4  # a block of smaller values is scaled as if this were its largest


def cast_rows(x: torch.Tensor, *, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """([n, hidden] e4m3fn, [n, hidden / 128] fp32): x is their product. `round_scale`: powers of two."""
    n, hidden = x.shape
    blocks = x.float().view(n, hidden // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=2).clamp(min=SMALLEST_BLOCK) / LARGEST
    if round_scale:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (blocks / scales.unsqueeze(2)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(n, hidden), scales


def restore_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of [..., hidden] codes with [..., hidden / 128] scales."""
    blocks = codes.float().view(*scales.shape, BLOCK)
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


def pack_exponents(scales: torch.Tensor) -> torch.Tensor:
    """[..., s] powers of two as [..., s / 4] int32: four 8-bit exponents each, the first in the low byte."""
    exponents = (scales.view(torch.int32) >> 23).view(*scales.shape[:-1], scales.shape[-1] // 4, 4)
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=scales.device)
    return (exponents << shifts).sum(-1, dtype=torch.int32)
