"""The readable kernels, in Triton, for where no CUDA compiler is allowed: chosen by name, never fallen into.

    MORI_GEMM_AR_KERNELS=triton, or kernels="triton"

On GPUs, or under Triton's interpreter (TRITON_INTERPRET=1) on the host. Nothing is fused: modes gemm-only
and split-lsa, with the bf16 and the fp8 wire, pulled. All else is refused by name.
"""

from mori_gemm_ar.targets.triton.gemm import Gemm
from mori_gemm_ar.targets.triton.launch import Runner
from mori_gemm_ar.targets.triton.limits import (
    DEFAULT_CHUNKS,
    DEFAULT_GATHER_SCALE,
    DEFAULT_PULL_BLOCKS,
    IDLE_OPTIONS,
    MAX_BAND_ROWS,
    ROW_MULTIPLE,
    layout_for,
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
