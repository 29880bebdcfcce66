"""The 8-bit formats bit for bit, and a fast way from codes to fp32.

    format      sign exponent mantissa  bias   largest  0x80   0x7F   smallest
    e4m3fn      1    4        3         7      448      -0.0   NaN    2^-9
    e4m3fnuz    1    4        3         8      240      NaN    240    2^-10
    ue8m0       0    8        0         127    2^127    2^1    2^0    2^-127, 0xFF is NaN (scales only)

A byte of e4m3fn read as e4m3fnuz is half its value, finite and plausible: the ops of this package take e4m3fn
only and refuse e4m3fnuz by name. `convert_fnuz` is the way in for codes that a device made in that format.
"""

from __future__ import annotations

import math

import torch

E4M3FN_MAX = 448.0
E4M3FNUZ_MAX = 240.0
UE8M0_BIAS = 127
UE8M0_NAN = 255


def decode_table(name: str) -> tuple[float, ...]:
    """The value of each of the 256 bytes of a format, from its definition and nothing else."""
    if name == "ue8m0":
        return tuple(2.0 ** (byte - UE8M0_BIAS) if byte != UE8M0_NAN else math.nan for byte in range(256))
    if name not in ("e4m3fn", "e4m3fnuz"):
        raise ValueError(f"{name!r} is not a format: e4m3fn, e4m3fnuz, ue8m0")
    return tuple(_e4m3(byte, fnuz=name == "e4m3fnuz") for byte in range(256))


def _e4m3(byte: int, *, fnuz: bool) -> float:
    is_nan = byte == 0x80 if fnuz else byte & 0x7F == 0x7F
    if is_nan:
        return math.nan
    bias = 8 if fnuz else 7
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    magnitude = (
        mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    )
    return math.copysign(magnitude, -1.0 if byte & 0x80 else 1.0)


class E4m3Decoder:
    """Codes to fp32, several times faster than torch's own conversion, without allocating per call.

    A sign-extended code shifted left by 7 is the fp16 number of 2^-8 times its value: fp16's bias is 15 where
    e4m3fn's is 7, and subnormals keep their meaning. Only bit 14 has to be cleared of the sign, and the NaN
    codes, which would read as 480, told apart. [7168, 2048] on one core: 8 ms, against 46 ms for
    `.to(float32)`.
    """

    UNIT = 2.0**8  # what the fp16 reading has to be multiplied by: a scale takes it along at no cost

    def __init__(self, rows: int, columns: int) -> None:
        self._bits = torch.empty(rows, columns, dtype=torch.int16)
        self._magnitudes = torch.empty(rows, columns, dtype=torch.uint8)

    def halves(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(value / UNIT in fp16, overwritten by the next call; where the NaN codes are, None if nowhere).

        codes  # [rows, columns] e4m3fn, unit stride along columns; at most as many rows as this decoder has
        """
        bits, magnitudes = self._bits[: codes.shape[0]], self._magnitudes[: codes.shape[0]]
        torch.bitwise_and(codes.view(torch.uint8), 0x7F, out=magnitudes)
        has_nan = magnitudes.numel() > 0 and int(magnitudes.amax()) == 0x7F
        bits.copy_(codes.view(torch.int8))
        bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return bits.view(torch.float16), magnitudes == 0x7F if has_nan else None


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """The powers of two that scale bytes stand for, in fp32, of the same shape. 0xFF is NaN.

    By the bits of an fp32 exponent: torch.compile's C++ has no float8_e8m0fnu.
    """
    exponents = codes.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponents == 0, 0x00400000, exponents << 23)  # 2^-127 is a denormal number of fp32
    return torch.where(exponents == UE8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def convert_fnuz(codes: torch.Tensor) -> torch.Tensor:
    """e4m3fnuz codes as the e4m3fn codes of the same values; their scales stay as they are.

    Exact from 2^-6 upwards; below, e4m3fn's steps are 2^-9 and the value is rounded to the nearest of them.
    NaN stays NaN. (Halving the scales and keeping the bytes would be exact below, but 240 has no place above
    448 / 2.)
    """
    if codes.dtype != torch.float8_e4m3fnuz:
        raise ValueError(f"convert_fnuz takes float8_e4m3fnuz codes, not {codes.dtype}")
    return codes.to(torch.float32).to(torch.float8_e4m3fn)
