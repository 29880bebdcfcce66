"""The codes of e4m3fn, e2m1 and e8m0: what each stands for, and the code of a value.

e4m3fn  sign, 4 bits of exponent (bias 7), 3 of mantissa: 0, 2^-9 .. 448; 0x7F and 0xFF are NaN, none infinite
e2m1    sign, 2 bits of exponent (bias 1), 1 of mantissa: 0, .5, 1, 1.5, 2, 3, 4, 6
e8m0    2^(code - 127), no sign; 255 is NaN

Decoding looks codes up in a table of all of them. Encoding rounds to nearest, ties to the even code, and
keeps subnormals; values beyond the largest become it.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from mori_megamoe.config import BLOCK as BLOCK

E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_NAN = 255
E4M3_NAN = 0x7F
_SIGN_E2M1 = 0x8


def e4m3_value(code: int) -> float:
    """What an e4m3fn code stands for."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1_value(code: int) -> float:
    """What an e2m1 code stands for."""
    return (-1.0 if code & _SIGN_E2M1 else 1.0) * E2M1_VALUES[code & 0x7]


def e8m0_value(code: int) -> float:
    """What an e8m0 code stands for. 0 is the subnormal 2^-127."""
    return math.nan if code == E8M0_NAN else 2.0 ** (code - 127)


@functools.cache
def _table(kind: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value_of = {"e4m3": e4m3_value, "e2m1": e2m1_value, "e8m0": e8m0_value}[kind]
    num_codes = 16 if kind == "e2m1" else 256
    return torch.tensor([value_of(c) for c in range(num_codes)], dtype=dtype, device=device)


def _looked_up(codes: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return _table(kind, dtype, codes.device)[codes.to(torch.int32)]


def decode_e4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 (or float8_e4m3fn) codes as floats of `dtype`; exact in bf16 and wider."""
    return _looked_up(codes.view(torch.uint8), "e4m3", dtype)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes 0..15, one a byte, as floats of `dtype`."""
    return _looked_up(codes, "e2m1", dtype)


def decode_e8m0(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes as floats of `dtype`."""
    return _looked_up(codes, "e8m0", dtype)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes of fp32 values."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


@functools.cache
def _e2m1_bounds(device: torch.device) -> torch.Tensor:
    """bounds[i]: the largest fp32 magnitude that still rounds to code i. A tie goes to the even one of i and
    i + 1."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES)]
    exact = torch.tensor(middles, dtype=torch.float32)
    below = torch.nextafter(exact, torch.zeros_like(exact))
    odd = torch.arange(len(middles)) % 2 == 1
    return torch.where(odd, below, exact).to(device)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of fp32 values, one a byte. A NaN has no code: give none."""
    magnitude = torch.searchsorted(_e2m1_bounds(values.device), values.abs().contiguous())
    sign = torch.signbit(values).to(torch.uint8) * _SIGN_E2M1
    return magnitude.to(torch.uint8) | sign


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """[..., k] codes as [..., k / 2] bytes: the even index in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[..., k / 2] bytes as [..., k] codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
