"""NVIDIA Hopper: one CUDA C++ kernel whose epilogue is the all-reduce (gemm.cu), over torch's symmetric
memory."""

from mori_gemm_ar.targets.cuda.gemm import Gemm
from mori_gemm_ar.targets.cuda.limits import (
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
from mori_gemm_ar.targets.cuda.runner import Runner, layout_for

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
