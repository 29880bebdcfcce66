"""Quantisers: fp32 or bf16 in, e4m3fn codes and scales out, block by block; and the way back.

    quant        A                                      B
    blockscale   fp32, 1 x 128 -> [ceil(K/128), M]      fp32, 128 x 128 -> [ceil(N/128), ceil(K/128)]
    ptpc         fp32, a row   -> [M]                   fp32, a row     -> [N]
    mxfp8        ue8m0, 1 x 32 -> [M, ceil(K/32)]       ue8m0, 32 x 32  -> [ceil(N/32), ceil(K/32)]

A scale is amax / 448, so that the largest value of a block becomes the largest code; with ue8m0 it is the
smallest power of two that is not below that, so that nothing saturates. A code is the value divided by the
scale, rounded to nearest even. Blocks that need a rule of their own:
    all zero             scale 1, codes 0: never 0 / 0, and no kernel meets a scale of zero
    holds a NaN or Inf   scale NaN, codes NaN: the whole block, and nothing outside of it
    amax below 448*2^-126   scale 2^-126, the smallest normal number: denormal values become 0, not NaN
Blocks at the edge of a ragged matrix are smaller. Input with no rows gives codes and scales with no rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mori_gemm_ar.quant.formats import E4M3FN_MAX, UE8M0_BIAS, UE8M0_NAN, decode_ue8m0

SMALLEST_SCALE = 2.0**-126
_SMALLEST_EXPONENT = -126


@dataclass(frozen=True)
class Blocks:
    """How large one scale's block is; None along columns is the whole row."""

    rows: int
    columns: int | None
    scale: str  # "fp32" or "ue8m0"

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """How many blocks a [rows, columns] matrix has."""
        return -(-rows // self.rows), 1 if self.columns is None else -(-columns // self.columns)


BLOCKS = {
    ("blockscale", "a"): Blocks(1, 128, "fp32"),
    ("blockscale", "b"): Blocks(128, 128, "fp32"),
    ("ptpc", "a"): Blocks(1, None, "fp32"),
    ("ptpc", "b"): Blocks(1, None, "fp32"),
    ("mxfp8", "a"): Blocks(1, 32, "ue8m0"),
    ("mxfp8", "b"): Blocks(32, 32, "ue8m0"),
}


def blocks_of(quant: str, operand: str) -> Blocks:
    """The block shape of an operand, "a" or "b"; ValueError for anything unknown."""
    try:
        return BLOCKS[quant, operand]
    except KeyError:
        raise ValueError(
            f"quant={quant!r}, operand={operand!r}: allowed are blockscale, ptpc, mxfp8 and a, b"
        ) from None


def quantize(x: torch.Tensor, quant: str, operand: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a matrix, in the layout that the op takes for this operand.

    x       # [rows, K] bf16 or fp32
    codes   # [rows, K] e4m3fn
    scales  # as the table above says
    """
    codes, grid = quantize_blocks(x, blocks_of(quant, operand))
    if quant == "blockscale" and operand == "a":
        return codes, grid.t().contiguous()  # K-block-major: the only order that cannot be mistaken
    return codes, grid[:, 0].contiguous() if quant == "ptpc" else grid


def dequantize(codes: torch.Tensor, scales: torch.Tensor, quant: str, operand: str) -> torch.Tensor:
    """fp32 values of what `quantize` returned (or of operands laid out like that)."""
    if quant == "blockscale" and operand == "a":
        scales = scales.t()
    return dequantize_blocks(
        codes, scales.unsqueeze(1) if quant == "ptpc" else scales, blocks_of(quant, operand)
    )


def quantize_blocks(x: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [rows, columns], one scale per block [row blocks, column blocks]: fp32, or ue8m0 bytes)."""
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"a [rows, columns] matrix of bf16 or fp32 is quantised, not {tuple(x.shape)} {x.dtype}"
        )
    rows, columns = x.shape
    tiled, grid = _tiled(x.to(torch.float32), blocks), blocks.grid(rows, columns)
    amax = tiled.abs().amax(dim=(1, 3)) if x.numel() else torch.zeros(grid, device=x.device)
    scales, scale_bytes = _ue8m0_scales(amax) if blocks.scale == "ue8m0" else (fp32_scales(amax), None)
    tiled.div_(scales[:, None, :, None])
    codes = _untiled(tiled, rows, columns).to(torch.float8_e4m3fn)
    return codes, scales if scale_bytes is None else scale_bytes


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """fp32 values of codes under one scale per block."""
    factors = decode_ue8m0(scales) if blocks.scale == "ue8m0" else scales
    tiled = _tiled(codes.to(torch.float32), blocks)
    return _untiled(tiled.mul_(factors[:, None, :, None]), *codes.shape)


def fp32_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scale for each largest magnitude, by the rules at the top."""
    scales = (amax / E4M3FN_MAX).clamp_(min=SMALLEST_SCALE)
    scales.masked_fill_(amax == 0, 1.0)
    return scales.masked_fill_(~torch.isfinite(amax), torch.nan)


def _ue8m0_scales(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the scales in fp32, their bytes)."""
    mantissa, exponent = torch.frexp(amax / E4M3FN_MAX)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_(min=_SMALLEST_EXPONENT)
    exponent.masked_fill_(amax == 0, 0)
    exponent_bytes = (exponent + UE8M0_BIAS).masked_fill_(~torch.isfinite(amax), UE8M0_NAN).to(torch.uint8)
    return decode_ue8m0(exponent_bytes), exponent_bytes


def _tiled(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[row blocks, rows, column blocks, columns] fp32, zero where a block overhangs; always a copy."""
    rows, columns = x.shape
    num_rows, num_columns = blocks.grid(rows, columns)
    width = columns if blocks.columns is None else blocks.columns
    tiled = torch.zeros(num_rows * blocks.rows, num_columns * width, device=x.device)
    tiled[:rows, :columns] = x
    return tiled.view(num_rows, blocks.rows, num_columns, width)


def _untiled(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    num_rows, block_rows, num_columns, block_columns = tiled.shape
    return tiled.view(num_rows * block_rows, num_columns * block_columns)[:rows, :columns]
