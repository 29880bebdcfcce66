"""What the readable kernels do, and what they refuse."""

from __future__ import annotations

import torch

from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.plan import NOTHING_SAID, FewTokens, Plan, Way

COMBINED = (torch.bfloat16, torch.float32)
INSTEAD = "is not part of the Triton kernels: kernels='own' (MORI_EP_KERNELS) has it"


def plan_for(config: EpDispatchCombineConfig, few: FewTokens = NOTHING_SAID) -> Plan:
    """Counts first, then every row to its place; rows are pulled home."""
    return Plan(Way.COUNTS, Way.PULL)


def why_not(config: EpDispatchCombineConfig, dispatch: torch.dtype, combine: torch.dtype) -> str | None:
    """The reason against a configuration here, or None."""
    if config.kernel_type is not EpDispatchCombineKernelType.IntraNode:
        return f"kernel_type {config.kernel_type.name} {INSTEAD}; they have IntraNode"
    if config.elastic:
        return f"elastic=True {INSTEAD}"
    if config.quant_type != "none":
        return f"quant_type {config.quant_type} {INSTEAD}; they have none"
    if combine not in COMBINED:
        return f"combine in {combine} {INSTEAD}; they add bfloat16 and float32"
    return None
