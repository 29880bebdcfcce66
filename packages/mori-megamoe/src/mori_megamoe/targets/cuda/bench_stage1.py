"""Stage1 on several GPUs: baseline (dispatch, then GEMM1) and both fused ways, in one run. Not yet run on a
GPU.

    python -m mori_megamoe.targets.cuda.bench_stage1 [--world-size 2] [--shape v4_pro|flash] [--body R|A]
        [--tokens 2048,4096,8192] [--experts-per-rank 48] [--reps 30]

How it measures: all ways in turns, forwards and backwards; before each call the GPUs meet on their streams; a
call's time is from there to the end of its last kernel, prepare included; per repetition the slowest rank
counts, then the median. Phases are events between the kernels of a call. The rows that the ways make are
compared byte for byte in the same run.

The bound: a fused call can hide the shorter of rows and GEMM1 behind the longer one, so it takes at least
prepare + max(dispatch, gemm1) of the baseline; `of bound` is how far from that it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import mori_shmem
import torch

from mori_megamoe.targets.cuda.bench import LIMIT, SHAPES, TOPK, Weights
from mori_megamoe.targets.cuda.stage1 import MODES, Stage1

Phases = dict[str, float]  # microseconds, in order
_WARMUP = 3


@dataclass(frozen=True)
class Options:
    """What all ranks are told."""

    shape: str
    body: str
    tokens: Sequence[int]
    experts_per_rank: int
    reps: int


def timed(stage: Stage1, inputs: Sequence[torch.Tensor]) -> Phases:
    """One call, waited for."""
    stage.comm.stream_barrier()
    events: list[tuple[str, torch.cuda.Event]] = []

    def mark(phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append((phase, event))

    mark("")
    stage(*inputs, mark=mark)
    torch.cuda.synchronize()
    stage.raise_faults()
    pairs = itertools.pairwise(events)
    return {name: float(before.elapsed_time(event)) * 1e3 for (_, before), (name, event) in pairs}


def rows_by_source(stage: Stage1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Origins in order, and the codes and scales of their rows: what does not depend on where a row lies."""
    hidden, shape = stage.hidden, stage.shape
    count = hidden.num_rows()
    source = hidden.source[:count]
    real = ((source & 0xFFFFFF) < shape.world_size * shape.max_tokens).nonzero().flatten()
    order = real[source[real].argsort()]
    return source[order], hidden.codes[order], hidden.scales[order]


def bench_rank(options: Options) -> list[dict[str, list[Phases]]]:
    """One rank: by number of tokens, by way, the phases of all repetitions. Raises where bytes differ."""
    model_dim, inter_dim, _ = SHAPES[options.shape]
    with mori_shmem.init("cuda") as comm:
        torch.cuda.set_device(comm.device)
        weights = Weights.random(options.experts_per_rank, inter_dim, model_dim)
        found = []
        for tokens in options.tokens:
            stages = {
                mode: Stage1(
                    comm,
                    model_dim=model_dim,
                    inter_dim=inter_dim,
                    num_experts=options.experts_per_rank * comm.world_size,
                    topk=TOPK,
                    max_tokens=tokens,
                    w1=weights.stored,
                    w1_scale=weights.stored_scales,
                    swiglu_limit=LIMIT,
                    body=options.body,
                    mode=mode,
                    capacity=tokens * TOPK * 5 // 4 + options.experts_per_rank * 128,
                )
                for mode in MODES
            }
            inputs = inputs_of(comm, tokens, model_dim, options.experts_per_rank)
            found.append(measure(stages, inputs, options.reps))
            check_bytes(stages)
            comm.barrier()
            for stage in stages.values():
                stage.close()
        return found


def inputs_of(
    comm: mori_shmem.Communicator, tokens: int, model_dim: int, experts_per_rank: int
) -> list[torch.Tensor]:
    """(x, weights, ids) of this rank: distinct random experts."""
    generator = torch.Generator(comm.device).manual_seed(1234 + comm.rank)
    x = torch.randn(tokens, model_dim, device=comm.device, generator=generator).bfloat16()
    scores = torch.randn(tokens, experts_per_rank * comm.world_size, device=comm.device, generator=generator)
    top, ids = scores.topk(TOPK, dim=1)
    return [x, top.softmax(1), ids.to(torch.int32)]


def measure(stages: dict[str, Stage1], inputs: Sequence[torch.Tensor], reps: int) -> dict[str, list[Phases]]:
    found: dict[str, list[Phases]] = {mode: [] for mode in stages}
    for repetition in range(_WARMUP + reps):
        order = list(stages) if repetition % 2 else list(stages)[::-1]
        for mode in order:
            phases = timed(stages[mode], inputs)
            if repetition >= _WARMUP:
                found[mode].append(phases)
    return found


def check_bytes(stages: dict[str, Stage1]) -> None:
    """All ways have made the same rows."""
    wanted = rows_by_source(stages["baseline"])
    for mode, stage in stages.items():
        for got, want in zip(rows_by_source(stage), wanted, strict=True):
            if not torch.equal(got, want):
                raise AssertionError(f"{mode}: {int((got != want).sum())} values differ from the baseline's")


def slowest(by_rank: Sequence[list[Phases]], names: Sequence[str]) -> float:
    """Per repetition the sum of these phases on the slowest rank; the median."""
    repetitions = zip(*by_rank, strict=True)
    slow = [max(sum(r[name] for name in names) for r in ranks) for ranks in repetitions]
    return float(statistics.median(slow))


def report(
    options: Options, world_size: int, tokens: int, by_rank: Sequence[dict[str, list[Phases]]]
) -> None:
    """One table, and a line for each of its rows."""
    of = {mode: [rank[mode] for rank in by_rank] for mode in MODES}
    phases = {name: slowest(of["baseline"], [name]) for name in ("prepare", "dispatch", "gemm1")}
    bound = phases["prepare"] + max(phases["dispatch"], phases["gemm1"])
    baseline = slowest(of["baseline"], list(phases))
    each = f"{options.experts_per_rank} experts each"
    print(f"\n{options.shape}, body {options.body}, {world_size} GPUs, {each}, {tokens} tokens")
    print("baseline: " + ", ".join(f"{name} {us:.0f} us" for name, us in phases.items()))
    print(f"{'':10}{'us':>8}{'of bound':>10}{'of baseline':>13}")
    results = []
    for mode in MODES:
        names = list(of[mode][0][0])
        us = slowest(of[mode], names)
        print(f"{mode:10}{us:8.0f}{us / bound:10.2f}{us / baseline:13.2f}")
        results.append(
            {
                "op": "megamoe-stage1",
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
                "phases_us": {name: round(slowest(of[mode], [name]), 1) for name in names},
                "bound_us": round(bound, 1),
                "mismatched_rows": 0,  # else the run has failed
                "validated": True,
                "reps": options.reps,
            }
        )
    for result in results:
        print("RESULT_JSON " + json.dumps(result))


def main(argv: list[str] | None = None) -> int:
    """0: all ways gave the same bytes."""
    parser = argparse.ArgumentParser(description="Stage1 over NVLink: baseline and fused")
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


if __name__ == "__main__":
    sys.exit(main())
