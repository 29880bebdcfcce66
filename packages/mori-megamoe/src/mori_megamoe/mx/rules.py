"""Which power of two a block of 32 values is divided by, and the codes that come out.

    quantize_input    rows that enter the layer, bf16 -> e4m3. "Round up": the smallest power of two at which
                      the largest magnitude is at most 448, taken from amax times the fp32 just above 1/448;
                      amax is at least 1e-10. Scaled magnitudes end in (224, 448], so nothing saturates.
    quantize_hidden   rows between the two GEMMs, fp32 -> e4m3. "Round half up": amax's power of two, the next
                      one from mantissa 1.5 on, less 8. No least amax. Scaled magnitudes end in [192, 384).
    quantize_partial  rows on their way back, fp32 -> e4m3. As the input, but with no least amax; a block of
                      zeros has the code 0, which here means the factor 0.
    quantize_weight   weights, -> packed e2m1. "Round up" to 6 instead of 448.

The rules give different bytes for the same numbers: each belongs to its place. A block that holds an infinity
or a NaN is all NaN afterwards: scale 255, codes 0x7F.
"""

from __future__ import annotations

import torch
from mori_shmem.arguments import described
from mori_shmem.errors import LayoutError

from mori_megamoe.mx.codes import (
    BLOCK,
    E4M3_NAN,
    E8M0_NAN,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
)

Quantized = tuple[torch.Tensor, torch.Tensor]  # codes [..., k] uint8, scales [..., k / 32] uint8

INPUT_LEAST_AMAX = 1e-10
_ABOVE_1_448 = 0x3B124925  # the fp32 bits of the least number above 1/448
_ABOVE_1_6 = 0x3E2AAAAB
_MANTISSA, _EXPONENT_SHIFT = 0x7FFFFF, 23


def quantize_input(x: torch.Tensor) -> Quantized:
    """bf16 (or fp32) [..., k]."""
    blocks, amax = _blocks(x)
    return _e4m3(blocks, _round_up(amax.clamp_min(INPUT_LEAST_AMAX), _ABOVE_1_448))


def quantize_partial(y: torch.Tensor) -> Quantized:
    """fp32 [..., k]."""
    blocks, amax = _blocks(y)
    return _e4m3(blocks, _round_up(amax, _ABOVE_1_448))


def quantize_hidden(h: torch.Tensor) -> Quantized:
    """fp32 [..., k]."""
    blocks, amax = _blocks(h)
    rounded = (amax.view(torch.int32) + 0x400000) & ~_MANTISSA
    scale = ((rounded >> _EXPONENT_SHIFT) - 8).clamp_min(0)
    return _e4m3(blocks, torch.where(amax.isfinite(), scale, E8M0_NAN))


def quantize_weight(w: torch.Tensor) -> Quantized:
    """fp32 or bf16 [..., k]; codes packed, [..., k / 2]."""
    blocks, amax = _blocks(w)
    scale = _round_up(amax, _ABOVE_1_6)
    codes = encode_e2m1((blocks * _inverse(scale)).flatten(-2))
    return pack_e2m1(codes), scale.to(torch.uint8)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 codes [..., k] and e8m0 scales [..., k / 32] as fp32."""
    return scaled(decode_e4m3(codes), decode_e8m0(scales))


def dequantize_partial(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same for partials, where the scale 0 is the factor 0."""
    factors = (scales.to(torch.int32) << _EXPONENT_SHIFT).view(torch.float32)
    factors = factors.masked_fill(scales == E8M0_NAN, torch.nan)
    return scaled(decode_e4m3(codes), factors)


def scaled(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[..., k] values, each block times its factor [..., k / 32]."""
    blocks = values.view(*factors.shape, BLOCK)
    return (blocks * factors[..., None]).view(values.shape)


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., k / 32, 32] and the largest magnitude of each block."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise LayoutError(f"{described(x)} is to be quantised: a tensor of floats is needed")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise LayoutError(f"{tuple(x.shape)} is to be quantised: rows of whole blocks of {BLOCK} are needed")
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return blocks, blocks.abs().amax(-1)


def _round_up(amax: torch.Tensor, above_one_nth: int) -> torch.Tensor:
    """int32 codes of the least power of two that is not below amax / n."""
    factor = torch.tensor(above_one_nth, dtype=torch.int32, device=amax.device).view(torch.float32)
    bits = (amax * factor).view(torch.int32)
    bump = (bits & _MANTISSA != 0).to(torch.int32)
    return ((bits >> _EXPONENT_SHIFT) + bump).clamp_max(E8M0_NAN)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """2^(127 - code), shaped to multiply blocks. No finite fp32 has a code above 253; 255 is NaN."""
    return ((254 - scale).clamp_min(0) << _EXPONENT_SHIFT).view(torch.float32)[..., None]


def _e4m3(blocks: torch.Tensor, scale: torch.Tensor) -> Quantized:
    codes = encode_e4m3((blocks * _inverse(scale)).contiguous())
    codes = torch.where(scale[..., None] == E8M0_NAN, E4M3_NAN, codes)
    return codes.flatten(-2), scale.to(torch.uint8)
