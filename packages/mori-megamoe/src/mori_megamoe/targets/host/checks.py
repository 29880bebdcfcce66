"""What the host target sees in a call's ids: they are here, so they are looked at."""

from __future__ import annotations

import torch
from mori_shmem.errors import ArgumentError

from mori_megamoe.problem import Problem


def check_ids(ids: torch.Tensor, problem: Problem, *, mask: bool) -> None:
    """No expert twice in a token; ids of no expert only where they are masked."""
    ordered = ids.sort(1).values
    twice = (
        (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0) & (ordered[:, 1:] < problem.num_experts)
    )
    if twice.any():
        token, at = twice.nonzero()[0].tolist()
        raise ArgumentError(
            f"topk_ids[{token}] is {ids[token].tolist()}: expert {int(ordered[token, at + 1])} is there "
            f"twice. A token's experts are different ones; add up the weights and put -1 into the other slot"
        )
    if mask:
        return
    nowhere = ((ids < 0) | (ids >= problem.num_experts)).nonzero()
    if len(nowhere):
        token, slot = nowhere[0].tolist()
        raise ArgumentError(
            f"topk_ids[{token}, {slot}] is {int(ids[token, slot])}, experts are "
            f"0..{problem.num_experts - 1}, and mask_invalid_slots is off: such a slot would add whatever "
            "lay there before. Switch it on"
        )
