"""What the readable kernels do, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mori_shmem.errors import UnsupportedShape

from mori_gemm_ar import layout
from mori_gemm_ar.layout import Layout
from mori_gemm_ar.options import Options

MODES = ("gemm-only", "split-lsa")
MAX_BAND_ROWS = layout.MAX_ROWS  # one launch computes all rows
ROW_MULTIPLE = 1
DEFAULT_PULL_BLOCKS = 1
DEFAULT_CHUNKS, DEFAULT_GATHER_SCALE = 1, "row"
MIN_K = 128
_UNFUSED = "has no effect: the Triton kernels run one after the other, each over all rows"
IDLE_OPTIONS = dict.fromkeys(("band_rows", "lag", "pull_blocks", "fuse_quantize", "small_m"), _UNFUSED)


def why_not(n: int, k: int) -> str | None:
    """The reason why these kernels cannot compute [*, k] x [n, k], or None."""
    if n < 1:
        return f"n={n}: at least 1"
    if k < MIN_K:
        return f"k={k}: at least {MIN_K} (one block of scales)"
    return None


def profitable_m(gather_dtype: str | None) -> int:
    """Nothing is fused here; from as many rows on as the target that is meant."""
    return 4096


def refuses(chosen: Options, given: Mapping[str, Any]) -> list[str]:
    """The reasons against these options here."""
    if chosen.gather_scale == "1x128":
        return ["gather_scale='1x128' is not part of the Triton kernels, which see whole rows"]
    return []


def layout_for(m_max: int, n: int, num_ranks: int, options: Options) -> Layout:
    """The host's layout: C, my finished slice as it is pulled, the output. Other modes are refused."""
    if options.mode not in MODES or options.gather_transport == "sdma":
        raise UnsupportedShape(
            f"mode={options.mode!r} with gather_transport={options.gather_transport!r} is not part of the "
            f"Triton kernels: they have {', '.join(MODES)}, pulled by lsa; choose one, or kernels='own'"
        )
    return layout.layout_for(m_max, n, num_ranks, options)
