"""The op inside models: a function for compiled code, and the row-parallel layer.

functional.py   gemm_all_reduce: an operator of torch.library, which compilers take whole
linear.py       RowParallelLinear: weights quantised when loaded, activations when they come
watch.py        MORI_GEMM_AR_DEBUG_REL_L2: every call beside the unfused path
"""

from mori_gemm_ar.nn.functional import gemm_all_reduce, handle_of
from mori_gemm_ar.nn.linear import RowParallelLinear

__all__ = ["RowParallelLinear", "gemm_all_reduce", "handle_of"]
