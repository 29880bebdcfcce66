"""What the benches of several GPUs share: their options, tokens, order of measuring, statistic, and lines."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mori_shmem
import torch

from mori_megamoe.targets.cuda.bench import SHAPES, TOPK
from mori_megamoe.targets.cuda.layout import Shape
from mori_megamoe.targets.cuda.slots import SlotSizes

Phases = dict[str, float]  # microseconds, in order
Found = dict[str, list[Phases]]  # by way, of all repetitions
_WARMUP = 3


@dataclass(frozen=True)
class Options:
    """What all ranks are told."""

    shape: str
    body: str
    tokens: Sequence[int]
    experts_per_rank: int
    reps: int


def inputs_of(
    comm: mori_shmem.Communicator, tokens: int, model_dim: int, experts_per_rank: int
) -> list[torch.Tensor]:
    """(x, weights, ids) of this rank: distinct random experts."""
    generator = torch.Generator(comm.device).manual_seed(1234 + comm.rank)
    x = torch.randn(tokens, model_dim, device=comm.device, generator=generator).bfloat16()
    scores = torch.randn(tokens, experts_per_rank * comm.world_size, device=comm.device, generator=generator)
    top, ids = scores.topk(TOPK, dim=1)
    return [x, top.softmax(1), ids.to(torch.int32)]


def in_turns(cases: Mapping[str, Callable[[], Phases]], reps: int) -> Found:
    """All cases, forwards and backwards."""
    found: Found = {name: [] for name in cases}
    for repetition in range(_WARMUP + reps):
        for name in list(cases) if repetition % 2 else list(cases)[::-1]:
            phases = cases[name]()
            if repetition >= _WARMUP:
                found[name].append(phases)
    return found


def slowest(by_rank: Sequence[list[Phases]], names: Sequence[str]) -> float:
    """Per repetition the sum of these phases on the slowest rank; the median."""
    repetitions = zip(*by_rank, strict=True)
    slow = [max(sum(r[name] for name in names) for r in ranks) for ranks in repetitions]
    return float(statistics.median(slow))


def title(options: Options, world_size: int, tokens: int) -> str:
    each = f"{options.experts_per_rank} experts each"
    return f"{options.shape}, body {options.body}, {world_size} GPUs, {each}, {tokens} tokens"


def slots_line(options: Options, world_size: int, tokens: int) -> str:
    """What copy engines carry in a call, full or not."""
    model_dim, inter_dim, _ = SHAPES[options.shape]
    experts = options.experts_per_rank
    shape = Shape(
        *(world_size, model_dim, inter_dim, experts * world_size, TOPK),
        max_tokens=tokens,
        body=options.body,
    )
    sizes = SlotSizes.of(shape)
    even = tokens * TOPK * (world_size - 1) // world_size * shape.row_bytes / 1e6
    return (
        f"copies: {sizes.per_rank} slots of {sizes.experts} experts x {sizes.rows_for(tokens)} rows to each "
        f"rank, {sizes.sent_bytes(tokens) / 1e6:.0f} MB from a rank; an even router's rows are {even:.0f} MB"
    )


def result_line(
    op: str,
    options: Options,
    world_size: int,
    tokens: int,
    mode: str,
    us: float,
    phases: Phases,
    **more: float,
) -> str:
    """Of a way whose bytes were right: else the run has failed."""
    result: dict[str, Any] = {
        "op": op,
        "backend": "cuda",
        "world_size": world_size,
        "mode": mode,
        "shape": {
            "name": options.shape,
            "tokens": tokens,
            "experts_per_rank": options.experts_per_rank,
        },
        "body": options.body,
        "max_rank_time_us": round(us, 1),
        "phases_us": {name: round(phase_us, 1) for name, phase_us in phases.items()},
        **more,
        "mismatched_rows": 0,
        "validated": True,
        "reps": options.reps,
    }
    return "RESULT_JSON " + json.dumps(result)


def run(
    description: str,
    bench_rank: Callable[[Options], list[Found]],
    report: Callable[[Options, int, int, Sequence[Found]], None],
    argv: list[str] | None,
) -> int:
    """The exit status: 0, all ways gave the same bytes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="v4_pro")
    parser.add_argument("--body", choices=("R", "A"), default="R")
    parser.add_argument("--tokens", default="2048,4096,8192", help="tokens per rank, several with commas")
    parser.add_argument("--experts-per-rank", type=int, default=48)
    parser.add_argument("--reps", type=int, default=30)
    args = parser.parse_args(argv)
    tokens = [int(n) for n in args.tokens.split(",")]
    options = Options(args.shape, args.body, tokens, args.experts_per_rank, args.reps)
    by_rank = mori_shmem.run_ranks(bench_rank, args.world_size, options)
    for i, n in enumerate(tokens):
        report(options, args.world_size, n, [rank[i] for rank in by_rank])
    return 0
