"""What this target can do, and the numbers that it was tuned to (2x H200, N=7168, K=2048, Nov 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mori_gemm_ar.options import Options

MAX_BAND_ROWS = 512  # of the plan; the kernel has bands of its own, see `Way`
ROW_MULTIPLE = 1  # the tensor maps end where the rows end
DEFAULT_PULL_BLOCKS = 132  # split-lsa: blocks that pull
DEFAULT_GATHER_SCALE = "1x128"
MIN_K = 128

# Rows of a band and how many bands local tiles stay behind remote ones; us at M = 4096, 8192, 16384:
#   bf16  512/3: 205 373 699   512/2: 208 370 701   512/1: 217 386 735   256/3: 210 379 707
#   fp8   256/3: 179 305 577   256/2: 186 314 584   512/2: 184 315 596   512/1: 187 321 600
BF16_BAND_ROWS, FP8_BAND_ROWS, LAG = 512, 256, 3
# What copy engines take at a time; us at M = 4096, 8192, 16384 in chunks of 1024 / 2048 rows:
#   bf16  288/326 457/494 837/783     fp8  279/320 395/470 703/668
DEFAULT_CHUNKS, LEAST_CHUNK_ROWS = 4, 1024
SHORT_SLICE = 512  # rows of the longest slice below which the 128-row tile wastes less

# Rows from which a fused call is faster than anything unfused that was measured, and below which the sum in
# one stage is faster than fused; us (cuda_compare crossover, Nov 2026):
#   M                                 16     64    128    192    256    384    512   1024
#   fused-lsa, bf16                 33.1   36.4   38.0   40.0   43.0   51.5   54.0   84.6
#   fused-lsa, fp8 gather           37.3   40.8   40.1   39.8   42.8   55.3   55.2   89.8
#   own GEMM, one-stage             27.5   32.5   33.1   38.0   45.3   51.7   56.8   94.8
#   the best of cuBLAS + NCCL,
#   torch's one-shot, two-shot      23.2   28.0   33.2   37.0   40.4   50.1   56.4   99.2
PROFITABLE_M = {"bf16": 512, "fp8": 512}
SMALL_M_BELOW = 200

_PUSHES = (
    "cannot be honoured: in the fused modes the epilogue sums and sends each tile as it is; behind a split "
    "mode's reduction the copies start when it ends, whose end publishes every row"
)
IDLE_OPTIONS = {"fuse_reduce_push": _PUSHES, "gather_bands": _PUSHES, "publish": _PUSHES}


def refuses(chosen: Options, given: Mapping[str, Any]) -> list[str]:
    """The reasons against these options here."""
    reasons, fused = [], chosen.mode.startswith("fused")
    if fused and given.get("pull_blocks") is not None:
        reasons.append("pull_blocks has no effect: a fused call pushes its tiles; it is split-lsa that pulls")
    if fused and chosen.gather_scale == "row":
        reasons.append(
            "gather_scale='row' cannot be honoured: a tile is sent before the maximum of its rows is known; "
            "use gather_scale='1x128', or a split mode"
        )
    return reasons


def profitable_m(gather_dtype: str | None) -> int:
    """Rows from which fusing pays."""
    return PROFITABLE_M[gather_dtype or "bf16"]


def small_m_below(options: Options) -> int:
    """Calls of fewer rows are small; 0 where none is."""
    if options.small_m is None:
        return 0
    return options.small_m_below or SMALL_M_BELOW


def small_m_way(m: int, num_ranks: int, options: Options) -> str | None:
    """How a call of m rows is summed instead of fused; None: it is fused."""
    if num_ranks == 1 or m >= small_m_below(options):
        return None
    if options.small_m != "auto":
        return options.small_m
    # Two ranks: as many bytes as in two stages, a kernel less. W ranks: W / 2 times the bytes.
    return "one-stage" if num_ranks == 2 or m * num_ranks <= ONE_STAGE_ROWS else "two-stage"


ONE_STAGE_ROWS = 512  # all ranks' rows that one rank reads at most with more than two; not measured


def why_not(n: int, k: int) -> str | None:
    """The reason why this target cannot compute [*, k] x [n, k], or None."""
    if n < 8 or n % 8:
        return f"n={n}: a multiple of 8 (16 bytes of output, what the copy engine of an SM can address)"
    if k < MIN_K:
        return f"k={k}: at least {MIN_K} (one block of scales)"
    return None
