"""`mori-gemm-ar-bench table NAME`: one of the published tables, measured here, beside the published numbers.

    headline     split-sdma, fused-sdma, and fused-sdma with the fp8 gather, at three M
    phases       where the time goes, by wire
    pull-grid    the fp8 pull by its number of workgroups
    granularity  what fp8 costs by columns under one scale, and on the two wires
    negative     what reads as right and is not faster: fuse_quantize, fuse_reduce_push

On 8 GPUs the shapes are the published ones, unless -m, -n or -k say otherwise. On a backend without GPUs they
are cut down (M by 64, N and K to 256): what is shown then is that every row runs and is right. Such times are
marked, for they say nothing about hardware: not about theirs, and not how two rows compare on it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mori_bench

from mori_gemm_ar.bench import published
from mori_gemm_ar.bench.cases import Case, named_case
from mori_gemm_ar.bench.report import result_of
from mori_gemm_ar.bench.run import Measured, Run

COLUMNS = ("case", "m", "published_us", "measured_us", "spread_pct", "rel_l2", "validated")
SMALL_N, SMALL_K, SMALL_M_DIVISOR = 256, 256, 64
FP8_LSA = {"gather_dtype": "fp8", "gather_transport": "lsa"}
FP8_SDMA = {"gather_dtype": "fp8", "gather_transport": "sdma"}


@dataclass(frozen=True)
class Line:
    """One case of a table, and what was published for it."""

    name: str
    m: int  # published
    options: dict[str, Any]
    published_us: float | None


def lines_of(table: str) -> list[Line]:
    """The measured lines of a table, in its order."""
    makers = {"headline": _headline, "phases": _phases, "pull-grid": _pull_grid, "negative": _negative}
    return list(makers[table]())


def _headline() -> Iterator[Line]:
    for m, times in published.HEADLINE.items():
        options = ({"mode": "split-sdma"}, {"mode": "fused-sdma"}, {"mode": "fused-sdma", **FP8_LSA})
        names = ("split-sdma", "fused-sdma", "fused-sdma + fp8 gather")
        for name, given, us in zip(names, options, times, strict=True):
            yield Line(name, m, given, us)
    yield Line("gemm-only", 16384, {"mode": "gemm-only"}, published.GEMM_ONLY_US)


def _phases() -> Iterator[Line]:
    wires: dict[str, dict[str, Any]] = {"bf16": {}, "fp8 / sdma": FP8_SDMA, "fp8 / lsa": FP8_LSA}
    for (name, given), us in zip(wires.items(), published.PHASES["layer"], strict=True):
        yield Line(name, 16384, {"mode": "fused-sdma", **given}, us)


def _pull_grid() -> Iterator[Line]:
    for blocks, us in published.PULL_GRID.items():
        yield Line(f"{blocks} blocks", 16384, {"mode": "fused-sdma", **FP8_LSA, "pull_blocks": blocks}, us)


def _negative() -> Iterator[Line]:
    m = published.NEGATIVE_M
    for (name, us), fused in zip(published.FUSE_QUANTIZE.items(), (False, True), strict=True):
        yield Line(name, m, {"mode": "fused-sdma", **FP8_LSA, "fuse_quantize": fused}, us)
    yield Line("reduce, then gather", m, {"mode": "fused-sdma"}, published.NOT_PUSHED_US)
    for publish, by_bands in published.REDUCE_PUSH.items():
        for bands, us in by_bands.items():
            given = {"fuse_reduce_push": True, "publish": publish, "gather_bands": bands}
            yield Line(f"fuse_reduce_push {bands} {publish}", m, {"mode": "fused-sdma", **given}, us)


# ---- measuring ----


def has_gpus(backend: str) -> bool:
    """Whether this backend's kernels run on hardware here: mori-sim's node goes with a torch without ROCm."""
    import torch

    return backend == "cuda" or (backend == "rocm" and torch.version.hip is not None)


def measured_arguments(args: argparse.Namespace) -> Iterator[tuple[argparse.Namespace, list[Case]]]:
    """For each shape of the table: the arguments of a run, and its cases."""
    for m, lines in _by_m(args.table).items():
        run_args = copy.copy(args)
        run_args.m, run_args.n, run_args.k = _shape(args, m)
        run_args.mode, run_args.compare, run_args.time_phases = "all", None, args.table == "phases"
        yield run_args, [named_case(line.name, args.quant, line.options) for line in lines]


def _by_m(table: str) -> dict[int, list[Line]]:
    found: dict[int, list[Line]] = {}
    for line in lines_of(table):
        found.setdefault(line.m, []).append(line)
    return found


def _shape(args: argparse.Namespace, m: int) -> tuple[int, int, int]:
    """What is measured for a published M."""
    if has_gpus(args.backend):
        usual = m, published.N, published.K
    else:
        usual = m // SMALL_M_DIVISOR, SMALL_N, SMALL_K
    given = (args.m, args.n, args.k)
    m, n, k = (size if asked is None else asked for size, asked in zip(usual, given, strict=True))
    return m, n, k


def print_table(args: argparse.Namespace, done: Sequence[tuple[argparse.Namespace, Run]]) -> None:
    """The table from what its runs found, and a RESULT_JSON line for each case."""
    rows = []
    for lines, (_, run) in zip(_by_m(args.table).values(), done, strict=True):
        measured = {m.label: m for m in run.measured}
        rows += [_row(line, run, measured.get(line.name)) for line in lines]
    _, first = done[0]
    print(f"{args.table}: {_what(first, args)}")
    print(mori_bench.table(rows, COLUMNS))
    for _, run in done:
        for label, reason in run.refused.items():
            print(f"{label}: not on this target: {reason}")
    if args.table == "phases":
        _print_phases(first)
    if not has_gpus(args.backend):
        print("measured_us are times of software on this machine, not of hardware: compare no two of them")
    for run_args, run in done:
        for m in run.measured:
            result_of(m, run, run_args).emit(args.json)


def _row(line: Line, run: Run, found: Measured | None) -> dict[str, object]:
    row: dict[str, object] = {"case": line.name, "m": run.problem.m, "published_us": str(line.published_us)}
    if found is not None:
        row |= {
            "measured_us": found.timing.max_rank_time_us,
            "spread_pct": found.timing.spread_pct,
            "rel_l2": found.checked.rel_l2,
            "validated": found.validated,
        }
    return row


def _what(run: Run, args: argparse.Namespace) -> str:
    problem = run.problem
    shape = f"N={problem.n}, K={problem.k} on {problem.num_ranks} ranks, {args.quant}"
    here = f"{run.backend} ({run.device}), {shape}"
    theirs = f"published: N={published.N}, K={published.K} on {published.WORLD_SIZE}x MI355X, blockscale"
    return f"{here}; {theirs}" + ("" if has_gpus(args.backend) else f", M {SMALL_M_DIVISOR} times as large")


def _print_phases(run: Run) -> None:
    """Two columns for each wire. They published a layer of a served model; here it is the op alone."""
    names = [line.name for line in lines_of("phases")]
    columns = ["phase", *(f"{name} {whose}" for name in names for whose in ("published", "measured"))]
    rows = []
    for phase, theirs in published.PHASES.items():
        row: dict[str, object] = {"phase": phase}
        for name, us in zip(names, theirs, strict=True):
            phases_us = next((m.phases_us for m in run.measured if m.label == name), {})
            ours = sum(phases_us.values()) if phase == "layer" else phases_us.get(phase)
            row[f"{name} published"], row[f"{name} measured"] = us and str(us), ours or None
        rows.append(row)
    print("\nphases, us (slowest rank, median)")
    print(mori_bench.table(rows, columns))


def print_granularity(args: argparse.Namespace) -> None:
    """Arithmetic alone: the same on every machine."""
    from mori_gemm_ar.bench.accuracy import WIRE_RANKS, WIRE_SAMPLE, granularities, wire_errors

    print("granularity: relL2 of e4m3fn on a [2048, 7168] standard normal, by columns under one fp32 scale")
    rows = [
        {
            "columns": line.columns_per_scale,
            "published": published.GRANULARITY[line.columns_per_scale],
            "measured": line.rel_l2,
            "scale_pct": f"{line.scale_pct:.2f} %",
        }
        for line in granularities(args.seed)
    ]
    print(mori_bench.table(rows, ["columns", "published", "measured", "scale_pct"]))
    num_ranks = args.world_size or WIRE_RANKS
    errors = wire_errors(args.quant, *WIRE_SAMPLE, args.k or published.K, num_ranks, args.seed)
    print("\nrelL2 of the whole call against float64, by wire")
    wires = [
        {"wire": wire, "published": us, "measured": errors[wire]}
        for wire, us in published.WIRE_ERRORS.items()
    ]
    print(mori_bench.table(wires, ["wire", "published", "measured"]))
