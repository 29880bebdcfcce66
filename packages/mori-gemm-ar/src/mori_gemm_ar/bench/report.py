"""What a run found: a table, the phases, one call as a picture, and RESULT_JSON lines for programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import mori_bench
from mori_bench import Span

from mori_gemm_ar.bench.run import UNFUSED, Measured, Run
from mori_gemm_ar.plan import Phase

PICTURED = (
    "fused-sdma bf16 sdma",
    "fused-sdma fp8 sdma",
    "fused-sdma fp8 lsa",
)  # the first that was measured


def report(found: Run, args: argparse.Namespace) -> bool:
    """Print everything; whether all of it was validated."""
    problem = found.problem
    print(
        f"GEMM + all-reduce [{problem.m}, {problem.n}], k={problem.k} on each of {problem.num_ranks} ranks, "
        f"{args.quant}, {found.backend} ({found.device})"
    )
    print(
        f"{args.reps} repetitions in turns after {args.warmup} warm-up, a first run discarded; the slowest "
        "rank of each repetition, median\n"
    )
    print(mori_bench.table([_row(m, found) for m in found.measured], _columns(found)))
    for label, reason in found.refused.items():
        print(f"{label}: not on this target: {reason}")
    if phases := _phases(found):
        print("\nphases, us (slowest rank, median)")
        print(mori_bench.table([_phase_row(m) for m in found.measured if m.case], ["case", *phases]))
    _print_agreement(found)
    _print_verdicts(found)
    _print_picture(found)
    for measured in found.measured:
        result_of(measured, found, args).emit(args.json)
    if args.trace:
        found.trace.write_chrome(args.trace)
    return validated(found)


def validated(found: Run) -> bool:
    """Every case right, and all cases that share a wire's dtype equal bit for bit."""
    return all(m.validated for m in found.measured) and all(len(d) == 1 for d in _digests(found).values())


def _columns(found: Run) -> list[str]:
    return [
        "mode",
        "wire",
        "max_rank_time_us",
        "spread_pct",
        "gflops",
        "rel_l2",
        "validated",
        *_marks_column(found),
    ]


def _row(measured: Measured, found: Run) -> dict[str, object]:
    time_us = measured.timing.max_rank_time_us
    return {
        "mode": measured.case.options.mode if measured.case else measured.label,
        "wire": measured.case.wire if measured.case else "bf16 gloo",
        "max_rank_time_us": time_us,
        "spread_pct": measured.timing.spread_pct,
        "gflops": found.problem.flops * found.problem.num_ranks / time_us / 1e3,
        "rel_l2": measured.checked.rel_l2,
        "validated": measured.validated,
        "marks": _marks(measured),
    }


def _marks(measured: Measured) -> str:
    """What speaks against a time, in the words of docs/measuring.md."""
    return ", ".join(mark for mark in ("unstable", "disturbed") if getattr(measured.timing, mark))


def _marks_column(found: Run) -> list[str]:
    return ["marks"] if any(_marks(m) for m in found.measured) else []


def _phases(found: Run) -> list[str]:
    return [phase for phase in Phase if any(phase in m.phases_us for m in found.measured)]


def _phase_row(measured: Measured) -> dict[str, object]:
    return {"case": measured.label, **measured.phases_us}


def _digests(found: Run) -> dict[str, set[str]]:
    """By the dtype of the wire: the digests of the results, one if all cases agree."""
    digests: dict[str, set[str]] = {}
    for m in found.measured:
        if m.case and m.case.options.gather_dtype:
            digests.setdefault(m.case.options.gather_dtype, set()).add(m.checked.digest)
    return digests


def _print_agreement(found: Run) -> None:
    for dtype, digests in _digests(found).items():
        count = sum(1 for m in found.measured if m.case and m.case.options.gather_dtype == dtype)
        if count > 1:
            verdict = "bit for bit the same" if len(digests) == 1 else f"{len(digests)} DIFFERENT results"
            print(f"\n{dtype} wire: {verdict} in {count} cases", end="")
    print()


def _print_verdicts(found: Run) -> None:
    baseline = next((m for m in found.measured if m.label == UNFUSED), None)
    for m in found.measured if baseline else ():
        if m.case and m.case.options.communicates and baseline:
            print(f"{m.label} against {UNFUSED}: {mori_bench.verdict(m.timing, baseline.timing)}")


def _print_picture(found: Run) -> None:
    label = next((name for name in PICTURED if any(m.label == name for m in found.measured)), None)
    if label is None:
        return
    spans = list(_of_call(found.trace, label, rank=0))
    if len(spans) < 2:
        return  # this target does not tell what happens inside a call
    under_gemm = overlap(spans)
    print(f"\none call of {label} on rank 0")
    picture = mori_bench.Trace()
    picture.spans = [s for s in spans if s.lane != "call"]
    print(picture.draw())
    if under_gemm is not None:
        print(f"{under_gemm:.0f} % of the time in which chunks were copied lies within the gemm\n")


def _of_call(trace: mori_bench.Trace, label: str, rank: int) -> Iterator[Span]:
    """The spans of one traced call."""
    call = next(s for s in trace.spans if s.rank == rank and s.lane == "call" and s.name == label)
    for span in trace.spans:
        if span.rank == rank and call.start_ns <= span.start_ns < call.end_ns:
            yield span


def overlap(spans: list[Span]) -> float | None:
    """Percent of the time in which partial sums were copied that lies within this rank's gemm."""
    gemm = next((s for s in spans if s.lane == "phase" and s.name == Phase.GEMM), None)
    copies = [s for s in spans if s.name == "chunk"] if gemm else []
    total_ns = sum(s.end_ns - s.start_ns for s in copies)
    if gemm is None or not total_ns:
        return None
    inside_ns = sum(max(0, min(s.end_ns, gemm.end_ns) - max(s.start_ns, gemm.start_ns)) for s in copies)
    return 100 * inside_ns / total_ns


def result_of(measured: Measured, found: Run, args: argparse.Namespace) -> mori_bench.Result:
    """One case's line for programs."""
    problem, case = found.problem, measured.case
    gather_dtype = case.options.gather_dtype if case else "bf16"
    gather_scale = measured.settings.get("gather_scale")
    gather_scale = gather_scale if isinstance(gather_scale, str) else None
    spans = list(_of_call(found.trace, measured.label, rank=0)) if case else []
    return mori_bench.Result(
        op="gemm_ar",
        backend=found.backend,
        device=found.device,
        world_size=problem.num_ranks,
        mode=case.options.mode if case else UNFUSED,
        shape={"m": problem.m, "n": problem.n, "k": problem.k},
        dtype={
            "input": "fp8_e4m3fn",
            "quant": args.quant,
            "scatter": "bf16",
            "gather": gather_dtype or "none",
            "output": "bf16",
        },
        timing=measured.timing,
        validated=measured.validated,
        rel_l2=measured.checked.rel_l2,
        settings={
            **measured.settings,
            "seed": args.seed,
            "fallback": False,  # there is none: what cannot be honoured is refused
        },
        packages=("mori-gemm-ar", "mori-shmem", "torch"),
        extra={
            "phases_us": {phase: round(us, 3) for phase, us in measured.phases_us.items()},
            "copies_within_gemm_pct": overlap(spans) if spans else None,
            "same_bits_on_all_ranks": measured.checked.same_bits,
            "flops_per_rank": problem.flops,
            "scatter_bytes": problem.scatter_bytes(0) if gather_dtype else 0,
            "gather_bytes": problem.gather_bytes(0, gather_dtype, gather_scale) if gather_dtype else 0,
            "window_bytes": measured.window_bytes,
        },
        fault=args.fault,
    )
