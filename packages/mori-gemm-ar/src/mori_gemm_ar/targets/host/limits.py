"""What this target can do, and the numbers that it was tuned to."""

from __future__ import annotations

MAX_BAND_ROWS = 64  # 2-core EPYC 9004, N=7168, K=2048: 69 GFLOP/s a core; 58 at 32 rows, 78 at 128, 86 at 256
ROW_MULTIPLE = 1  # slices of any height: no row is ever padded
DEFAULT_PULL_BLOCKS = 64
MIN_K = 128


def why_not(n: int, k: int) -> str | None:
    """The reason why this target cannot compute [*, k] x [n, k], or None."""
    if n < 1:
        return f"n={n}: at least 1"
    if k < MIN_K:
        return f"k={k}: at least {MIN_K} (one block of scales); other than that any n and k will do"
    return None
