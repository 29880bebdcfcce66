"""Which experts the tokens of a bench go to. Any rank can make any rank's ids: they follow from the seed.

uniform             topk different experts, all equally likely
hot-rank0           the same, and the scores of rank 0's experts are higher by the bias
rank-balanced-hot   topk different ranks, all equally likely; on each its first expert, with the bias as
                    probability, else one of its others
rank-balanced-last  topk different ranks; on each its last expert
rank-mixed-skew     topk different ranks; on the lower half of them the first expert, on the others any of the
                    rest
one-rank-idle       uniform over the experts of all ranks but the last, which receives nothing
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mori_bench

from mori_megamoe.problem import Problem

if TYPE_CHECKING:
    import torch

NAMES = (
    "uniform",
    "hot-rank0",
    "rank-balanced-hot",
    "rank-balanced-last",
    "rank-mixed-skew",
    "one-rank-idle",
)
BIASES = {"hot-rank0": 1.0, "rank-balanced-hot": 0.5}  # by default
HELP = "where tokens go (default: uniform)"


def check(routing: str, bias: float | None, problem: Problem) -> float:
    """The bias; raises ValueError for what could not be made."""
    if bias is not None and routing not in BIASES:
        raise ValueError(f"--hot-bias {bias} with --routing {routing}: it is for {', '.join(BIASES)}")
    if bias is not None and not math.isfinite(bias):
        raise ValueError(f"--hot-bias {bias}: a finite number")
    if routing.startswith("rank-"):
        if problem.topk > problem.num_ranks:
            raise ValueError(
                f"--routing {routing}: a token's --topk {problem.topk} experts are on as many ranks, there "
                f"are {problem.num_ranks}"
            )
        if problem.experts_per_rank < 2:
            raise ValueError(f"--routing {routing} needs two experts on each rank")
        if routing == "rank-balanced-hot" and bias is not None and not 0 <= bias <= 1:
            raise ValueError(f"--hot-bias {bias}: for --routing {routing} a probability, 0 to 1")
    elsewhere = problem.num_experts - problem.experts_per_rank
    if routing == "one-rank-idle" and problem.topk > elsewhere:
        raise ValueError(f"--routing {routing}: --topk {problem.topk} of the {elsewhere} experts elsewhere")
    return bias if bias is not None else BIASES.get(routing, 0.0)


def slots_for(
    routing: str, problem: Problem, tokens: int, bias: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """([tokens, topk] int32 ids, [tokens, topk] fp32 weights that add up to 1) of one rank."""
    import torch

    if routing.startswith("rank-"):
        ids = _on_ranks(routing, problem, tokens, bias, generator)
        scores = torch.rand(tokens, problem.topk, generator=generator)
        return ids.to(torch.int32), scores.softmax(-1)
    scores = torch.randn(tokens, problem.num_experts, generator=generator)
    if routing == "hot-rank0":
        scores[:, : problem.experts_per_rank] += bias
    if routing == "one-rank-idle":
        scores[:, problem.num_experts - problem.experts_per_rank :] = -torch.inf
    top = scores.topk(problem.topk, dim=1)
    return top.indices.to(torch.int32), top.values.softmax(-1)


def _on_ranks(
    routing: str, problem: Problem, tokens: int, bias: float, generator: torch.Generator
) -> torch.Tensor:
    import torch

    shape, local = (tokens, problem.topk), problem.experts_per_rank
    rank = torch.rand(tokens, problem.num_ranks, generator=generator).topk(problem.topk, dim=1).indices
    other = torch.randint(1, local, shape, generator=generator)
    if routing == "rank-balanced-last":
        return rank * local + local - 1
    if routing == "rank-mixed-skew":
        hot = rank < problem.num_ranks // 2
    else:
        hot = torch.rand(shape, generator=generator) < bias
    return rank * local + torch.where(hot, 0, other)


def generator(seed: int, *purpose: object) -> torch.Generator:
    """For one purpose."""
    import torch

    return torch.Generator().manual_seed(mori_bench.seed_for(seed, *purpose))
