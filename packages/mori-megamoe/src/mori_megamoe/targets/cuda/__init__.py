"""The cuda target, for Hopper. Its kernels are compiled and checked on any machine (tests/test_cuda_*.py);
not yet run on a GPU in this form.

Where to read: runner.py (a call), plan.cuh and combine.cu (the protocol), send.cuh, rows.cuh, gemm1.cu,
gemm2.cu, weights.py. Stage1 without a layer around it: stage1.py.
"""

from mori_megamoe.targets.cuda.checks import check_ids
from mori_megamoe.targets.cuda.runner import Runner
from mori_megamoe.targets.cuda.stages import CopyEngines, DirectStores

__all__ = ["CopyEngines", "DirectStores", "Runner", "check_ids"]
