"""What a run prints: progress while it lasts, then for each phase the column that decided, and why.

    candidate    average_us  worst_rank_us  spread  visits  slow  GB/s
The average is the grand mean: over the kept rounds of all kept visits, of the mean over ranks. It selects.
The worst rank stands beside it to show stragglers; it is neither saved nor used.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from mori_tune.rows import result_row
from mori_tune.rules.format import Query
from mori_tune.rules.saving import METRIC
from mori_tune.search import Failure, Request, Standing, Times
from mori_tune.tunable import SavedAs
from mori_tune.tuning import Tuned, Watcher

SHOWN_ROWS = 10
BAR_WIDTH = 24
PLAIN_EVERY = 0.1  # of the visits: how often a progress line is printed where no terminal is


def table(rows: Sequence[Sequence[str]]) -> str:
    """First column left, the others right; a line of dashes under the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def summary(tuned: Tuned) -> str:
    parts = [f"{tuned.problem}   on {tuned.device}, {tuned.world_size} ranks", how_measured(tuned)]
    for phase in tuned.search.phases:
        parts.append(phase_summary(tuned, phase))
    failures = tuned.search.failures()
    if failures:
        parts.append(f"{len(failures)} of {len(tuned.candidates)} candidates failed:")
        parts += [f"  {tuned.candidates[i]}: {failure}" for i, failure in failures.items()]
    if tuned.refused:
        parts.append(f"{len(tuned.refused)} candidates are not valid here and were not tried, for example")
        parts += [f"  {candidate}: {reason}" for candidate, reason in tuned.refused[:3]]
    parts += [f"note: {note}" for note in tuned.notes]
    return "\n".join(parts)


def how_measured(tuned: Tuned) -> str:
    ratio = tuned.num_visits / len(tuned.candidates)
    resumed = f", {tuned.num_resumed} of them from the journal" if tuned.num_resumed else ""
    return (
        f"{tuned.how.scope} scope, {len(tuned.candidates)} candidates, {tuned.num_visits} visits "
        f"({ratio:.1f} each{resumed}) of {tuned.how.rounds} rounds, the first {tuned.how.warmup} dropped, "
        f"in {tuned.wall_s:.1f} s; outputs compared with the reference before and after each"
    )


def phase_summary(tuned: Tuned, phase: str) -> str:
    verdict = tuned.verdicts[phase]
    rows = tuned.search.standings(phase)
    shown = rows[:SHOWN_ROWS]
    for index in (verdict.winner.index, tuned.default):
        shown += [row for row in rows if row.index == index and row not in shown]
    head = [phase, "average_us", "worst_rank_us", "spread", "visits", "slow", "GB/s"]
    cells = [row_cells(row, tuned, phase) for row in shown]
    if not any(row[-1] for row in cells):
        head, cells = head[:-1], [row[:-1] for row in cells]
    hidden = f"\n({len(rows) - len(shown)} slower ones not shown)" if len(rows) > len(shown) else ""
    return f"\n{table([head, *cells])}{hidden}\n{conclusion(tuned, phase)}"


def row_cells(row: Standing, tuned: Tuned, phase: str) -> list[str]:
    marks = []
    if row.index == tuned.verdicts[phase].winner.index:
        marks.append("winner")
    if row.index == tuned.default:
        marks.append("default")
    name = str(tuned.candidates[row.index]) + (f" ({', '.join(marks)})" if marks else "")
    bandwidth = "" if row.bandwidth_gbps is None else f"{row.bandwidth_gbps:.2f}"
    spread = "-" if row.spread is None else f"{row.spread:.1%}"
    return [
        *(name, f"{row.average_us:.2f}", f"{row.worst_rank_us:.2f}", spread),
        *(str(row.num_kept), str(row.num_slow), bandwidth),
    ]


def conclusion(tuned: Tuned, phase: str) -> str:
    """Who won and how sure that is, in one or two lines."""
    verdict = tuned.verdicts[phase]
    winner, fastest = verdict.winner, verdict.fastest
    lines = [f"{phase}: winner {tuned.candidates[winner.index]}, average {winner.average_us:.2f} us"]
    if phase in tuned.confirmed_us:
        lines[0] += f", {tuned.confirmed_us[phase]:.2f} us when confirmed in fresh processes"
    if verdict.kept_by_margin and winner.index == fastest.index:
        lines.append("the present default is the fastest")
    elif verdict.kept_by_margin:
        gain = 1 - fastest.average_us / winner.average_us
        asked = f"the margin asks for more than {tuned.how.margin:.1%}"
        lines.append(f"kept, since the best other one gains {gain:.1%} over the default and {asked}")
    elif winner.index == tuned.default and winner.index != fastest.index:
        other = f"{tuned.candidates[fastest.index]} ({fastest.average_us:.2f} us)"
        lines.append(f"tie within noise with {other}: the present default stays")
    elif winner.index != fastest.index:
        other = f"{tuned.candidates[fastest.index]} ({fastest.average_us:.2f} us)"
        lines.append(f"tie within noise with {other}: the smaller grid is taken")
    elif verdict.ties:
        lines.append(f"tie within noise with {len(verdict.ties)} others: this one has the smallest grid")
    if verdict.unresolved:
        lines.append(f"{len(verdict.unresolved)} others were not told apart from it by this number of visits")
    return "\n".join(lines)


def verbose_table(tuned: Tuned, request: Request, result: Times | Failure) -> str:
    """Every kept round of one visit, with the ranks' mean, as MORI_EP_TUNING_VERBOSE=1 asks for."""
    title = f"{tuned.candidates[request.index]} ({request.why})"
    if isinstance(result, Failure):
        return f"{title}\n  {result}"
    parts = [title]
    for phase in tuned.search.phases:
        rounds = result.by_phase[phase]
        head = [phase, *(f"rank {rank}" for rank in range(len(rounds[0]))), "mean"]
        rows = [
            [f"round {i + 1}", *(f"{us:.2f}" for us in r), f"{sum(r) / len(r):.2f}"]
            for i, r in enumerate(rounds)
        ]
        columns = zip(*rounds, strict=True)
        last = ["Average", *(f"{sum(c) / len(c):.2f}" for c in columns), f"{result.average(phase):.2f}"]
        parts.append(table([head, *rows, last]))
    return "\n".join(parts)


class Progress(Watcher):
    """A bar with an estimate on a terminal, now and then a line elsewhere; with `verbose`, every table."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        *,
        verbose: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.verbose = verbose
        self.now = now
        self.began = 0.0
        self.made = 0
        self.last_plain = 0.0
        self.spans: list[dict[str, Any]] = []

    def begins(self, tuned: Tuned) -> None:
        self.began = self.now()
        self.made = 0
        self.last_plain = 0.0
        resumed = f"; {tuned.num_resumed} visits resumed from the journal" if tuned.num_resumed else ""
        self.line(f"tuning {tuned.problem}: {len(tuned.candidates)} candidates{resumed}")

    def visited(
        self, tuned: Tuned, request: Request, result: Times | Failure, group: int, seconds: float
    ) -> None:
        self.made += 1
        end_us = self.now() * 1e6
        self.spans.append(
            {
                "name": str(tuned.candidates[request.index]),
                "cat": request.why,
                "ph": "X",
                "pid": 0,
                "tid": group,
                "ts": end_us - seconds * 1e6,
                "dur": seconds * 1e6,
            }
        )
        if self.verbose:
            self.line(verbose_table(tuned, request, result))
        if isinstance(result, Failure):
            self.line(f"{tuned.candidates[request.index]}: {result}")
        self.show(tuned, request)

    def show(self, tuned: Tuned, request: Request) -> None:
        done, most = tuned.search.num_visits, max(tuned.search.max_visits, 1)
        share = min(1.0, done / most)
        left_s = (self.now() - self.began) / max(self.made, 1) * max(0, most - done)
        text = f"{done} of at most {most} visits ({request.why}), at most {clock(left_s)} left"
        if self.stream.isatty():
            bar = "#" * round(share * BAR_WIDTH)
            print(f"\r\033[K[{bar:.<{BAR_WIDTH}}] {text}", end="", file=self.stream, flush=True)
        elif share - self.last_plain >= PLAIN_EVERY:
            self.last_plain = share
            print(text, file=self.stream, flush=True)

    def note(self, text: str) -> None:
        self.line(text)

    def line(self, text: str) -> None:
        start = "\r\033[K" if self.stream.isatty() else ""
        print(f"{start}{text}", file=self.stream, flush=True)

    def write_trace(self, path: str) -> None:
        with open(path, "w") as file:
            json.dump({"traceEvents": self.spans, "displayTimeUnit": "ms"}, file)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def row_of(tuned: Tuned, phase: str, op: str) -> dict[str, Any]:
    """The winner's RESULT_JSON row, with the tuner's own fields after those that every row has."""
    winner = tuned.verdicts[phase].winner
    return result_row(
        op=op,
        device=tuned.device,
        world_size=tuned.world_size,
        mode=f"tune-{phase}",
        problem=tuned.problem,
        phase=phase,
        kept=tuned.search.kept(winner.index, phase),
        slow_us=[times.average(phase) for times in tuned.search.slow(winner.index, phase)],
        spread=winner.spread,
        rounds=tuned.how.rounds,
        warmup=tuned.how.warmup,
        versions=tuned.versions,
        validated=True,  # each of its visits was compared with the reference, before and after
        extra={
            "average_us": winner.average_us,
            "tuning_s": round(tuned.wall_s, 3),
            "scope": tuned.how.scope,
            "candidates": len(tuned.candidates),
            "visits": tuned.num_visits,
            "failed": len(tuned.search.failures()),
            "winner": tuned.winner(phase).as_dict(),
        },
    )


def rule_values(tuned: Tuned, query: Query, tunable: object = None) -> dict[str, Any]:
    """What is saved for the winner of the query's phase: parameters, figures, and where they come from."""
    phase = query.format.phase
    verdict = tuned.verdicts[phase]
    winner, saved = verdict.winner, tuned.winner(phase)
    if isinstance(tunable, SavedAs):
        saved = tunable.saved_as(tuned.problem, phase, saved, tuned.device)
    values: dict[str, Any] = {**saved.as_dict(), "latency_us": round(winner.average_us, 3)}
    if winner.bandwidth_gbps is not None:
        values["bandwidth_gbps"] = round(winner.bandwidth_gbps, 3)
    values["bandwidth_metric"] = METRIC
    values["provenance"] = provenance(tuned, phase, winner, ties=len(verdict.ties))
    return values


def provenance(tuned: Tuned, phase: str, winner: Standing, *, ties: int) -> Mapping[str, Any]:
    return {
        "origin": "measured",
        "device": str(tuned.device),
        "date": time.strftime("%Y-%m-%d"),
        "versions": dict(tuned.versions),
        "rounds": tuned.how.rounds,
        "visits": winner.num_kept,
        "spread_pct": None if winner.spread is None else round(100 * winner.spread, 1),
        "confirmed_us": round(tuned.confirmed_us[phase], 3),
        "candidates": len(tuned.candidates),
        "scope": tuned.how.scope,
        "margin": tuned.how.margin,
        "ties": ties,
    }
