"""NVIDIA Hopper: dispatch and combine are one CUDA C++ kernel each (dispatch.cu, combine.cu), on the memory
of all ranks of a node, over torch's symmetric memory. Where to read first: protocol.cuh."""

from mori_ep.targets.cuda.layout import layout_for
from mori_ep.targets.cuda.limits import plan_for, why_not
from mori_ep.targets.cuda.runner import Runner

__all__ = ["Runner", "layout_for", "plan_for", "why_not"]
