"""Stage1 on several GPUs: baseline (dispatch, then GEMM1) and the fused ways, rows stored and carried by copy
engines, in one run. It has not been run on several GPUs yet, so it has no figures.

    python -m mori_megamoe.targets.cuda.bench_stage1 [--world-size 2] [--shape v4_pro|flash] [--body R|A]
        [--tokens 2048,4096,8192] [--experts-per-rank 48] [--reps 30]

How it measures: all ways in turns, forwards and backwards; before each call the GPUs meet on their streams; a
call's time is from there to the end of its last kernel, prepare included; per repetition the slowest rank
counts, then the median. Phases are events between the kernels of a call. The rows that the ways make are
compared byte for byte in the same run.

Copies are of a fixed size (slots.cuh): what they carry beside what an even router would send is printed.

The bound: a fused call can hide the shorter of rows and GEMM1 behind the longer one, so it takes at least
prepare + max(dispatch, gemm1) of the baseline; `of bound` is how far from that it is.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence

import mori_shmem
import torch

from mori_megamoe.targets.cuda.bench import LIMIT, SHAPES, TOPK, Weights
from mori_megamoe.targets.cuda.bench_ranks import (
    Found,
    Options,
    Phases,
    in_turns,
    inputs_of,
    result_line,
    run,
    slots_line,
    slowest,
    title,
)
from mori_megamoe.targets.cuda.stage1 import MODES, Stage1


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


def bench_rank(options: Options) -> list[Found]:
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
            cases = {mode: functools.partial(timed, stage, inputs) for mode, stage in stages.items()}
            found.append(in_turns(cases, options.reps))
            check_bytes(stages)
            comm.barrier()
            for stage in stages.values():
                stage.close()
        return found


def check_bytes(stages: dict[str, Stage1]) -> None:
    """All ways have made the same rows."""
    wanted = rows_by_source(stages["baseline"])
    for mode, stage in stages.items():
        for got, want in zip(rows_by_source(stage), wanted, strict=True):
            if not torch.equal(got, want):
                raise AssertionError(f"{mode}: {int((got != want).sum())} values differ from the baseline's")


def report(options: Options, world_size: int, tokens: int, by_rank: Sequence[Found]) -> None:
    """One table, and a line for each of its rows."""
    of = {mode: [rank[mode] for rank in by_rank] for mode in MODES}
    phases = {name: slowest(of["baseline"], [name]) for name in ("prepare", "dispatch", "gemm1")}
    bound = phases["prepare"] + max(phases["dispatch"], phases["gemm1"])
    baseline = slowest(of["baseline"], list(phases))
    print(f"\n{title(options, world_size, tokens)}")
    print("baseline: " + ", ".join(f"{name} {us:.0f} us" for name, us in phases.items()))
    print(slots_line(options, world_size, tokens))
    print(f"{'':17}{'us':>8}{'of bound':>10}{'of baseline':>13}")
    lines = []
    for mode in MODES:
        each = {name: slowest(of[mode], [name]) for name in of[mode][0][0]}
        us = slowest(of[mode], list(each))
        print(f"{mode:17}{us:8.0f}{us / bound:10.2f}{us / baseline:13.2f}")
        given = (options, world_size, tokens, mode, us, each)
        lines.append(result_line("megamoe-stage1", *given, bound_us=round(bound, 1)))
    print("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    return run("Stage1 over NVLink: baseline and fused", bench_rank, report, argv)


if __name__ == "__main__":
    sys.exit(main())
