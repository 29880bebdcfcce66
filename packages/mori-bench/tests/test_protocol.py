"""`measure` against a clock that the cases themselves move."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from mori_bench import Case, measure


def takes(clock, times_us: list[float], log: list[str] | None = None, name: str = "") -> Callable[[], None]:
    """A case that takes the given times, one after the other, the last for ever."""
    waiting = list(times_us)

    def run() -> None:
        if log is not None:
            log.append(name)
        clock.advance(waiting.pop(0) if len(waiting) > 1 else waiting[0])

    return run


def test_warmup_and_the_first_timed_run_do_not_count(clock) -> None:
    case = takes(clock, [900.0, 800.0, 700.0, 100.0, 102.0, 104.0])
    timing = measure({"a": case}, reps=3, warmup=2, clock=clock, canary=None)["a"]
    assert timing.first_us == pytest.approx(700)
    assert timing.rep_us == pytest.approx((100, 102, 104))
    assert timing.max_rank_time_us == timing.median_us == pytest.approx(102)
    assert (timing.min_us, timing.max_us) == pytest.approx((100, 104))
    assert timing.spread_pct == pytest.approx(100 * 4 / 102)
    assert (timing.reps, timing.warmup, timing.slow_reps) == (3, 2, 0)


def test_cases_are_interleaved_in_alternating_order(clock) -> None:
    log: list[str] = []
    cases = {name: takes(clock, [1.0], log, name) for name in "abc"}
    measure(cases, reps=3, warmup=1, clock=clock, canary=None)
    warm_up, discarded, rounds = "abc", "cba", "abc" + "cba" + "abc"
    assert "".join(log) == warm_up + discarded + rounds


def test_before_runs_ahead_of_every_run_and_is_not_timed(clock) -> None:
    calls = []

    def before() -> None:
        calls.append(clock())
        clock.advance(5000)

    timing = measure({"a": takes(clock, [10.0])}, reps=4, warmup=2, clock=clock, canary=None, before=before)[
        "a"
    ]
    assert len(calls) == 2 + 1 + 4
    assert timing.max_us == pytest.approx(10)


def test_slow_repetitions_are_counted_and_left_out(clock) -> None:
    case = takes(clock, [100.0, 100.0, 150.0, 101.0, 99.0, 400.0, 100.0])
    timing = measure({"a": case}, reps=6, warmup=0, clock=clock, canary=None)["a"]
    assert timing.slow_reps == 2
    assert timing.slow_us == pytest.approx((150, 400))
    assert timing.reps == 6
    assert timing.max_us == pytest.approx(101)
    assert timing.max_rank_time_us == pytest.approx(100)
    assert not timing.unstable


def test_a_case_without_a_normal_mode_is_unstable_and_keeps_everything(clock) -> None:
    case = takes(clock, [100.0, 100.0, 200.0, 100.0, 200.0])
    timing = measure({"a": case}, reps=4, warmup=0, clock=clock, canary=None)["a"]
    assert timing.unstable
    assert timing.slow_reps == 2
    assert timing.max_rank_time_us == pytest.approx(150)


def test_per_repetition_the_slowest_rank_counts(clock) -> None:
    """Rank 1 is slow where rank 0 is not: the median of the maxima is above the median of either."""
    mine = [0.0, 10.0, 12.0, 10.0, 12.0, 10.0]
    other = [0.0, 12.0, 10.0, 12.0, 10.0, 12.0]

    def gather(value: Any) -> list[Any]:
        if isinstance(value[0], list):
            return [value, value]  # the plans
        canary = value[1]
        return [value, ({"a": (other, other, other)}, canary)]

    timing = measure({"a": takes(clock, mine)}, reps=5, warmup=0, gather=gather, clock=clock, canary=None)[
        "a"
    ]
    assert timing.max_rank_time_us == pytest.approx(12)
    assert timing.rank_us == pytest.approx((10, 12))
    assert timing.median_us == timing.max_rank_time_us
    assert timing.rep_us == pytest.approx((12, 12, 12, 12, 12))


def test_ranks_that_only_look_on_do_not_pull_the_numbers_down(clock) -> None:
    def gather(value: Any) -> list[Any]:
        idle = ({"a": ([0.1] * 4,) * 3}, value[1])
        return [value, value] if isinstance(value[0], list) else [value, idle, idle]

    case = takes(clock, [100.0])
    timing = measure({"a": case}, reps=3, warmup=0, gather=gather, clock=clock, canary=None)["a"]
    assert (timing.min_us, timing.median_us, timing.max_us) == pytest.approx((100, 100, 100))
    assert timing.rank_us == pytest.approx((100, 0.1, 0.1))


def test_ranks_with_different_plans_are_refused(clock) -> None:
    with pytest.raises(ValueError, match="rank 1 measures"):
        measure({"a": lambda: None}, reps=3, warmup=0, gather=lambda mine: [mine, (["b"], 3, 0)], clock=clock)


def test_enqueue_wall_and_device_time_are_told_apart(clock) -> None:
    def finish() -> float:
        clock.advance(70)
        return 55.5  # what the device's own events say

    case = Case(start=lambda: clock.advance(5), finish=finish)
    timing = measure({"a": case}, reps=3, warmup=1, clock=clock, canary=None)["a"]
    assert timing.host_enqueue_us == pytest.approx(5)
    assert timing.wall_us == pytest.approx(75)
    assert timing.max_rank_time_us == pytest.approx(55.5)


def test_without_a_device_time_the_wall_counts(clock) -> None:
    case = Case(start=lambda: clock.advance(5), finish=lambda: clock.advance(70))
    timing = measure({"a": case}, reps=3, warmup=1, clock=clock, canary=None)["a"]
    assert timing.max_rank_time_us == timing.wall_us == pytest.approx(75)


def test_several_calls_in_one_run_are_divided(clock) -> None:
    timing = measure(
        {"a": Case(lambda: clock.advance(500), calls=100)}, reps=3, warmup=0, clock=clock, canary=None
    )
    assert timing["a"].max_rank_time_us == timing["a"].host_enqueue_us == pytest.approx(5)


def test_a_steady_canary_says_nothing_and_a_drifting_one_marks_the_run(clock) -> None:
    steady = measure(
        {"a": takes(clock, [10.0])}, reps=10, warmup=0, clock=clock, canary=takes(clock, [800.0])
    )["a"]
    assert steady.canary_us == pytest.approx(800)
    assert steady.canary_drift_pct == 0
    assert not steady.disturbed

    half_way_slower = takes(clock, [800.0] * 6 + [1200.0])
    moved = measure({"a": takes(clock, [10.0])}, reps=10, warmup=0, clock=clock, canary=half_way_slower)["a"]
    assert moved.canary_drift_pct is not None
    assert moved.canary_drift_pct > 30
    assert moved.disturbed


def test_one_hiccup_of_the_canary_is_no_drift(clock) -> None:
    hiccup = takes(clock, [800.0] * 8 + [9000.0] + [800.0])
    timing = measure({"a": takes(clock, [10.0])}, reps=15, warmup=0, clock=clock, canary=hiccup)["a"]
    assert not timing.disturbed


def test_too_few_repetitions_have_no_spread(clock) -> None:
    timing = measure({"a": takes(clock, [10.0])}, reps=2, warmup=0, clock=clock, canary=None)["a"]
    assert timing.spread_pct is None
    assert timing.spread_us is None


def test_the_garbage_collector_rests_and_comes_back(clock) -> None:
    states = []
    measure({"a": lambda: states.append(gc.isenabled())}, reps=2, warmup=0, clock=clock, canary=None)
    assert states == [False] * 3
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="op failed"):
        measure({"a": _fail}, reps=2, warmup=0, clock=clock, canary=None)
    assert gc.isenabled()


def _fail() -> None:
    raise RuntimeError("op failed")


@pytest.mark.parametrize(("reps", "warmup"), [(0, 1), (3, -1)])
def test_impossible_counts_are_refused(reps: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="at least 1 repetition"):
        measure({"a": lambda: None}, reps=reps, warmup=warmup)


def test_no_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="no cases"):
        measure({}, reps=3, warmup=1)


def test_the_real_clock_and_the_real_canary() -> None:
    timing = measure({"a": lambda: sum(range(1000))}, reps=3, warmup=1)["a"]
    assert 0 < timing.max_rank_time_us < 100_000
    assert timing.canary_us is not None
    assert timing.canary_us > 10


@pytest.mark.parametrize("returned", [True, 3, None, "done"])
def test_only_a_float_is_a_device_time(clock, returned: object) -> None:
    """What a wait happens to return, a signal's value for instance, is not taken for microseconds."""

    def finish() -> object:
        clock.advance(70)
        return returned

    timing = measure({"a": Case(lambda: None, finish)}, reps=2, warmup=0, clock=clock, canary=None)["a"]
    assert timing.max_rank_time_us == pytest.approx(70)
