"""Median, runs, spread and slow values."""

from __future__ import annotations

import pytest
from mori_bench.samples import median, runs, split_slow, spread


def test_median_of_odd_and_even_counts() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 3, 2]) == 2.5
    with pytest.raises(ValueError, match="no values"):
        median([])


def test_up_to_five_values_are_their_own_runs() -> None:
    assert runs([5, 1, 3]) == [5, 1, 3]


def test_more_values_are_cut_into_consecutive_runs() -> None:
    assert runs([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert len(runs(list(range(11)))) == 5


def test_spread_is_slowest_minus_fastest_run() -> None:
    assert spread([100.0, 103.0, 101.0]) == 3.0
    # one outlier among many repetitions does not move a run's median, a drift does
    assert spread([100.0] * 10 + [129.0] + [100.0] * 9) == 0.0
    assert spread([100.0] * 12 + [110.0] * 8) == 10.0


def test_two_values_show_no_spread() -> None:
    assert spread([7.0]) is None
    assert spread([7.0, 8.0]) is None


def test_slow_values_are_told_apart_and_the_best_always_counts() -> None:
    split = split_slow([100.0, 131.0, 129.0, 110.0, 250.0])
    assert split.kept == (0, 2, 3)
    assert split.slow == (1, 4)
    assert not split.unstable


def test_exactly_the_factor_is_not_slow() -> None:
    assert split_slow([100.0, 130.0, 100.0]).slow == ()


def test_where_half_is_slow_nothing_is_left_out() -> None:
    """A single lucky value must not throw out all the others."""
    split = split_slow([50.0, 100.0, 101.0, 99.0])
    assert split.unstable
    assert split.kept == (0, 1, 2, 3)
    assert split.slow == (1, 2, 3)
