"""Operands at the door: right format, right layout, or an error that says how to mend them.

What is accepted, and what a target gets to read:
    operand             accepted                                            target reads
    A, B                e4m3fn [M, K], [N, K]; unit stride along K,         itself, by its row stride
                        any row stride (a view into a padded buffer)
    A scale blockscale  fp32 [ceil(K/128), M] contiguous; or                [M, ceil(K/128)], strides (1, M)
                        [M, ceil(K/128)] with strides (1, M); or flat
                        K-block-major
    A scale ptpc        fp32 [M] or [M, 1]                                  [M, 1]
    A scale mxfp8       ue8m0 [M, ceil(K/32)], any strides                  itself
    B scale             the grid of its blocks (see quantize.py)            itself; ptpc: [N, 1]

Row-major [M, ceil(K/128)] is refused: there are quantisers that return K-block-major data under exactly that
shape, and taken the wrong way it runs and is wrong by a quarter (relL2 0.26), finite and plausible. When M
equals ceil(K/128) a contiguous square cannot be told apart, and is taken as [ceil(K/128), M].
"""

from __future__ import annotations

import torch
from mori_shmem.errors import LayoutError, UnsupportedShape

from mori_gemm_ar.quant.quantize import blocks_of

FP8 = torch.float8_e4m3fn
Looks = tuple[object, ...]


def looks_of(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> Looks:
    """All about operands that checks depend on, but for where they lie: equal looks pass equal checks."""
    try:
        return (
            *(a.shape, a.stride(), a.dtype, a.device),
            *(b.shape, b.stride(), b.dtype, b.device),
            *(a_scale.shape, a_scale.stride(), a_scale.dtype, a_scale.device),
            *(b_scale.shape, b_scale.stride(), b_scale.dtype, b_scale.device),
        )
    except AttributeError:  # no tensor: the checks will say so
        return ()


def check_codes(
    name: str, codes: torch.Tensor, columns: int, device: torch.device, rows: int | None = None
) -> None:
    """Raise unless `codes` is a [rows, columns] matrix of e4m3fn that can be read by its row stride."""
    _check_tensor(name, codes, " of float8_e4m3fn")
    if codes.dtype == torch.float8_e4m3fnuz:
        raise UnsupportedShape(
            f"{name} is float8_e4m3fnuz, this op computes with float8_e4m3fn: there the same byte is twice "
            "the value; convert it with mori_gemm_ar.convert_fnuz (its scales stay as they are)"
        )
    if codes.dtype != FP8:
        hint = (
            "; bytes of that format become it by .view(torch.float8_e4m3fn)"
            if codes.element_size() == 1
            else ""
        )
        raise UnsupportedShape(f"{name} is {codes.dtype}, allowed is torch.float8_e4m3fn{hint}")
    if codes.dim() != 2 or codes.shape[1] != columns or (rows is not None and codes.shape[0] != rows):
        wanted = f"[{'M' if rows is None else rows}, {columns}]"
        raise UnsupportedShape(f"{name} has shape {tuple(codes.shape)}, wanted {wanted}")
    if codes.numel() and codes.stride(1) != 1:
        raise LayoutError(
            f"{name} has strides {codes.stride()}: the stride along K must be 1 (any row stride will do); "
            f"pass {name}.contiguous()"
        )
    _check_device(name, codes, device)


def a_scale_grid(scale: torch.Tensor, quant: str, m: int, k: int, device: torch.device) -> torch.Tensor:
    """The scales of A as one [M, columns] grid, a view of what was given."""
    _check_tensor("a_scale", scale)
    _check_device("a_scale", scale, device)
    _, columns = blocks_of(quant, "a").grid(m, k)
    if quant == "mxfp8":
        return _ue8m0_grid("a_scale", scale, (m, columns))
    _check_fp32("a_scale", scale)
    if quant == "ptpc":
        return _column("a_scale", scale, m, "M")
    return _k_block_major(scale, m, columns)


def b_scale_grid(scale: torch.Tensor, quant: str, n: int, k: int, device: torch.device) -> torch.Tensor:
    """The scales of B as a grid of blocks, a view of what was given."""
    _check_tensor("b_scale", scale)
    _check_device("b_scale", scale, device)
    if quant == "mxfp8":
        return _ue8m0_grid("b_scale", scale, blocks_of(quant, "b").grid(n, k))
    _check_fp32("b_scale", scale)
    if quant == "ptpc":
        return _column("b_scale", scale, n, "N")
    grid = blocks_of(quant, "b").grid(n, k)
    if tuple(scale.shape) != grid:
        raise UnsupportedShape(
            f"b_scale has shape {tuple(scale.shape)}, wanted [ceil(N/128), ceil(K/128)] = {list(grid)}"
        )
    return scale


def _k_block_major(scale: torch.Tensor, m: int, k_blocks: int) -> torch.Tensor:
    """[M, K blocks] with strides (1, M) from the three accepted layouts."""
    accepted = (
        f"accepted are [ceil(K/128), M] = [{k_blocks}, {m}] contiguous, [{m}, {k_blocks}] with strides "
        f"(1, {m}), and {m * k_blocks} values flat, K-block-major"
    )
    shape = tuple(scale.shape)
    if shape == (k_blocks * m,) and (scale.is_contiguous() or not scale.numel()):
        return scale.view(k_blocks, m).t()
    if shape == (k_blocks, m) and _has_strides(scale, (m, 1)):
        return scale.t()
    if shape == (m, k_blocks) and _has_strides(scale, (1, m)):
        return scale
    if shape == (m, k_blocks) and _has_strides(scale, (k_blocks, 1)):
        raise LayoutError(
            f"a_scale is row-major [M, ceil(K/128)] = {list(shape)}, which is ambiguous: some quantisers "
            "return K-block-major data under this shape. If a_scale[m, kb] is the scale of row m, pass "
            "a_scale.t().contiguous(); if the memory already is K-block-major, pass a_scale.flatten()"
        )
    raise LayoutError(
        f"a_scale has shape {shape} and strides {scale.stride()}: {accepted}{_mend(shape, m, k_blocks)}"
    )


def _mend(shape: tuple[int, ...], m: int, k_blocks: int) -> str:
    """How scales of an accepted shape that lie in memory with gaps, or the other way round, are put right."""
    if shape in ((k_blocks, m), (k_blocks * m,)):
        return "; pass a_scale.contiguous()"
    if shape == (m, k_blocks):
        return "; if a_scale[m, kb] is the scale of row m, pass a_scale.t().contiguous()"
    return ""


def _has_strides(x: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether x lies in memory like that; the stride of a dimension of one element says nothing."""
    if x.numel() == 0:
        return True
    return all(
        size == 1 or have == want for size, have, want in zip(x.shape, x.stride(), strides, strict=True)
    )


def _column(name: str, scale: torch.Tensor, rows: int, letter: str) -> torch.Tensor:
    if tuple(scale.shape) not in ((rows,), (rows, 1)):
        raise UnsupportedShape(
            f"{name} has shape {tuple(scale.shape)}, wanted [{letter}] or [{letter}, 1] = [{rows}]"
        )
    return scale.reshape(rows, 1)


def _ue8m0_grid(name: str, scale: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise UnsupportedShape(
            f"{name} is {scale.dtype}, mxfp8 takes ue8m0: torch.uint8 or torch.float8_e8m0fnu"
        )
    if tuple(scale.shape) != grid:
        raise UnsupportedShape(f"{name} has shape {tuple(scale.shape)}, wanted {list(grid)}")
    return scale.view(torch.uint8)


def _check_tensor(name: str, x: object, kind: str = "") -> None:
    if not isinstance(x, torch.Tensor):
        raise UnsupportedShape(f"{name} is a {type(x).__name__}, wanted is a torch.Tensor{kind}")


def _check_fp32(name: str, scale: torch.Tensor) -> None:
    if scale.dtype != torch.float32:
        raise UnsupportedShape(f"{name} is {scale.dtype}, this quantisation takes torch.float32 scales")


def _check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device.type != device.type or (device.index is not None and x.device.index != device.index):
        raise UnsupportedShape(f"{name} is on {x.device}, this op runs on {device}")
