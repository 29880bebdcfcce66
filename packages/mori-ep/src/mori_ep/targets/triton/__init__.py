"""The readable kernels, in Triton, for where no CUDA compiler is allowed: chosen by name, never fallen into.

    MORI_EP_KERNELS=triton, or EpDispatchCombineOp(..., kernels="triton")

On GPUs, or under Triton's interpreter (TRITON_INTERPRET=1) on the host. Rows, order, maps and bytes are those
of the other targets. IntraNode only, rows of combine in bf16 or fp32; all else is refused by name.
"""

from mori_ep.targets.triton.launch import Runner
from mori_ep.targets.triton.layout import layout_for
from mori_ep.targets.triton.limits import plan_for, why_not

__all__ = ["Runner", "layout_for", "plan_for", "why_not"]
