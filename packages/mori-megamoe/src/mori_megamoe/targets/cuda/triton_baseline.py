"""What a user would write for GEMM1 without a kernel of his own: a grouped Triton kernel with
`tl.dot_scaled`, which Triton emulates on Hopper. Weights row-major, fp32 sums rounded to bf16, no
epilogue."""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

# The fastest of six choices on an H200: 5129 us at 12288 rows of 7168, 48 experts of 6144.
ROWS, COLUMNS, DEPTH, WARPS, STAGES = 128, 128, 64, 4, 3


@triton.jit
def _grouped(
    x,
    x_scale,
    w,
    w_scale,
    expert_of,
    out,
    K: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tile, column = tl.program_id(0) // (N // BN), tl.program_id(0) % (N // BN)
    expert = tl.load(expert_of + tile).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    wide_rows, wide_columns = rows[:, None].to(tl.int64), columns.to(tl.int64)
    at_x = x + wide_rows * K + tl.arange(0, BK)[None, :]
    at_x_scale = x_scale + wide_rows * (K // 32) + tl.arange(0, BK // 32)[None, :]
    at_w = w + expert * (N * (K // 2)) + wide_columns[None, :] * (K // 2) + tl.arange(0, BK // 2)[:, None]
    at_w_scale = (
        w_scale
        + expert * (N * (K // 32))
        + wide_columns[:, None] * (K // 32)
        + tl.arange(0, BK // 32)[None, :]
    )
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(K // BK):
        total = tl.dot_scaled(
            tl.load(at_x), tl.load(at_x_scale), "e4m3", tl.load(at_w), tl.load(at_w_scale), "e2m1", total
        )
        at_x += BK
        at_w += BK // 2
        at_x_scale += BK // 32
        at_w_scale += BK // 32
    tl.store(out + wide_rows * N + columns[None, :], total.to(tl.bfloat16))


def grouped_dot_scaled(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    expert_of: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """x [rows, K] e4m3, x_scale [rows, K / 32]; w [E, N, K / 2], w_scale [E, N, K / 32]; out [rows, N] bf16;
    rows in tiles of ROWS, each of the expert that `expert_of` [tiles] says."""
    (rows, k), n = x.shape, w.shape[1]
    _grouped[(rows // ROWS * (n // COLUMNS),)](
        *(x, x_scale, w, w_scale, expert_of, out, k, n, ROWS, COLUMNS, DEPTH),
        num_warps=WARPS,
        num_stages=STAGES,
    )
