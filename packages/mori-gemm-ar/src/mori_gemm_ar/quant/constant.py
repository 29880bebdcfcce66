"""Operands whose product is known without computing it, for the self-tests of targets that run kernels."""

from __future__ import annotations

import torch


def constant_operands(
    value: float, shape: tuple[int, int, int], quant: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, b, a_grid, b_grid) of [m, n, k] whose product is `value`, a whole number of at most 128."""
    m, n, k = shape
    a, b = torch.zeros(m, k, device=device), torch.ones(n, k, device=device)
    a[:, : int(value)] = 1
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    if quant == "blockscale":
        grids = torch.ones(k_blocks, m, device=device).t(), torch.ones(n_blocks, k_blocks, device=device)
    elif quant == "ptpc":
        grids = torch.ones(m, 1, device=device), torch.ones(n, 1, device=device)
    else:
        one, columns = 127, -(-k // 32)
        grids = (
            torch.full((m, columns), one, dtype=torch.uint8, device=device),
            torch.full((-(-n // 32), columns), one, dtype=torch.uint8, device=device),
        )
    return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), *grids
