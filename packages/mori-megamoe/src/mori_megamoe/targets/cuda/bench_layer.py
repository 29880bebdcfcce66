"""The whole layer on several GPUs, in all its ways of Stage1, in one run. It has not been run on
several GPUs yet, so it has no figures.

    python -m mori_megamoe.targets.cuda.bench_layer [--world-size 2] [--shape v4_pro|flash] [--body R|A]
        [--tokens 2048,4096,8192] [--experts-per-rank 48] [--reps 30]

How it measures: all ways in turns, forwards and backwards, eager and as a replayed graph; before each call
the GPUs meet on their streams; a call's time is from there to its last kernel; per repetition the slowest
rank counts, then the median. Phases are events between the kernels of an eager call. Outputs of all ways are
compared byte for byte, before and after.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mori_shmem
import torch

from mori_megamoe import MegaMoE, MegaMoEStage1Sdma, mx
from mori_megamoe.targets.cuda.bench import LIMIT, SHAPES, TOPK
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
from mori_megamoe.weights import LogicalWeights, StoredWeights, shuffle_weights

WAYS: dict[str, dict[str, Any] | None] = {
    "direct": None,
    "fused": {},
    "fused, ready first": {"order": "ready-first"},
    "copies": {"mover": "copies"},
    "copies, packed in launch": {"mover": "copies", "gemm1": "in-launch"},
}


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


def bench_rank(options: Options) -> list[Found]:
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
            found.append(in_turns(cases_of(ways), options.reps))
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


def cases_of(ways: dict[str, Way]) -> dict[str, Callable[[], Phases]]:
    cases: dict[str, Callable[[], Phases]] = {}
    for name, way in ways.items():
        cases[name], cases[f"{name}, graph"] = way.eager, way.replayed
    return cases


def report(options: Options, world_size: int, tokens: int, by_rank: Sequence[Found]) -> None:
    """One table, and a line for each of its rows."""
    print(f"\n{title(options, world_size, tokens)}; us")
    print(slots_line(options, world_size, tokens))
    whole = slowest([rank["direct"] for rank in by_rank], list(by_rank[0]["direct"][0]))
    lines = []
    for name in by_rank[0]:
        of_ranks = [rank[name] for rank in by_rank]
        phases = {phase: slowest(of_ranks, [phase]) for phase in of_ranks[0][0]}
        us = slowest(of_ranks, list(phases))
        print(
            f"{name:28}{us:9.0f}{us / whole:7.2f}   " + ", ".join(f"{k} {v:.0f}" for k, v in phases.items())
        )
        lines.append(result_line("megamoe-layer", options, world_size, tokens, name, us, phases))
    print("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    return run("the layer over NVLink, in all its ways of Stage1", bench_rank, report, argv)


if __name__ == "__main__":
    sys.exit(main())
