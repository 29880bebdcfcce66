"""Ranks that are processes of one machine: torch on the CPU, copies by the software engines of mori-shmem."""

from mori_gemm_ar.targets.host.gemm import Gemm
from mori_gemm_ar.targets.host.launch import Runner
from mori_gemm_ar.targets.host.limits import DEFAULT_PULL_BLOCKS, MAX_BAND_ROWS, ROW_MULTIPLE, why_not

__all__ = ["DEFAULT_PULL_BLOCKS", "MAX_BAND_ROWS", "ROW_MULTIPLE", "Gemm", "Runner", "why_not"]
