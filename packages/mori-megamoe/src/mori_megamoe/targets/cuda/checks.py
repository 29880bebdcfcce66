"""What the cuda target sees in a call's ids before the call: nothing, they are on the device."""

from __future__ import annotations

import torch

from mori_megamoe.problem import Problem


def check_ids(ids: torch.Tensor, problem: Problem, *, mask: bool) -> None:
    """Kernels leave out ids of no expert, masked or not, and an expert that is in a token twice has two
    rows."""
