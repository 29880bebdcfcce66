"""How a time is taken, so that it can be believed.

All ranks call `measure` with the same cases. For every case:

  1. `warmup` untimed runs, then one timed run that is thrown away (kept only as `first_us`): the first run
     after a build or an idle period measures something else.
  2. `reps` timed repetitions. Repetition i runs every case once, forwards when i is even and backwards when
     it is odd, so that a machine that drifts does so under all cases alike. Each run is preceded by
        canary     a fixed small job that no case touches; if *its* time moves, the machine moved
        before()   the caller's: a barrier, new inputs, a cache flush; never timed
     and consists of
        start()    returns when the work is handed over      -> host_enqueue_us
        finish()   returns when the work is done             -> wall_us
     The time of the run is what finish() returns, if that is a float: microseconds measured on the device;
     else the wall.
  3. After the last repetition the ranks exchange their times, once. Per repetition the slowest rank counts
     (`max_rank_time_us` is the median of those); slow repetitions are marked and left out, see `samples`.

The exchange gives every rank the same lists, so every rank returns the same Timing. The cyclic garbage
collector is off while the clock runs. The clock is `time.monotonic_ns`, one for all processes of a machine.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from mori_bench.samples import SLOW_FACTOR, median, split_slow, spread

# Smaller jobs drift by 30 % on an idle machine; this one takes almost a millisecond and stays within 16 %.
CANARY_COPY_BYTES = 4 << 20
CANARY_HASH_BYTES = 1 << 20


@dataclass(frozen=True)
class Case:
    """One thing to time. A plain callable that returns when its work is done is the same as Case(callable).

    start: hands the work over. finish: waits for it; if it returns a float, that is the time in microseconds
    as the device measured it.
    calls: how many calls of the op `start` makes; all times are divided by it.
    """

    start: Callable[[], object]
    finish: Callable[[], object] | None = None
    calls: int = 1


@dataclass(frozen=True)
class Timing:
    """What `measure` found for one case. Times in microseconds, of one call."""

    median_us: float  # of the kept repetitions, the time of one being that of its slowest rank
    min_us: float
    max_us: float
    spread_pct: float | None  # from run to run, see `samples`; None for less than three runs
    max_rank_time_us: float  # median_us under the name that says what it is: the number to quote
    wall_us: float  # median of the slowest rank, on the host's clock: until the work was done
    host_enqueue_us: float  # the same, until the work was handed over
    slow_reps: int = 0  # more than 1.3 times the best: left out of the numbers above, unless unstable
    reps: int = 1  # timed repetitions, slow ones included
    warmup: int = 0
    first_us: float | None = None  # the discarded first run, slowest rank
    slow_us: tuple[float, ...] = ()  # the times of the slow repetitions
    unstable: bool = False  # half of the repetitions or more were slow; none was left out
    canary_us: float | None = None
    canary_drift_pct: float | None = None
    disturbed: bool = False  # the canary drifted by more than 30 %: the machine changed under the measurement
    rank_us: tuple[float, ...] = ()  # median of each rank by itself: tells who was slow
    rep_us: tuple[float, ...] = ()  # slowest rank of every repetition, in order

    @property
    def spread_us(self) -> float | None:
        """The run-to-run spread in microseconds."""
        return None if self.spread_pct is None else self.spread_pct * self.max_rank_time_us / 100


@dataclass
class _Samples:
    """One rank's raw microseconds of one case, by repetition. Exchanged as tuples of plain lists."""

    time_us: list[float]
    wall_us: list[float]
    enqueue_us: list[float]


def host_canary() -> None:
    """Copying and hashing: memory and arithmetic that nothing here changes."""
    source, target = _canary_memory()
    target[:] = source
    hashlib.sha256(source[:CANARY_HASH_BYTES]).digest()


@cache
def _canary_memory() -> tuple[memoryview, memoryview]:
    return memoryview(bytes(CANARY_COPY_BYTES)), memoryview(bytearray(CANARY_COPY_BYTES))


def alone(value: Any) -> list[Any]:
    """The `gather` of a program with one rank."""
    return [value]


def measure(
    cases: Mapping[str, Callable[[], object] | Case],
    *,
    reps: int,
    warmup: int,
    gather: Callable[[Any], list[Any]] = alone,
    before: Callable[[], object] | None = None,
    canary: Callable[[], object] | None = host_canary,
    clock: Callable[[], int] = time.monotonic_ns,
) -> dict[str, Timing]:
    """Time every case as the top of this file says. Collective; all ranks return the same Timings.

    gather: all_gather of a small object over the ranks that take part (any communicator's).
    """
    if reps < 1 or warmup < 0:
        raise ValueError(f"reps={reps}, warmup={warmup}: at least 1 repetition and 0 warm-up runs")
    if not cases:
        raise ValueError("no cases to measure")
    _refuse_different_plans(gather((list(cases), reps, warmup)))
    todo = {name: case if isinstance(case, Case) else Case(case) for name, case in cases.items()}
    taken = {name: _Samples([], [], []) for name in todo}
    canary_us: list[float] = []

    for case in todo.values():
        for _ in range(warmup):
            _prepare(before)
            case.start()
            if case.finish is not None:
                case.finish()
    if canary is not None:
        canary()  # touches its memory for the first time
    with _no_garbage_collection():
        for rep in range(-1, reps):  # -1 is the discarded one
            names = list(todo) if rep % 2 == 0 else list(reversed(todo))
            for name in names:
                if canary is not None:
                    canary_us.append(_timed(canary, clock))
                _prepare(before)
                _run_once(todo[name], taken[name], clock)

    exchanged = gather(({name: (s.time_us, s.wall_us, s.enqueue_us) for name, s in taken.items()}, canary_us))
    return _timings(list(todo), exchanged, warmup)


def _prepare(before: Callable[[], object] | None) -> None:
    if before is not None:
        before()


def _timed(job: Callable[[], object], clock: Callable[[], int]) -> float:
    began = clock()
    job()
    return (clock() - began) / 1e3


def _run_once(case: Case, samples: _Samples, clock: Callable[[], int]) -> None:
    began = clock()
    case.start()
    handed_over = clock()
    on_device_us = case.finish() if case.finish is not None else None
    done = clock()
    wall_us = (done - began) / 1e3
    measured_us = on_device_us if isinstance(on_device_us, float) else wall_us
    samples.time_us.append(measured_us / case.calls)
    samples.wall_us.append(wall_us / case.calls)
    samples.enqueue_us.append((handed_over - began) / 1e3 / case.calls)


def _refuse_different_plans(plans: list[object]) -> None:
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise ValueError(
                f"rank {rank} measures (cases, reps, warmup) = {plan}, rank 0 {plans[0]}: "
                "all ranks must measure the same cases in the same order, or they would wait for each other"
            )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _timings(names: list[str], exchanged: list[object], warmup: int) -> dict[str, Timing]:
    """From what the ranks exchanged to one Timing per case."""
    by_rank: list[tuple[dict[str, tuple[list[float], list[float], list[float]]], list[float]]]
    by_rank = exchanged  # type: ignore[assignment]
    canary = _canary_summary([canary_us for _, canary_us in by_rank])
    return {name: timing_of([samples[name] for samples, _ in by_rank], warmup, *canary) for name in names}


def _canary_summary(by_rank: list[list[float]]) -> tuple[float | None, float | None]:
    """(its time, its drift in percent): the median over ranks, then how far the runs of it lie apart."""
    if not by_rank[0]:
        return None, None
    per_gap = [median(gap) for gap in zip(*by_rank, strict=True)]
    typical, apart = median(per_gap), spread(per_gap)
    return typical, None if apart is None or typical <= 0 else 100 * apart / typical


def timing_of(
    by_rank: list[tuple[list[float], list[float], list[float]]],
    warmup: int = 0,
    canary_us: float | None = None,
    canary_drift_pct: float | None = None,
) -> Timing:
    """One case from every rank's (time_us, wall_us, enqueue_us), the discarded run first."""
    times, walls, enqueues = zip(*by_rank, strict=True)
    slowest = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
    first_us, rep_us = slowest[0], slowest[1:]
    split = split_slow(rep_us)
    kept = [rep_us[i] for i in split.kept]
    headline, apart = median(kept), spread(kept)

    def slowest_rank_median(lists: tuple[list[float], ...]) -> float:
        return median([max(of_rank[1 + i] for of_rank in lists) for i in split.kept])

    return Timing(
        median_us=headline,
        min_us=min(kept),
        max_us=max(kept),
        spread_pct=None if apart is None else (100 * apart / headline if headline > 0 else 0.0),
        max_rank_time_us=headline,
        wall_us=slowest_rank_median(walls),
        host_enqueue_us=slowest_rank_median(enqueues),
        slow_reps=len(split.slow),
        reps=len(rep_us),
        warmup=warmup,
        first_us=first_us,
        slow_us=tuple(rep_us[i] for i in split.slow),
        unstable=split.unstable,
        canary_us=canary_us,
        canary_drift_pct=canary_drift_pct,
        disturbed=canary_drift_pct is not None and canary_drift_pct > 100 * (SLOW_FACTOR - 1),
        rank_us=tuple(median([of_rank[1 + i] for i in split.kept]) for of_rank in times),
        rep_us=tuple(rep_us),
    )
