"""What a bench found: tables with their definitions, the bound, one launch as a picture, result lines."""

from __future__ import annotations

import os
from dataclasses import replace

import mori_bench

from mori_megamoe.bench.phases import ORDER
from mori_megamoe.bench.run import Choice, Found, Measured
from mori_megamoe.bench.sizes import Sizes

DEFINITIONS = (
    "stage1   prepare and Stage1: from the router's ids to the rows that GEMM2 reads; layer: all of it",
    "bound    max(puts, gemm1), each with the machine for itself: no overlap of these two can be faster",
    "hidden   sum of the phases less stage1: what overlap saved, of at most `hideable`, the shorter of the",
    "         two (with packing where that is in the launch too); below 0: they were in each other's way",
)
COLUMNS = (
    *("mode", "stage1_us", "spread_pct", "ratio", "bound_us", "x_bound", "hidden_us", "hideable_us"),
    *("layer_us", "wrong_rows", "marks"),
)
OP = "megamoe-stage1"


def print_heading(sizes: Sizes, choice: Choice, backend: str, device: str) -> None:
    """What was run, and how it was timed."""
    p = sizes.problem
    print(
        f"{p.model_dim} x {p.inter_dim}, top-{p.topk} of {p.num_experts} experts ({sizes.routing}), "
        f"{p.num_ranks} ranks, partials {p.partial_format}, {backend} ({device})"
    )
    print(
        f"{choice.reps} repetitions in turns after {choice.warmup} warm-up, a first one discarded; of each "
        "the slowest rank, median"
    )
    for line in DEFINITIONS:
        print(f"  {line}")
    if choice.copy_delay_us:
        print(f"  each copy of the queues is held back by {choice.copy_delay_us} us, direct stores are not")
    cores = len(os.sched_getaffinity(0))
    if backend == "host" and p.num_ranks > cores:
        print(
            f"  {p.num_ranks} ranks share {cores} cores: phases of one rank overlap with those of others "
            "anyway, so little of what overlap saves shows"
        )


def print_measured(measured: Measured) -> None:
    """Tables of one number of tokens."""
    print(f"\n{measured.tokens} tokens a rank; {_traffic(measured)}")
    print(mori_bench.table([_row(measured, found) for found in measured.found], COLUMNS))
    phases = [name for name in ORDER if any(name in found.phases for found in measured.found)]
    print("\nphases, each alone (fused: the stage's run as it is), us")
    print(mori_bench.table([_phases(found) for found in measured.found], ["mode", *phases]))
    for found in measured.found:
        print(_beyond(found))
    for found in measured.found[1:]:
        verdict = mori_bench.verdict(found.timing, measured.found[0].timing)
        print(f"{found.mode.name} against {measured.found[0].mode.name}: {verdict}")


def _traffic(measured: Measured) -> str:
    rows, sent = [t.rows for t in measured.traffic], [t.sent_bytes for t in measured.traffic]
    return (
        f"{min(rows)} to {max(rows)} rows for a rank's experts, {min(sent) / 1e6:.3g} to "
        f"{max(sent) / 1e6:.3g} MB from a rank to others"
    )


def _row(measured: Measured, found: Found) -> dict[str, object]:
    timing, overlap = found.timing, found.overlap
    first = measured.found[0].timing.max_rank_time_us
    return {
        "mode": found.mode.name,
        "stage1_us": timing.max_rank_time_us,
        "spread_pct": timing.spread_pct,
        "ratio": first / timing.max_rank_time_us,
        "bound_us": overlap.bound_us,
        "x_bound": timing.max_rank_time_us / overlap.bound_us,
        "hidden_us": overlap.hidden_us,
        "hideable_us": overlap.hideable_us,
        "layer_us": found.layer.max_rank_time_us,
        "wrong_rows": found.checked.mismatched_rows,
        "marks": ", ".join(mark for mark in ("unstable", "disturbed") if getattr(timing, mark)),
    }


def _phases(found: Found) -> dict[str, object]:
    alone = {name: timing.max_rank_time_us for name, timing in found.phases.items()}
    return {"mode": found.mode.name, **alone}


def _beyond(found: Found) -> str:
    overlap = found.overlap
    parts = ", ".join(f"{name} {us:.0f}" for name, us in overlap.beyond.items())
    over = overlap.stage1_us - overlap.bound_us
    if over < 0:
        return (
            f"{found.mode.name}: {-over:.0f} us below the bound ({overlap.limiter}), which cannot be: the "
            "machine was slower when the phases ran alone. More repetitions tell more"
        )
    return f"{found.mode.name}: {over:.0f} us beyond the bound ({overlap.limiter}): {parts}"


def print_picture(found: Found) -> None:
    """One launch on rank 0: its rows landing, its experts starting."""
    print(f"\none launch of {found.mode.name}, rank 0")
    drawn = mori_bench.Trace()
    drawn.spans = [replace(s, name=_kind_of(s.name)) for s in found.trace.spans if s.rank == 0]
    print(drawn.draw())


def _kind_of(name: str) -> str:
    """Such that only a number at the end tells spans of one kind apart: "pack segment 3 for rank 1"."""
    return name.split(",")[0].split(" for ")[0]


def result_of(
    measured: Measured, found: Found, sizes: Sizes, choice: Choice, backend: str, device: str
) -> mori_bench.Result:
    """The line of one mode."""
    overlap = found.overlap
    return mori_bench.Result(
        op=OP,
        backend=backend,
        device=device,
        world_size=sizes.problem.num_ranks,
        mode=found.mode.name,
        shape=sizes.shape_of(found.tokens),
        dtype={
            "rows": "mxfp8_e4m3",
            "weights": "mxfp4_e2m1",
            "partials": sizes.problem.partial_format,
            "output": "bf16",
        },
        timing=found.timing,
        validated=found.checked.ok,
        rel_l2=found.checked.rel_l2,
        mismatched_rows=found.checked.mismatched_rows,
        settings={
            "shape": sizes.name,
            "routing": sizes.routing,
            "hot_bias": sizes.hot_bias,
            "seed": sizes.seed,
            "copy_delay_us": choice.copy_delay_us,
            "swiglu_limit": sizes.problem.swiglu_limit,
            "fallback": False,
            **found.mode.effective(found.tokens),
            **_environment(),
        },
        packages=("mori-megamoe", "mori-shmem", "torch"),
        extra={
            "phases_us": _rounded({name: t.max_rank_time_us for name, t in found.phases.items()}),
            "bound_us": round(overlap.bound_us, 3),
            "limiter": overlap.limiter,
            "hidden_us": round(overlap.hidden_us, 3),
            "hideable_us": round(overlap.hideable_us, 3),
            "layer_us": round(found.layer.max_rank_time_us, 3),
            "rows": [t.rows for t in measured.traffic],
            "padded_rows": [t.padded_rows for t in measured.traffic],
            "sent_bytes": [t.sent_bytes for t in measured.traffic],
            "received_bytes": [t.received_bytes for t in measured.traffic],
        },
        fault=choice.fault,
    )


def _environment() -> dict[str, object]:
    from mori_megamoe.settings import TABLE

    return {setting.variable: setting.value for setting in TABLE.read().effective()}


def _rounded(times_us: dict[str, float]) -> dict[str, float]:
    return {name: round(us, 3) for name, us in times_us.items()}
