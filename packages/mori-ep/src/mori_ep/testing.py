"""The exact fixture RT: rows that name their origin, and experts whose answer is known.

Token t of rank r goes to experts (3t + 5j + 7r) mod E, j = 0..k-1, with weight 1 + (t + j) mod 2. Its row is
((t + 2h + 3r) mod 9) - 4, columns 0..5 replaced by r mod 16 and the base-16 digits of t, lowest first.
Experts are the identity times the weight, so that combine must give S(t) * x, S(t) being the sum of the
token's weights. All of these numbers, and all sums on the way, are whole and at most 225: exact in bf16.
"""

from __future__ import annotations

import torch

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.reference import RankInput

NAMED = 6  # columns that say where a row is from


def fixture(rank: int, tokens: int, topk: int, experts: int, hidden: int) -> RankInput:
    """What one rank brings: [tokens, hidden] bf16, ids and weights [tokens, topk]."""
    t = torch.arange(tokens)
    x = (t[:, None] + 2 * torch.arange(hidden) + 3 * rank) % 9 - 4
    x[:, 0] = rank % 16
    for digit in range(NAMED - 1):
        x[:, 1 + digit] = t // 16**digit % 16 if digit < NAMED - 2 else t // 16**digit
    j = torch.arange(topk)
    ids = ((3 * t[:, None] + 5 * j + 7 * rank) % experts).int()
    weights = (1 + (t[:, None] + j) % 2).float()
    return RankInput(x.bfloat16(), ids, weights)


def apply_experts(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, config: EpDispatchCombineConfig
) -> torch.Tensor:
    """What this rank's experts make of received rows: each slot with an expert here adds weight * row."""
    experts = config.num_experts_per_rank
    here = torch.div(ids, experts, rounding_mode="floor") == config.rank
    return (rows.float() * (weights * here).sum(1, keepdim=True)).to(rows.dtype)


def expected(given: RankInput, num_experts: int) -> torch.Tensor:
    """S(t) * x, slots without an expert left out."""
    assert given.weights is not None
    counted = given.weights * ((given.ids >= 0) & (given.ids < num_experts))
    return (given.x.float() * counted.sum(1, keepdim=True)).to(given.x.dtype)


def wrong_rows(got: torch.Tensor, want: torch.Tensor) -> list[int]:
    """The rows that are not equal, bit for bit but for the sign of 0."""
    return (got.float() != want.float()).any(1).nonzero().flatten().tolist()
