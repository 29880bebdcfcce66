"""What this target can do, and the numbers that it was tuned to."""

from __future__ import annotations

MAX_BAND_ROWS = 64  # two busy cores, N=7168, K=2048: 73 GFLOP/s a core; 55 at 32 rows, 82 at 128
ROW_MULTIPLE = 1  # slices of any height: no row is ever padded
DEFAULT_PULL_BLOCKS = 16  # M=1000, N=7168, fp8: as good as one piece; from 256 on the calls per piece show
MIN_K = 128
_BANDS = "has no effect: a band of the host is what one product computes, and all remote bands go first"
IDLE_OPTIONS = {"band_rows": _BANDS, "lag": _BANDS}


def why_not(n: int, k: int) -> str | None:
    """The reason why this target cannot compute [*, k] x [n, k], or None."""
    if n < 1:
        return f"n={n}: at least 1"
    if k < MIN_K:
        return f"k={k}: at least {MIN_K} (one block of scales); other than that any n and k will do"
    return None
