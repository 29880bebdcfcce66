"""What the visits so far say about one candidate, when any visit may have been in slow mode.

Model of one visit, in logarithms: level + noise, and with a chance of about one in five + log(1.5). That
is what repeated runs look like on the machines this was made for: 10-20 % from run to run, one in five
reproducibly 1.5 times slow. Noise and the share of slow visits are estimated from the sweep itself.

Of n visits the k slowest may have been slow, k = 0..n. Each k is one `Case` with its weight and with the
normal distribution of the level that it implies. From these follow the visits to be set aside, and what
another visit may gain: the expected amount by which this candidate beats the leader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SLOW = math.log(1.5)
FIRST_GUESS_NOISE = 0.05  # of one visit, relative; weighs as much as 4 repeated visits
FIRST_GUESS_SLOW = (2, 10)  # slow of visits


@dataclass(frozen=True)
class Noise:
    """How visits scatter around their candidate's level, and how levels scatter over the space."""

    sigma: float
    slow_share: float
    centre: float
    width: float


@dataclass(frozen=True)
class Case:
    """The `num_slow` slowest visits were slow: how likely that is, and the level it implies."""

    num_slow: int
    weight: float
    mean: float
    variance: float


def cases(logs: Sequence[float], noise: Noise) -> list[Case]:
    ordered, n = sorted(logs), len(logs)
    variance = noise.sigma**2
    precision = n / variance + 1 / noise.width**2
    raw = []
    for num_slow in range(n + 1):
        levels = [y - SLOW if i >= n - num_slow else y for i, y in enumerate(ordered)]
        mean = sum(levels) / n
        scatter = sum((y - mean) ** 2 for y in levels)
        log_weight = num_slow * math.log(noise.slow_share) + (n - num_slow) * math.log(1 - noise.slow_share)
        log_weight -= scatter / (2 * variance)
        log_weight -= (mean - noise.centre) ** 2 / (2 * (noise.width**2 + variance / n))
        pulled = (mean * n / variance + noise.centre / noise.width**2) / precision
        raw.append((num_slow, log_weight, pulled))
    top = max(log_weight for _, log_weight, _ in raw)
    total = sum(math.exp(log_weight - top) for _, log_weight, _ in raw)
    return [Case(k, math.exp(log_weight - top) / total, mean, 1 / precision) for k, log_weight, mean in raw]


def kept_visits(values: Sequence[float], believed: Sequence[Case]) -> list[int]:
    """Indices of the visits that count, the most probable number of slow ones set aside.

    Never more than half of them. On a machine that is merely noisy the one lucky visit would otherwise be
    called the normal one, and its candidate the winner.
    """
    num_slow = max(believed, key=lambda case: case.weight).num_slow
    if num_slow == len(values):
        num_slow = 0  # all slow or all normal look the same: more visits must tell
    num_slow = min(num_slow, len(values) // 2)
    slowest_last = sorted(range(len(values)), key=lambda i: values[i])
    return sorted(slowest_last[: len(values) - num_slow])


def centre_of(believed: Sequence[Case]) -> tuple[float, float]:
    """Mean and variance of the level over all cases."""
    mean = sum(c.weight * c.mean for c in believed)
    return mean, sum(c.weight * (c.variance + (c.mean - mean) ** 2) for c in believed)


def expected_gain(believed: Sequence[Case], leader: tuple[float, float], tie: float) -> float:
    """By how much this candidate is expected to beat the leader by more than a tie, in relative time."""
    leader_mean, leader_variance = leader
    total = 0.0
    for case in believed:
        spread = math.sqrt(case.variance + leader_variance)
        gap = leader_mean - tie - case.mean
        z = gap / spread
        if z > -6:
            below = 0.5 * math.erfc(-z / math.sqrt(2))
            total += case.weight * (gap * below + spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
    return total


def estimate_noise(visits: Iterable[Sequence[float]], believed: Iterable[Sequence[Case]] | None) -> Noise:
    """From logs of all visits of all candidates; `believed` tells which of them were slow, once known."""
    every = [list(v) for v in visits]
    known = [None] * len(every) if believed is None else list(believed)
    squares, freedom, num_slow, num_seen, levels = 0.0, 0, 0, 0, []
    for values, case_list in zip(every, known, strict=True):
        kept = values if case_list is None else [values[i] for i in kept_visits(values, case_list)]
        mean = sum(kept) / len(kept)
        levels.append(mean if case_list is None else centre_of(case_list)[0])
        if case_list is not None and len(values) > 1:
            squares += sum((y - mean) ** 2 for y in kept)
            freedom += len(kept) - 1
            num_slow += len(values) - len(kept)
            num_seen += len(values)
    sigma = math.sqrt((4 * FIRST_GUESS_NOISE**2 + squares) / (4 + freedom))
    centre = sum(levels) / len(levels)
    width = math.sqrt(sum((y - centre) ** 2 for y in levels) / len(levels))
    slow, seen = FIRST_GUESS_SLOW
    return Noise(max(sigma, 1e-4), (slow + num_slow) / (seen + num_seen), centre, max(width, 0.05))
