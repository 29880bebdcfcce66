"""Weights: from floats to what the layer is given, and back to what one expert multiplies by.

logical    [experts of the rank, rows, columns]: codes packed two a byte, scales one a block, rows in order
stored     the same bytes in the order in which kernels read them (mx/layouts.py); this is what MegaMoE takes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, LayoutError

from mori_megamoe import checks, mx
from mori_megamoe.arithmetic import Matrix
from mori_megamoe.problem import Problem, check_widths


class LogicalWeights(NamedTuple):
    """One rank's experts. w1: gate rows first, then up."""

    w1: torch.Tensor  # [L, 2I, D / 2] uint8
    w1_scale: torch.Tensor  # [L, 2I, D / 32] uint8
    w2: torch.Tensor  # [L, D, I / 2] uint8
    w2_scale: torch.Tensor  # [L, D, I / 32] uint8


class StoredWeights(NamedTuple):
    """The same, stored: one run of bytes for each expert."""

    w1: torch.Tensor  # [L, I * D] uint8
    w1_scale: torch.Tensor  # [L, 2I * D / 32]
    w2: torch.Tensor  # [L, D * I / 2]
    w2_scale: torch.Tensor  # [L, D * I / 32]


def quantize_weights(w1: torch.Tensor, w2: torch.Tensor) -> LogicalWeights:
    """w1 [L, 2I, D] and w2 [L, D, I], bf16 or fp32."""
    for name, w in (("w1", w1), ("w2", w2)):
        checks.check_tensor(name, w, "of weights [experts, rows, columns]")
        if w.dim() != 3 or w.dtype not in (torch.bfloat16, torch.float32) or w.shape[2] % mx.BLOCK:
            raise LayoutError(
                f"{name} is {w.dtype} {tuple(w.shape)}: bf16 or fp32 [experts, rows, columns] is needed, "
                f"columns in whole blocks of {mx.BLOCK}"
            )
    experts, model_dim, inter_dim = w2.shape
    wanted = (experts, 2 * inter_dim, model_dim)
    if tuple(w1.shape) != wanted:
        raise LayoutError(
            f"w1 is {tuple(w1.shape)}, w2 {tuple(w2.shape)}: beside this w2, w1 must be {wanted}, gate rows "
            "first, then up"
        )
    return LogicalWeights(*mx.quantize_weight(w1.detach()), *mx.quantize_weight(w2.detach()))


def shuffle_weights(logical: LogicalWeights) -> StoredWeights:
    """What MegaMoE is given."""
    logical = LogicalWeights(*four_parts(logical, "what quantize_weights returns"))
    w2 = logical.w2
    if w2.dim() != 3:
        raise LayoutError(f"w2 is {tuple(w2.shape)}: [experts, model_dim, inter_dim / 2] is needed")
    check_widths(w2.shape[1], 2 * w2.shape[2])
    forms = _forms(w2.shape[1], 2 * w2.shape[2])
    named = list(zip(LogicalWeights._fields, logical, forms, strict=True))
    for name, part, form in named:
        checks.check_shape(name, part, torch.uint8, (len(w2), form.rows, form.columns), w2.device)
    return StoredWeights(*(form.shuffle(part) for _, part, form in named))


def four_parts(given: object, what: str) -> Sequence[torch.Tensor]:
    """w1, w1_scale, w2 and w2_scale, as a tuple or list of tensors."""
    if not isinstance(given, tuple | list) or len(given) != len(StoredWeights._fields):
        names = ", ".join(StoredWeights._fields)
        raise ArgumentError(f"weights are {described(given)}: {names} are needed, {what}")
    for name, part in zip(StoredWeights._fields, given, strict=True):
        checks.check_tensor(name, part, "of bytes")
    return given


def stored_weights(given: object, problem: Problem) -> StoredWeights:
    """The weights that a caller passes, in whatever shape, as one run of bytes for each expert; or
    ArgumentError."""
    given = four_parts(given, "what shuffle_weights returns")
    forms = _forms(problem.model_dim, problem.inter_dim)
    named = zip(StoredWeights._fields, given, forms, strict=True)
    return StoredWeights(*(_bytes_of(name, part, form, problem) for name, part, form in named))


def w1_of(stored: StoredWeights, problem: Problem, expert: int) -> Matrix:
    """[2I, D] of one of this rank's experts."""
    codes, scales, _, _ = _forms(problem.model_dim, problem.inter_dim)
    return _matrix(stored.w1[expert], stored.w1_scale[expert], codes, scales)


def w2_of(stored: StoredWeights, problem: Problem, expert: int) -> Matrix:
    """[D, I] of one of this rank's experts."""
    _, _, codes, scales = _forms(problem.model_dim, problem.inter_dim)
    return _matrix(stored.w2[expert], stored.w2_scale[expert], codes, scales)


def dequantized(matrix: Matrix) -> torch.Tensor:
    """[n, k] fp64."""
    return mx.rules.scaled(matrix.values, matrix.factors)


def _forms(model_dim: int, inter_dim: int) -> tuple[mx.Layout, mx.Layout, mx.Layout, mx.Layout]:
    return (
        mx.W1Bytes(2 * inter_dim, model_dim // 2),
        mx.W1Scales(2 * inter_dim, model_dim // mx.BLOCK),
        mx.W2Bytes(model_dim, inter_dim // 2),
        mx.W2Scales(model_dim, inter_dim // mx.BLOCK),
    )


def _matrix(codes: torch.Tensor, scales: torch.Tensor, form: mx.Layout, scale_form: mx.Layout) -> Matrix:
    values = mx.decode_e2m1(mx.unpack_e2m1(form.unshuffle(codes)), torch.float64)
    return Matrix(values, mx.decode_e8m0(scale_form.unshuffle(scales), torch.float64))


def _bytes_of(name: str, part: torch.Tensor, form: mx.Layout, problem: Problem) -> torch.Tensor:
    wanted = problem.experts_per_rank * form.nbytes
    if part.dtype.itemsize != 1 or part.numel() != wanted or not part.is_contiguous():
        raise LayoutError(
            f"{name} is {part.dtype} {tuple(part.shape)} with strides {part.stride()}: {wanted} bytes in one "
            f"run are needed, {form.nbytes} ({form.stored_rows} x {form.stored_columns}) for each of the "
            f"rank's {problem.experts_per_rank} experts, in the order that mori_megamoe.shuffle_weights makes"
        )
    return part.detach().view(torch.uint8).view(problem.experts_per_rank, form.nbytes)
