"""The cuda target, for Hopper. Its kernels are compiled and emulated on any machine (tests/test_cuda_*.py).
On 1 December 2026 they ran on an H200 for the first time: README.md says what has been seen there.

Where to read: runner.py (a call), plan.cuh, slots.cuh and combine.cu (the protocol), send.cuh, rows.cuh,
gemm1.cu, gemm2.cu, weights.py. Stage1 without a layer around it: stage1.py.
"""

from mori_megamoe.targets.cuda.checks import check_ids
from mori_megamoe.targets.cuda.runner import Runner
from mori_megamoe.targets.cuda.stages import CopyEngines, DirectStores

__all__ = ["CopyEngines", "DirectStores", "Runner", "check_ids"]
