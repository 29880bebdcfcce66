"""The whole layer on several GPUs, in all its ways of Stage1, in one run. Not yet run on a GPU.

    python -m mori_megamoe.targets.cuda.bench_layer [--world-size 2] [--shape v4_pro|flash] [--body R|A]
        [--tokens 2048,4096,8192] [--experts-per-rank 48] [--reps 30]

How it measures: all ways in turns, forwards and backwards, eager and as a replayed graph; before each call
the GPUs meet on their streams; a call's time is from there to its last kernel; per repetition the slowest
rank counts, then the median. Phases are events between the kernels of an eager call. Outputs of all ways are
compared byte for byte, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mori_shmem
import torch

from mori_megamoe import MegaMoE, MegaMoEStage1Sdma, mx
from mori_megamoe.targets.cuda.bench import LIMIT, SHAPES, TOPK
from mori_megamoe.targets.cuda.bench_stage1 import Phases, inputs_of, slowest
from mori_megamoe.weights import LogicalWeights, StoredWeights, shuffle_weights

WAYS: dict[str, dict[str, Any] | None] = {
    "direct": None,
    "fused": {},
    "fused, ready first": {"order": "ready-first"},
}
_WARMUP = 3


@dataclass(frozen=True)
class Options:
    """What all ranks are told."""

    shape: str
    body: str
    tokens: Sequence[int]
    experts_per_rank: int
    reps: int


class Events:
    """In the place of a mori_bench.Trace: an event at the end of each phase of a call."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((name, event))

    @contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        yield
        if lane == "phases":
            self.mark(name.split(" ")[0])

    def add(self, *_: object) -> None:
        """Spans on the host's clock say nothing here."""

    def phases(self) -> Phases:
        """Waits for the device."""
        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {name: before.elapsed_time(event) * 1e3 for (_, before), (name, event) in pairs}


class Way:
    """A layer with one way of Stage1: eager, and captured."""

    def __init__(self, moe: MegaMoE, options: dict[str, Any] | None, inputs: Sequence[torch.Tensor]) -> None:
        """Collective."""
        self.moe, self._inputs = moe, inputs
        if options is not None:
            MegaMoEStage1Sdma(moe, **options).install()
        self.output = moe(*inputs).clone()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._captured = moe(*inputs)

    def eager(self) -> Phases:
        events = Events()
        self.moe.comm.stream_barrier()
        events.mark("")
        self.moe.trace = cast(Any, events)
        self.moe(*self._inputs)
        self.moe.trace = None
        return events.phases()

    def replayed(self) -> Phases:
        events = Events()
        self.moe.comm.stream_barrier()
        events.mark("")
        self._graph.replay()
        events.mark("graph")
        return events.phases()

    def is_still(self, wanted: torch.Tensor) -> bool:
        """Collective: a replay and an eager call give these bytes."""
        self._captured.fill_(torch.nan)
        self._graph.replay()
        replayed = torch.equal(self._captured, wanted)
        return torch.equal(self.moe(*self._inputs), wanted) and replayed


def weights_of(comm: mori_shmem.Communicator, experts: int, inter_dim: int, model_dim: int) -> StoredWeights:
    """Random; two different experts in turns, since making them takes long."""
    generator = torch.Generator(comm.device).manual_seed(9000 + comm.rank)

    def random(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        w = torch.randn(2, rows, columns, device=comm.device, generator=generator) * columns**-0.25
        return mx.quantize_weight(w)

    two = shuffle_weights(LogicalWeights(*random(2 * inter_dim, model_dim), *random(model_dim, inter_dim)))
    which = torch.arange(experts, device=comm.device) % 2
    return StoredWeights(*[part[which].contiguous() for part in two])


def bench_rank(options: Options) -> list[dict[str, list[Phases]]]:
    """One rank: by number of tokens, by way, the phases of all repetitions. Raises where bytes differ."""
    os.environ["MORI_MEGAMOE_BODY"] = options.body  # of this rank's process
    model_dim, inter_dim, _ = SHAPES[options.shape]
    with mori_shmem.init("cuda") as comm:
        torch.cuda.set_device(comm.device)
        weights = weights_of(comm, options.experts_per_rank, inter_dim, model_dim)
        found = []
        for tokens in options.tokens:
            inputs = inputs_of(comm, tokens, model_dim, options.experts_per_rank)
            layers = {
                way: MegaMoE(
                    rank=comm.rank,
                    world_size=comm.world_size,
                    model_dim=model_dim,
                    inter_dim=inter_dim,
                    experts=options.experts_per_rank * comm.world_size,
                    topk=TOPK,
                    quant="a8w4",
                    max_tok_per_rank=1 << (tokens - 1).bit_length(),
                    swiglu_limit=LIMIT,
                    comm=comm,
                    **weights._asdict(),
                )
                for way in WAYS
            }
            ways = {way: Way(layers[way], WAYS[way], inputs) for way in WAYS}
            wanted = ways["direct"].output
            check(ways, wanted)
            found.append(measure(ways, options.reps))
            check(ways, wanted)
            comm.barrier()
            for moe in layers.values():
                moe.close()
        return found


def check(ways: dict[str, Way], wanted: torch.Tensor) -> None:
    """Collective: the bytes of the first way, from all."""
    if not bool(wanted.isfinite().all()) or not bool((wanted != 0).any()):
        raise AssertionError("the output is not finite, or nothing")
    differing = [name for name, way in ways.items() if not way.is_still(wanted)]
    if differing:
        raise AssertionError(f"other bytes than by direct stores: {', '.join(differing)}")


def measure(ways: dict[str, Way], reps: int) -> dict[str, list[Phases]]:
    cases: dict[str, Callable[[], Phases]] = {}
    for name, way in ways.items():
        cases[name], cases[f"{name}, graph"] = way.eager, way.replayed
    found: dict[str, list[Phases]] = {name: [] for name in cases}
    for repetition in range(_WARMUP + reps):
        for name in list(cases) if repetition % 2 else list(cases)[::-1]:
            phases = cases[name]()
            if repetition >= _WARMUP:
                found[name].append(phases)
    return found


def report(
    options: Options, world_size: int, tokens: int, by_rank: Sequence[dict[str, list[Phases]]]
) -> None:
    """One table, and a line for each of its rows."""
    each = f"{options.experts_per_rank} experts each"
    print(f"\n{options.shape}, body {options.body}, {world_size} GPUs, {each}, {tokens} tokens; us")
    whole = slowest([rank["direct"] for rank in by_rank], list(by_rank[0]["direct"][0]))
    results = []
    for name in by_rank[0]:
        of_ranks = [rank[name] for rank in by_rank]
        phases = {phase: round(slowest(of_ranks, [phase]), 1) for phase in of_ranks[0][0]}
        us = slowest(of_ranks, list(phases))
        print(
            f"{name:28}{us:9.0f}{us / whole:7.2f}   " + ", ".join(f"{k} {v:.0f}" for k, v in phases.items())
        )
        results.append(
            {
                "op": "megamoe-layer",
                "backend": "cuda",
                "world_size": world_size,
                "mode": name,
                "shape": {
                    "name": options.shape,
                    "tokens": tokens,
                    "experts_per_rank": options.experts_per_rank,
                },
                "body": options.body,
                "max_rank_time_us": round(us, 1),
                "phases_us": phases,
                "mismatched_rows": 0,  # else the run has failed
                "validated": True,
                "reps": options.reps,
            }
        )
    for result in results:
        print("RESULT_JSON " + json.dumps(result))


def main(argv: list[str] | None = None) -> int:
    """0: all ways gave the same bytes."""
    parser = argparse.ArgumentParser(description="the layer over NVLink, in all its ways of Stage1")
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
