"""What this target can do, and the numbers that it was tuned to (2x H200, N=7168, K=2048, Nov 2026)."""

from __future__ import annotations

MAX_BAND_ROWS = 512  # of the plan; the kernel has bands of its own, see `Tuning`
ROW_MULTIPLE = 1  # the tensor maps end where the rows end
DEFAULT_PULL_BLOCKS = 1  # nothing is pulled in pieces here
MIN_K = 128
IDLE_OPTIONS: dict[str, str] = {}

# Rows of a band and how many bands local tiles stay behind remote ones; us at M = 4096, 8192, 16384:
#   bf16  512/3: 205 373 699   512/2: 208 370 701   512/1: 217 386 735   256/3: 210 379 707
#   fp8   256/3: 179 305 577   256/2: 186 314 584   512/2: 184 315 596   512/1: 187 321 600
BF16_BAND_ROWS, FP8_BAND_ROWS, LAG = 512, 256, 3
SHORT_SLICE = 512  # rows of the longest slice below which the 128-row tile wastes less


def why_not(n: int, k: int) -> str | None:
    """The reason why this target cannot compute [*, k] x [n, k], or None."""
    if n < 8 or n % 8:
        return f"n={n}: a multiple of 8 (16 bytes of output, what the copy engine of an SM can address)"
    if k < MIN_K:
        return f"k={k}: at least {MIN_K} (one block of scales)"
    return None
