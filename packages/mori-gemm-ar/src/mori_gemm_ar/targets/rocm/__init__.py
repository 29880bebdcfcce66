"""AMD MI355X (gfx950): FlyDSL kernels over mori-shmem's windows and device-initiated copy queues."""

from mori_gemm_ar.targets.rocm.gemm import Gemm
from mori_gemm_ar.targets.rocm.limits import (
    DEFAULT_CHUNKS,
    DEFAULT_GATHER_SCALE,
    DEFAULT_PULL_BLOCKS,
    IDLE_OPTIONS,
    MAX_BAND_ROWS,
    ROW_MULTIPLE,
    profitable_m,
    refuses,
    why_not,
)
from mori_gemm_ar.targets.rocm.regions import layout_for
from mori_gemm_ar.targets.rocm.runner import Runner

__all__ = [
    "DEFAULT_CHUNKS",
    "DEFAULT_GATHER_SCALE",
    "DEFAULT_PULL_BLOCKS",
    "IDLE_OPTIONS",
    "MAX_BAND_ROWS",
    "ROW_MULTIPLE",
    "Gemm",
    "Runner",
    "layout_for",
    "profitable_m",
    "refuses",
    "why_not",
]
