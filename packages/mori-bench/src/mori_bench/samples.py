"""What can be said about repeated measurements: the median, the spread, and which of them do not belong.

Three words, used with these meanings in every result of the project:

  slow    A value more than SLOW_FACTOR times the best of its own list. Machines have slow modes (a clock that
          has dropped, a noisy neighbour); such a value is counted and shown, and left out of the median.
          If half of the list or more is slow, the list has no normal mode to fall back on: then nothing is
          left out and the list is `unstable`.
  run     The kept values, in the order they were measured, are cut into up to NUM_RUNS consecutive groups;
          the median of a group is one run. (Of five values or fewer, each value is a run.)
  spread  Slowest run minus fastest run. It says how far the median moves when the measurement is repeated,
          and contains slow drift, because a run is a stretch of time. A difference below it is no difference.
          It takes MIN_RUNS values to have one.

Pure functions over numbers; for `measure` (repetitions in one process) and `compare` (whole processes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOW_FACTOR = 1.3
NUM_RUNS = 5
# Of two equal cases with normal noise, two values each tell a difference in 21 % of the trials, three in 6 %,
# four in 1.3 %, five and more in 0.2 to 0.5 %.
MIN_RUNS = 3


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    if not values:
        raise ValueError("the median of no values is not defined")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def runs(values: Sequence[float], num_runs: int = NUM_RUNS) -> list[float]:
    """The medians of up to `num_runs` consecutive groups of nearly equal size."""
    count = min(num_runs, len(values))
    return [median(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]


def spread(values: Sequence[float]) -> float | None:
    """Slowest run minus fastest run, in the unit of the values; None for less than MIN_RUNS values."""
    if len(values) < MIN_RUNS:
        return None
    medians = runs(values)
    return max(medians) - min(medians)


@dataclass(frozen=True)
class Split:
    """Indices into a list of measurements: which count, and which were slow (those count too if unstable)."""

    kept: tuple[int, ...]
    slow: tuple[int, ...]
    unstable: bool


def split_slow(values: Sequence[float]) -> Split:
    """Tell the slow values from those that count. The best itself always counts."""
    best = min(values)
    slow = tuple(i for i, value in enumerate(values) if value > SLOW_FACTOR * best)
    unstable = 2 * len(slow) >= len(values)
    kept = tuple(i for i in range(len(values)) if unstable or i not in slow)
    return Split(kept=kept, slow=slow, unstable=unstable)
