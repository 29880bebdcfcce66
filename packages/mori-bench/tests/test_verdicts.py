"""A difference counts only above the spread."""

from __future__ import annotations

import random

from mori_bench import Timing, verdict
from mori_bench.protocol import timing_of


def timing(*rep_us: float, **canary: float) -> Timing:
    return timing_of([([0.0, *rep_us],) * 3], **canary)


def test_faster_and_slower_carry_the_ratio() -> None:
    a, b = timing(100, 101, 102), timing(200, 202, 204)
    assert verdict(a, b).word == "faster"
    assert verdict(a, b).ratio == 2.0
    assert verdict(b, a).word == "slower"
    assert str(verdict(a, b)).startswith("2.00x faster")
    assert str(verdict(b, a)).startswith("2.00x slower")


def test_a_gap_within_the_larger_spread_is_no_difference() -> None:
    steady, restless = timing(100, 100, 100), timing(98, 104, 110)
    found = verdict(steady, restless)
    assert found.word == "no difference"
    assert found.gap_us == 4
    assert found.spread_us is not None
    assert round(found.spread_us, 6) == 12


def test_equal_times_are_no_difference() -> None:
    assert verdict(timing(5, 5, 5), timing(5, 5, 5)).word == "no difference"


def test_too_few_runs_allow_no_verdict() -> None:
    found = verdict(timing(100, 100), timing(300, 300, 300))
    assert found.word == "no difference"
    assert found.spread_us is None
    assert "so few runs" in str(found)


def test_marks_travel_with_the_verdict() -> None:
    shaky = timing(100, 200, 100, 200)
    disturbed = timing(10, 10, 10, canary_us=800.0, canary_drift_pct=45.0)
    text = str(verdict(shaky, disturbed))
    assert "a is unstable" in text
    assert "disturbed" in text


def test_equal_cases_are_seldom_told_apart_and_different_ones_often_are() -> None:
    """Noise of 2 %, 20 repetitions: what the documentation says about both kinds of error."""
    source = random.Random(1)

    def noisy(us: float) -> Timing:
        return timing(*(us * (1 + source.gauss(0, 0.02)) for _ in range(20)))

    words = [verdict(noisy(100), noisy(100)).word for _ in range(500)]
    assert len([word for word in words if word != "no difference"]) <= 10  # 2 %; 0.3 % are expected
    words = [verdict(noisy(100), noisy(105)).word for _ in range(200)]
    assert words.count("faster") >= 160  # 93 % are expected
    assert words.count("slower") == 0
