"""What this target can do, and the numbers that it was tuned to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mori_gemm_ar.options import Options

MAX_BAND_ROWS = 64  # two busy cores, N=7168, K=2048: 73 GFLOP/s a core; 55 at 32 rows, 82 at 128
ROW_MULTIPLE = 1  # slices of any height: no row is ever padded
DEFAULT_PULL_BLOCKS = 16  # M=1000, N=7168, fp8: as good as one piece; from 256 on the calls per piece show
MIN_K = 128
_BANDS = "has no effect: a band of the host is what one product computes, and all remote bands go first"
_SMALL = "has no effect: nothing is measured to be faster than the fused modes here"
IDLE_OPTIONS = {"band_rows": _BANDS, "lag": _BANDS, "small_m": _SMALL}


DEFAULT_CHUNKS, DEFAULT_GATHER_SCALE = 8, "row"  # chunks: as measured on 8x MI355X, see options.py


def profitable_m(gather_dtype: str | None) -> int:
    """8x MI355X, of whom this target is the stand-in: below it a separate GEMM and all-reduce is as fast."""
    return 4096


def refuses(chosen: Options, given: Mapping[str, Any]) -> list[str]:
    """The reasons against these options here."""
    if chosen.gather_scale == "1x128":
        return ["gather_scale='1x128' is not part of the host target, which sees whole rows; leave it out"]
    return []


def why_not(n: int, k: int) -> str | None:
    """The reason why this target cannot compute [*, k] x [n, k], or None."""
    if n < 1:
        return f"n={n}: at least 1"
    if k < MIN_K:
        return f"k={k}: at least {MIN_K} (one block of scales); other than that any n and k will do"
    return None
