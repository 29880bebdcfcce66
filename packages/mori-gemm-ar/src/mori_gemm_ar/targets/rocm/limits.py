"""What this target can do, and the numbers that it was tuned to.

No figure here was measured by this project: there was no MI355X. Each says where it comes from;
docs/mi355x.md has the command that checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mori_gemm_ar.options import Options

MAX_BAND_ROWS = 256  # rows of the GEMM's largest tile: a chunk is a run of whole tiles
ROW_MULTIPLE = 1  # slices of any height: tiles end where a slice ends
MIN_K = 128
PACK = 8  # elements of a row that a lane moves at once

# 8x MI355X, M=16384, N=7168 (published for mori): 16 blocks 1261 us, 24 1091, 32 1006, 48 962, 64 959, 80
# 963, 128 1018, 256 1138, 512 1184. The grid limits how many remote reads are under way.
DEFAULT_PULL_BLOCKS = 64
# Same source: a sum of local slices wants the whole device, 4.9 TB/s with 256 blocks and 1.1 with 24 ...
LOCAL_BLOCKS = 256
# ... and one that reads its peers' memory no more than 24.
REMOTE_BLOCKS = 24
# Below this many bytes of the whole matrix every rank adds up everything itself: one meeting less. The figure
# is the order of magnitude at which public all-reduces of eight ranks change over; nobody has measured it
# here.
ONE_STAGE_BYTES = 128 * 1024

# 8x MI355X (published for mori): the knee of the number of puts per destination, see options.py.
DEFAULT_CHUNKS, DEFAULT_GATHER_SCALE = 8, "row"
PROFITABLE_M = 4096  # same source: below it a separate GEMM and all-reduce is as fast
_BANDS = "has no effect: a band is a row of the GEMM's tiles, and all remote bands go first"
_SMALL = "has no effect: nothing has been measured that would be faster for few rows"
IDLE_OPTIONS = {"band_rows": _BANDS, "lag": _BANDS, "small_m": _SMALL}


def profitable_m(gather_dtype: str | None) -> int:
    """Rows from which fusing pays."""
    return PROFITABLE_M


def refuses(chosen: Options, given: Mapping[str, Any]) -> list[str]:
    """The reasons against these options here."""
    if chosen.gather_scale == "1x128":
        return [
            "gather_scale='1x128' is not part of the rocm target, which quantises whole rows; leave it out"
        ]
    return []


def why_not(n: int, k: int) -> str | None:
    """The reason why this target cannot compute [*, k] x [n, k], or None."""
    if n < PACK or n % PACK:
        return f"n={n}: a multiple of {PACK} (16 bytes of a row, what a lane moves at once)"
    if k < MIN_K:
        return f"k={k}: at least {MIN_K} (one block of scales)"
    return None
