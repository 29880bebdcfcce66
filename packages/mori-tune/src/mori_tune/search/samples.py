"""What one visit to a candidate yields: the times of its rounds on all ranks, or the cause of its failure.

The one number of a visit is its grand mean: the mean over the kept rounds of the mean over the ranks. It is
what the summary prints as "average" and what selects. The slowest rank's mean is shown beside it, as a
check for stragglers, and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from mori_tune.errors import TuneError


@dataclass(frozen=True)
class Times:
    """`by_phase[phase][round][rank]` in microseconds, warm-up rounds already dropped."""

    by_phase: Mapping[str, Sequence[Sequence[float]]]
    moved_bytes: Mapping[str, float]  # mean over the ranks, for the bandwidth column; may be empty
    error: Mapping[str, float] = field(
        default_factory=dict
    )  # the worst rank's, as the op's check measures it

    def average(self, phase: str) -> float:
        return fmean(fmean(ranks) for ranks in self.by_phase[phase])

    def worst_rank(self, phase: str) -> float:
        return max(fmean(of_rank) for of_rank in zip(*self.by_phase[phase], strict=True))

    def typical(self, phase: str) -> float:
        """The median round: what the average would be without a round that something disturbed."""
        return median(fmean(ranks) for ranks in self.by_phase[phase])

    def round_spread(self, phase: str) -> float | None:
        """Over the rounds of this visit."""
        return relative_spread([fmean(ranks) for ranks in self.by_phase[phase]])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def relative_spread(values: Sequence[float]) -> float | None:
    """(max - min) / median, 0.1 = 10 %; None for a single value, which does not tell."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Failure:
    """Why a candidate is out: `kind` is raised, refused, died, hung or wrong; `rank` saw it first."""

    kind: str
    rank: int | None
    text: str

    def __str__(self) -> str:
        who = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.kind}{who}: {self.text}"

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "rank": self.rank, "text": self.text}


def gather_times(
    per_rank: Sequence[Sequence[Mapping[str, float]]],
    phases: Sequence[str],
    *,
    warmup: int,
    moved_bytes: Sequence[Mapping[str, float]] = (),
    errors: Sequence[Mapping[str, float]] = (),
) -> Times:
    """One visit from `per_rank[rank][round][phase]`; ranks must agree on rounds and phases."""
    counts = {len(rounds) for rounds in per_rank}
    if len(counts) != 1:
        raise TuneError(f"ranks report different numbers of rounds: {[len(r) for r in per_rank]}")
    (num_rounds,) = counts
    if num_rounds <= warmup:
        raise TuneError(f"{num_rounds} rounds of which {warmup} warm up leave nothing to measure")
    for rank, rounds in enumerate(per_rank):
        for times in rounds:
            wrong = [p for p in phases if not (p in times and math.isfinite(times[p]) and times[p] > 0)]
            if wrong:
                raise TuneError(f"rank {rank} reports {dict(times)}: no positive time for {', '.join(wrong)}")
    kept = range(warmup, num_rounds)
    by_phase = {p: [[rounds[i][p] for rounds in per_rank] for i in kept] for p in phases}
    sizes = {
        p: fmean(b[p] for b in moved_bytes)
        for p in phases
        if moved_bytes and all(p in b for b in moved_bytes)
    }
    return Times(by_phase, sizes, worst_of(errors))


def worst_of(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest of each kind of error."""
    names = sorted({name for error in errors for name in error})
    return {name: max(error[name] for error in errors if name in error) for name in names}
