"""The search: which candidate to visit next, and who has won.

  1. Sweep: every candidate once, in order. A candidate that fails is out, with its cause.
  2. Second looks: any visit may have been in slow mode, or had one disturbed round. So whatever could be the
     best after a division by 1.5, or by its median round, is visited again. (Duels alone starve these: in
     simulation nearly all wrong winners hid a right candidate whose only visit had been slow.)
  3. Duels: the challenger expected to gain most over the leader is re-measured, in turns with the leader,
     until nobody is expected to gain anything, or the budget is spent: three visits for each candidate.

The leader is always the lowest average of the kept visits, the column of the summary, so the winner is the
best of what is shown. A lucky leader is visited until it regresses. One process decides, for all ranks;
the decisions depend on nothing but the results fed in, so feeding a journal again resumes a search.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from mori_tune.errors import NoWinner
from mori_tune.search.belief import (
    SLOW,
    Case,
    Noise,
    cases,
    centre_of,
    estimate_noise,
    expected_gain,
    kept_visits,
)
from mori_tune.search.samples import Failure, Times, relative_spread

TIE = 0.01  # closer than this nobody needs to know which is better
NOTHING_TO_GAIN = 5e-5  # expected relative gain of another duel below which the search is over
REFIT_EVERY = 8  # steps between two estimates of the noise
POSSIBLY_SLOW = SLOW + 0.15  # how far above the leaders a visit can lie and still hide the best


@dataclass(frozen=True)
class Request:
    index: int
    why: str  # "sweep", "second look" or "duel"


@dataclass(frozen=True)
class Visit:
    times: Times
    group: int  # which set of processes measured it
    logs: dict[str, float]  # of the average, by phase
    typical_logs: dict[str, float]  # of the median round


@dataclass(frozen=True)
class Known:
    """What the visits to one candidate say about one phase, under the present estimate of the noise."""

    cases: list[Case]
    level: tuple[float, float]  # mean and variance of the logarithm
    kept: list[Times]
    average_us: float


@dataclass
class Entry:
    """One candidate in the search."""

    visits: list[Visit] = field(default_factory=list)
    failure: Failure | None = None
    known: dict[str, Known] = field(default_factory=dict)

    def logs(self, phase: str) -> list[float]:
        return [visit.logs[phase] for visit in self.visits]

    def know(self, phase: str, noise: Noise) -> Known:
        if phase not in self.known:
            logs = self.logs(phase)
            believed = cases(logs, noise)
            kept = [self.visits[i].times for i in kept_visits(logs, believed)]
            average_us = fmean(times.average(phase) for times in kept)
            self.known[phase] = Known(believed, centre_of(believed), kept, average_us)
        return self.known[phase]


@dataclass(frozen=True)
class Standing:
    """One row of the summary."""

    index: int
    average_us: float
    worst_rank_us: float
    spread: float | None  # of the kept visits, of the rounds where there is one visit; None for one round
    num_kept: int
    num_slow: int
    moved_bytes: float | None

    @property
    def bandwidth_gbps(self) -> float | None:
        return None if self.moved_bytes is None else self.moved_bytes / self.average_us / 1e3


@dataclass(frozen=True)
class Verdict:
    """Who won one phase, and how sure that is."""

    phase: str
    winner: Standing
    fastest: Standing  # another one than the winner in a tie, or if the margin kept the default
    ties: tuple[int, ...]  # within noise and 1 % of the fastest, the fastest not included
    unresolved: tuple[int, ...]  # further than a tie, yet not told apart at this budget
    kept_by_margin: bool


class Search:
    def __init__(
        self,
        num_candidates: int,
        phases: Sequence[str],
        *,
        max_visits: int | None = None,
        margin: float = 0.0,
        default: int | None = None,
        smaller_first: Callable[[int], tuple[int, ...]] = lambda index: (),
    ) -> None:
        self.phases = tuple(phases)
        self.entries = [Entry() for _ in range(num_candidates)]
        self.max_visits = 3 * num_candidates if max_visits is None else max_visits
        self.margin = margin
        self.default = default
        self.num_visits = 0
        self._smaller_first = smaller_first
        self._queue: deque[Request] = deque()
        self._looked_again = False
        self._num_duels = 0
        self._noise: dict[str, Noise] = {}

    # -- what is asked ---------------------------------------------------------------------------------

    def next(self) -> Request | None:
        """The next visit to make; None when the search is over."""
        unseen = self._unseen()
        if unseen is not None:
            return Request(unseen, "sweep")
        while True:
            while self._queue and self.entries[self._queue[0].index].failure is not None:
                self._queue.popleft()
            if self.num_visits >= self.max_visits or not self._alive():
                return None
            if self._queue:
                return self._queue.popleft()
            if not self._looked_again:
                self._looked_again = True
                self._queue.extend(self._second_looks())
            elif not self._duel():
                return None

    def _alive(self) -> list[int]:
        return [i for i, e in enumerate(self.entries) if e.failure is None and e.visits]

    def _unseen(self) -> int | None:
        return next((i for i, e in enumerate(self.entries) if e.failure is None and not e.visits), None)

    def _second_looks(self) -> list[Request]:
        """Whoever was visited once and might be the best, had that visit been slow; most promising first."""
        self._refit()
        promise: dict[int, float] = {}
        for phase in self.phases:
            alive = self._alive()
            lowest = sorted(min(self.entries[i].logs(phase)) for i in alive)
            bound = lowest[len(lowest) // 50] + POSSIBLY_SLOW  # the very lowest may be luck
            leader = self._know(self._leader(phase), phase).level
            for i in alive:
                visits = self.entries[i].visits
                lowest_log = min(visits[0].logs[phase], visits[0].typical_logs[phase])
                if len(visits) == 1 and lowest_log <= bound:
                    gain = expected_gain(self._know(i, phase).cases, leader, TIE)
                    promise[i] = max(gain, promise.get(i, 0.0))
        return [Request(i, "second look") for i in sorted(promise, key=lambda i: (-promise[i], i))]

    def _duel(self) -> bool:
        """Queue the most promising challenger of any phase and its leader; False if there is none."""
        if self._num_duels % REFIT_EVERY == 0:
            self._refit()
        best_gain, pair = NOTHING_TO_GAIN, None
        for phase in self.phases:
            first = self._leader(phase)
            leader = self._know(first, phase).level
            for i in self._alive():
                gain = 0.0 if i == first else expected_gain(self._know(i, phase).cases, leader, TIE)
                if gain > best_gain:
                    best_gain, pair = gain, (first, i)
        if pair is None:
            return False
        leader_index, challenger = pair
        visited_less = len(self.entries[leader_index].visits) <= len(self.entries[challenger].visits)
        order = [leader_index, challenger] if visited_less else [challenger]
        if self._num_duels % 2:
            order.reverse()
        self._num_duels += 1
        self._queue.extend(Request(i, "duel") for i in order)
        return True

    # -- what comes back -------------------------------------------------------------------------------

    def feed(self, index: int, result: Times | Failure, group: int = 0) -> None:
        """A visit's outcome. A failure is final: what fails one time in three is not to be trusted."""
        entry = self.entries[index]
        self.num_visits += 1
        entry.known.clear()
        if isinstance(result, Failure):
            entry.failure = result
        else:
            logs = {phase: math.log(result.average(phase)) for phase in self.phases}
            typical = {phase: math.log(result.typical(phase)) for phase in self.phases}
            entry.visits.append(Visit(result, group, logs, typical))

    def set_aside(self, group: int) -> int:
        """Forget what a set of processes measured that turned out to be slow; returns the visits lost."""
        lost = 0
        for entry in self.entries:
            kept = [visit for visit in entry.visits if visit.group != group]
            lost += len(entry.visits) - len(kept)
            entry.visits = kept
            entry.known.clear()
        self.num_visits -= lost  # they are repeated, not paid for
        self._looked_again = False
        return lost

    # -- what it means ---------------------------------------------------------------------------------

    def _refit(self) -> None:
        for phase in self.phases:
            alive = [self.entries[i] for i in self._alive()]
            before = self._noise.get(phase)
            known = None if before is None else [entry.know(phase, before).cases for entry in alive]
            self._noise[phase] = estimate_noise((entry.logs(phase) for entry in alive), known)
        for entry in self.entries:
            entry.known.clear()

    def _know(self, index: int, phase: str) -> Known:
        if phase not in self._noise:
            self._refit()
        return self.entries[index].know(phase, self._noise[phase])

    def _leader(self, phase: str) -> int:
        return min(self._alive(), key=lambda i: (self._know(i, phase).average_us, self._smaller_first(i), i))

    def kept(self, index: int, phase: str) -> list[Times]:
        """The visits that count, slow ones left out."""
        return self._know(index, phase).kept

    def slow(self, index: int, phase: str) -> list[Times]:
        """The visits that were set aside."""
        kept = {id(times) for times in self.kept(index, phase)}
        return [v.times for v in self.entries[index].visits if id(v.times) not in kept]

    def standing(self, index: int, phase: str) -> Standing:
        kept = self.kept(index, phase)
        averages = [times.average(phase) for times in kept]
        sizes = [times.moved_bytes[phase] for times in kept if phase in times.moved_bytes]
        return Standing(
            index,
            fmean(averages),
            fmean(times.worst_rank(phase) for times in kept),
            relative_spread(averages) if len(kept) > 1 else kept[0].round_spread(phase),
            len(kept),
            len(self.entries[index].visits) - len(kept),
            fmean(sizes) if sizes else None,
        )

    def standings(self, phase: str) -> list[Standing]:
        """All candidates that did not fail, best average first."""
        rows = [self.standing(i, phase) for i in self._alive()]
        return sorted(rows, key=lambda row: (row.average_us, self._smaller_first(row.index), row.index))

    def failures(self) -> dict[int, Failure]:
        return {i: e.failure for i, e in enumerate(self.entries) if e.failure is not None}

    def noise_of_one_visit(self, phase: str) -> float:
        """Relative standard deviation as measured: between repeated visits, else between rounds."""
        squares, freedom, within = 0.0, 0, []
        for i in self._alive():
            kept = self.kept(i, phase)
            averages = [times.average(phase) for times in kept]
            mean = fmean(averages)
            squares += sum((a / mean - 1) ** 2 for a in averages)
            freedom += len(averages) - 1
            for times in kept:
                rounds = [fmean(ranks) for ranks in times.by_phase[phase]]
                centre = fmean(rounds)
                variance = fmean((r / centre - 1) ** 2 for r in rounds)
                within.append(variance / max(1, len(rounds) - 1))
        return math.sqrt(squares / freedom if freedom else fmean(within))

    def verdict(self, phase: str) -> Verdict:
        rows = self.standings(phase)
        if not rows:
            raise NoWinner(f"{phase}: all {len(self.entries)} candidates failed")
        fastest, noise = rows[0], self.noise_of_one_visit(phase)
        ties, unresolved = [], []
        for row in rows[1:]:
            behind = row.average_us / fastest.average_us - 1
            error = noise * math.sqrt(1 / row.num_kept + 1 / fastest.num_kept)
            if behind <= min(TIE, 2 * error) and behind + error <= 2 * TIE:
                ties.append(row)
            elif behind <= 2 * error:
                unresolved.append(row.index)
        winner = min(
            [fastest, *ties], key=lambda row: (self._smaller_first(row.index), row.average_us, row.index)
        )
        chosen = self._against_default(winner, rows, [row.index for row in ties])
        return Verdict(
            phase,
            chosen,
            fastest,
            tuple(row.index for row in ties),
            tuple(unresolved),
            kept_by_margin=chosen is not winner and chosen not in ties,
        )

    def _against_default(self, winner: Standing, rows: Sequence[Standing], tied: Sequence[int]) -> Standing:
        """The default stays unless the winner's average lies below it by more than the margin, and by more
        than the measurements leave open: a rule that gains nothing in them may as well lose."""
        present = next((row for row in rows if row.index == self.default), None)
        gains = present is None or winner.average_us < present.average_us * (1 - self.margin)
        if present is None or (gains and present.index not in tied):
            return winner
        return present
