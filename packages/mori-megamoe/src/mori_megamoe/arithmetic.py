"""The layer's arithmetic for one expert's rows, in an order that is part of the definition. torch, CPU.

    matmul      each 32 wide dot product of codes is exact in float64 (28 bits); it is rounded to fp32 once,
                times the two scales, and added to an fp32 accumulator, K ascending
    exp2        a polynomial of fp32 products and sums, no library call
    swiglu      limits, then g * (1 / (1 + 2^(-g log2 e))) * u, in fp32, with a true division
    partial     an expert's row times the router's weight, as it travels back
    combine     slots 0, 1, ... added in fp32, rounded to bf16 once

Every output row depends on its own input row only: not on the rows around it, nor on how many threads there
are. So rows may lie in any tile and come in any order. A GPU has its own order inside `matmul` and its own
exp2, and therefore other bits, with the same property.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mori_megamoe import mx
from mori_megamoe.config import BLOCK

_LOG2_E = 1.4426950408889634
# 2^f for |f| <= 1/2, highest power first.
_EXP2 = (1.54035304e-4, 1.33335581e-3, 9.61812911e-3, 5.55041087e-2, 0.240226507, 0.693147182, 1.0)


class Matrix(NamedTuple):
    """An expert's weights, decoded."""

    values: torch.Tensor  # [n, k] fp64, what the codes stand for
    factors: torch.Tensor  # [n, k / 32] fp64, what the scales stand for


def matmul(codes: torch.Tensor, scales: torch.Tensor, w: Matrix) -> torch.Tensor:
    """[m, n] fp32 = rows of e4m3 codes [m, k] with e8m0 scales [m, k / 32], times w transposed."""
    rows = mx.decode_e4m3(codes, torch.float64)
    factors = mx.decode_e8m0(scales, torch.float64)
    out = torch.zeros(len(codes), len(w.values))
    for block in range(codes.shape[1] // BLOCK):
        k = slice(BLOCK * block, BLOCK * (block + 1))
        dot = (rows[:, k] @ w.values[:, k].T).float()
        # In float64, so that a product of scales that no fp32 holds is not lost before its time.
        out += (dot.double() * (factors[:, block, None] * w.factors[None, :, block])).float()
    return out


def exp2(x: torch.Tensor) -> torch.Tensor:
    """fp32; beyond the exponents of normal numbers, the outermost of them."""
    x = x.clamp(-126, 127)
    whole = torch.round(x)
    fraction = x - whole
    power = torch.full_like(fraction, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power = power * fraction + coefficient
    return power * ((whole.nan_to_num().to(torch.int32) + 127) << 23).view(torch.float32)


def swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """[m, i] fp32 of [m, 2i]: gate first."""
    g, u = gate_up.chunk(2, dim=1)
    if limit > 0:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * (1.0 / (1.0 + exp2(g * -_LOG2_E))) * u


def hidden_rows(codes: torch.Tensor, scales: torch.Tensor, w1: Matrix, limit: float) -> mx.rules.Quantized:
    """GEMM1, SwiGLU, and the codes and scales that GEMM2 reads."""
    return mx.quantize_hidden(swiglu(matmul(codes, scales, w1), limit))


def partial_rows(y: torch.Tensor, weights: torch.Tensor, form: str) -> torch.Tensor:
    """[m, partial bytes] uint8: rows of GEMM2, each times its weight [m] fp32."""
    weighted = y * weights[:, None]
    if form == "bf16":
        return weighted.to(torch.bfloat16).view(torch.uint8)
    return torch.cat(mx.quantize_partial(weighted), dim=1)


def read_partials(stored: torch.Tensor, model_dim: int, form: str) -> torch.Tensor:
    """[..., model_dim] fp32 of [..., partial bytes] uint8."""
    if form == "bf16":
        return stored.view(torch.bfloat16).float()
    return mx.dequantize_partial(stored[..., :model_dim], stored[..., model_dim:])


def combine(partials: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[n, d] bf16: the sum of [n, k, d] fp32 over the slots that are valid [n, k]. None valid: zeros."""
    out = torch.where(valid[:, 0, None], partials[:, 0], 0.0)
    for slot in range(1, partials.shape[1]):
        out = torch.where(valid[:, slot, None], out + partials[:, slot], out)
    return out.to(torch.bfloat16)
