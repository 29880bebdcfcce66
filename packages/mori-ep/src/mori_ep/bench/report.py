"""What a bench found: a table with its definitions, what was compared, one round as a picture, RESULT_JSON
lines."""

from __future__ import annotations

import dataclasses

import mori_bench

from mori_ep.bench.run import VIEWS_ANEW, Found
from mori_ep.formats import names

ACROSS = (
    "node   one row per (token, node), own node included, over the time: the usual figure between nodes, of "
    "which (nodes - 1) / nodes crosses with uniform routing",
)
DEFINITIONS = (
    "xgmi   payload of all rows received (a rank's own included) over the time: the usual figure inside a "
    "node",
    "remote payload of the rows that came from other ranks over the time: what crossed links",
    "ll     one row per (token, expert) over the time: what would move if rows were not shared by a rank's "
    "experts",
    "GB/s are means over ranks; combine is counted by the rows that go back, in its own dtype",
)
COLUMNS = (
    *("case", "time_us", "spread_pct", "enqueue_us", "wall_us", "device_us"),
    *("xgmi_GBps", "remote_GBps", "ll_GBps", "node_GBps", "marks"),
)


def print_found(found: Found, *, picture: bool) -> None:
    """The table and what follows from it."""
    sizes, choice = found.sizes, found.choice
    print(
        f"{sizes.tokens} tokens x {sizes.hidden}, top-{sizes.topk} of {sizes.experts} experts "
        f"({sizes.routing}), "
        f"{found.world_size} ranks{_nodes_text(found)}, {choice.kernel_type}, dispatch "
        f"{names([sizes.dtype])}, combine {names([sizes.combine_dtype])} ({choice.quant_type}), "
        f"{'zero copy' if choice.zero_copy else 'rows copied in'}, {found.backend} ({found.device})"
    )
    print(
        f"{choice.reps} repetitions of {choice.rounds} calls in turns after {choice.warmup} warm-up, a first "
        f"one "
        "discarded; times are per call, of the slowest rank of each repetition, median"
    )
    for line in DEFINITIONS + (ACROSS if choice.across_nodes else ()):
        print(f"  {line}")
    columns = [c for c in COLUMNS if choice.across_nodes or c != "node_GBps"]
    print(mori_bench.table([_row(found, name) for name in found.timings], columns))
    for line in [*found.notes, *_verdicts(found)]:
        print(line)
    print(
        f"{found.checked.mismatched_rows} rows of dispatch wrong; combine rel_l2 {found.checked.rel_l2:.3g}, "
        f"allowed "
        f"{found.checked.allowed:.3g}; after the timed calls {found.again.rel_l2:.3g}"
    )
    if picture and any(span.lane != "call" for span in found.trace.spans):
        print("\none round on rank 0")
        drawn = mori_bench.Trace()
        drawn.spans = [s for s in found.trace.spans if s.rank == 0 and s.lane != "call"]
        print(drawn.draw())


def _nodes_text(found: Found) -> str:
    choice = found.choice
    return f" on {choice.nodes} nodes joined by {found.engine}" if choice.across_nodes else ""


def bandwidths(found: Found, case: str) -> dict[str, float]:
    """GB/s by the definitions above, means over ranks; empty for what moves rows both ways."""
    if case not in ("dispatch", "combine"):
        return {}
    seconds = found.timings[case].max_rank_time_us * 1e-6
    width = found.sizes.hidden * found.sizes.combine_dtype.itemsize
    traffic = found.traffic
    if case == "combine":
        traffic = [dataclasses.replace(t, payload_bytes=width) for t in traffic]

    def mean(nbytes: list[int]) -> float:
        return sum(nbytes) / len(nbytes) / seconds / 1e9 if seconds else 0.0

    across = {"node_GBps": mean([t.node_bytes for t in traffic])} if found.choice.across_nodes else {}
    return {
        **across,
        "xgmi_GBps": mean([t.recv_bytes for t in traffic]),
        "remote_GBps": mean([t.remote_bytes for t in traffic]),
        "ll_GBps": mean([t.assignment_bytes for t in traffic]),
    }


def _row(found: Found, case: str) -> dict[str, object]:
    timing = found.timings[case]
    marks = [mark for mark in ("unstable", "disturbed") if getattr(timing, mark)]
    return {
        "case": case,
        "time_us": timing.max_rank_time_us,
        "spread_pct": timing.spread_pct,
        "enqueue_us": timing.host_enqueue_us,
        "wall_us": timing.wall_us,
        "device_us": timing.max_rank_time_us if found.backend != "host" else None,
        **bandwidths(found, case),
        "marks": ", ".join(marks),
    }


def _verdicts(found: Found) -> list[str]:
    pair = found.timings["pair"]
    lines = []
    for name, timing in found.timings.items():
        if name.startswith("all_to_all"):
            ratio = timing.max_rank_time_us / pair.max_rank_time_us
            lines.append(f"pair against {name}: {ratio:.2f}x, {mori_bench.verdict(pair, timing)}")
    anew = found.timings[VIEWS_ANEW]
    saved = anew.host_enqueue_us - pair.host_enqueue_us
    lines.append(
        f"memoised views: {saved:.1f} us of the host's time per round, {mori_bench.verdict(pair, anew)}"
    )
    return lines


def results(found: Found) -> list[mori_bench.Result]:
    """One row per case."""
    return [_result(found, case) for case in found.timings]


def _result(found: Found, case: str) -> mori_bench.Result:
    sizes, choice, timing = found.sizes, found.choice, found.timings[case]
    return mori_bench.Result(
        op="ep",
        backend=found.backend,
        device=found.device,
        world_size=found.world_size,
        mode=choice.kernel_type if not case.startswith("all_to_all") else case,
        shape={"tokens": sizes.tokens, "hidden": sizes.hidden, "topk": sizes.topk, "experts": sizes.experts},
        dtype={
            "dispatch": names([sizes.dtype]),
            "combine": names([sizes.combine_dtype]),
            "quant": choice.quant_type,
        },
        timing=timing,
        validated=found.validated,
        rel_l2=max(found.checked.rel_l2, found.again.rel_l2),
        mismatched_rows=found.checked.mismatched_rows,
        settings={
            "phase": case,
            "routing": sizes.routing,
            "zero_copy": choice.zero_copy,
            "num_qp": choice.num_qp,
            "nodes": choice.nodes if choice.across_nodes else 1,
            "engine": found.engine,
            "rounds": choice.rounds,
            "view_cache": case != VIEWS_ANEW,
            "seed": sizes.seed,
            "fallback": False,
        },
        packages=("mori-ep", "mori-shmem", "torch"),
        extra={
            "device_us": round(timing.max_rank_time_us, 3) if found.backend != "host" else None,
            "bandwidth": {name: float(f"{value:.4g}") for name, value in bandwidths(found, case).items()},
            "recv_rows": [t.recv_rows for t in found.traffic],
            "remote_rows": [t.remote_rows for t in found.traffic],
            "window_bytes": found.window_bytes,
        },
        fault=choice.fault,
    )
