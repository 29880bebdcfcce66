"""AMD MI355X (gfx950): FlyDSL kernels over mori-shmem's windows and device-initiated copy queues."""

from mori_gemm_ar.targets.rocm.gemm import Gemm
from mori_gemm_ar.targets.rocm.limits import DEFAULT_PULL_BLOCKS, MAX_BAND_ROWS, ROW_MULTIPLE, why_not
from mori_gemm_ar.targets.rocm.regions import layout_for
from mori_gemm_ar.targets.rocm.runner import Runner

__all__ = ["DEFAULT_PULL_BLOCKS", "MAX_BAND_ROWS", "ROW_MULTIPLE", "Gemm", "Runner", "layout_for", "why_not"]
