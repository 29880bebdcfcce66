"""Ranks that are processes of one machine: torch on the CPU, copies by the software engines of mori-shmem."""

from mori_gemm_ar.layout import layout_for
from mori_gemm_ar.targets.host.gemm import Gemm
from mori_gemm_ar.targets.host.launch import Runner
from mori_gemm_ar.targets.host.limits import (
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
