"""What a run is of: the layer's sizes, tokens, ranks, and what of that is refused before a rank starts.

v4_pro   model_dim 7168, inter_dim 3072, 384 experts, top-6     the two shapes in which others publish
flash    model_dim 4096, inter_dim 2048, 256 experts, top-6     figures; 2048, 4096 and 8192 tokens
neither  256, 256, 16 experts, top-4, 32 tokens                 what two cores do in a minute
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import mori_bench
from mori_bench.memory import MEMINFO
from mori_bench.options import at_least

from mori_megamoe.bench import routes
from mori_megamoe.problem import Problem

SWIGLU_LIMIT = 10.0
PUBLISHED_REPS = 30  # of one measurement, where a shape has a name


@dataclass(frozen=True)
class Shape:
    """Of the layer, without tokens and ranks."""

    model_dim: int
    inter_dim: int
    experts: int
    topk: int
    bs_list: tuple[int, ...]  # tokens of each rank, one measurement after the other


SHAPES = {
    "v4_pro": Shape(7168, 3072, 384, 6, (2048, 4096, 8192)),
    "flash": Shape(4096, 2048, 256, 6, (2048, 4096, 8192)),
}
SMALL = Shape(256, 256, 16, 4, (32,))
FREE = ("model_dim", "inter_dim", "experts", "topk")


@dataclass(frozen=True)
class Sizes:
    """All that inputs, layer and result lines follow from."""

    name: str  # of the shape; "free"
    problem: Problem
    bs_list: tuple[int, ...]
    routing: str
    hot_bias: float
    seed: int

    def shape_of(self, tokens: int) -> dict[str, int]:
        """As result lines have it."""
        p = self.problem
        return {
            "tokens": tokens,
            "model_dim": p.model_dim,
            "inter_dim": p.inter_dim,
            "experts": p.num_experts,
            "topk": p.topk,
            "max_tokens": p.max_tokens,
        }


class Unasked(int):
    """The default of --reps."""

    def __str__(self) -> str:
        return f"{int(self)}, with --shape {PUBLISHED_REPS}"


SMALL_REPS = Unasked(5)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    group.add_argument("--shape", choices=sorted(SHAPES), help="a shape that others publish figures for")
    for name, text in (
        ("tokens", f"of each rank ({SMALL.bs_list[0]})"),
        ("model-dim", f"of a row that enters ({SMALL.model_dim})"),
        ("inter-dim", f"of a row between the GEMMs ({SMALL.inter_dim})"),
        ("experts", f"of all ranks ({SMALL.experts})"),
        ("topk", f"experts of a token ({SMALL.topk})"),
    ):
        group.add_argument(f"--{name}", type=at_least(0 if name == "tokens" else 1), metavar="N", help=text)
    group.add_argument(
        "--bs-list", type=_numbers, metavar="N,N", help="tokens of each rank, one measurement for each"
    )
    group.add_argument(
        "--max-tokens",
        type=at_least(1),
        metavar="N",
        help="that the layer is made for (default: the next power of two)",
    )
    group.add_argument("--routing", choices=routes.NAMES, default="uniform", help=routes.HELP)
    group.add_argument(
        "--hot-bias", type=float, metavar="X", help="how hot, for hot-rank0 (1.0) and rank-balanced-hot (0.5)"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least(0)(word) for word in text.split(","))


def sizes_from(args: argparse.Namespace, world_size: int) -> Sizes:
    """Of the options, checked; raises ValueError for what no run could be of."""
    shape = SHAPES.get(args.shape, SMALL)
    given = {name: getattr(args, name) for name in FREE if getattr(args, name) is not None}
    if args.shape and given:
        raise ValueError(
            f"--shape {args.shape} and --{', --'.join(given).replace('_', '-')}: one or the other"
        )
    if args.bs_list is not None and args.tokens is not None:
        raise ValueError("--tokens and --bs-list: one or the other")
    bs_list = args.bs_list or ((args.tokens,) if args.tokens is not None else shape.bs_list)
    widths = {name: given.get(name, getattr(shape, name)) for name in FREE}
    problem = Problem(
        model_dim=widths["model_dim"],
        inter_dim=widths["inter_dim"],
        num_experts=widths["experts"],
        topk=widths["topk"],
        num_ranks=world_size,
        max_tokens=args.max_tokens or 1 << max(0, max(bs_list) - 1).bit_length(),
        swiglu_limit=SWIGLU_LIMIT,
    )
    problem.check()
    if max(bs_list) > problem.max_tokens:
        raise ValueError(f"{max(bs_list)} tokens and --max-tokens {problem.max_tokens}: at most that many")
    bias = routes.check(args.routing, args.hot_bias, problem)
    return Sizes(args.shape or "free", problem, bs_list, args.routing, bias, args.seed)


def memory_bytes(problem: Problem, num_stages: int) -> int:
    """Of all ranks together, about: windows, weights, rows between the GEMMs, the stages' slabs."""
    from mori_megamoe.layout import layout_for

    d, i, local = problem.model_dim, problem.inter_dim, problem.experts_per_rank
    weights = local * 3 * d * i * 17 // 32  # half a byte a value, and a scale for 32 of them
    slabs = num_stages * problem.max_tokens * problem.topk * problem.row_bytes
    hidden = problem.capacity_rows * i
    decoded = 2 * d * i * 8  # one expert, as float64
    return problem.num_ranks * (layout_for(problem).nbytes + weights + slabs + hidden + decoded)


def check_memory(problem: Problem, num_stages: int, meminfo: str = MEMINFO) -> None:
    """For ranks of this machine: raise ValueError where it cannot hold them."""
    free = mori_bench.free_bytes(meminfo)
    needed = memory_bytes(problem, num_stages)
    if needed > free:
        raise ValueError(
            f"{problem.num_ranks} ranks of this layer need about {needed / 2**30:.1f} GiB, this machine has "
            f"{free / 2**30:.1f} GiB free: fewer ranks, experts or tokens, or narrower rows"
        )


def reps_for(args: argparse.Namespace) -> int:
    """As asked for, else as many as published figures have, else few."""
    return PUBLISHED_REPS if args.shape and isinstance(args.reps, Unasked) else int(args.reps)
