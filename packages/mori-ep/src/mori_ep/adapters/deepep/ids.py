"""Callers' expert ids as the op takes them."""

from __future__ import annotations

import torch


def expert_ids(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[n, k] int64 as int32. What no rank has stays so: a cast alone would make experts of large numbers."""
    return topk_idx.clamp(-1, num_experts).to(torch.int32).contiguous()
