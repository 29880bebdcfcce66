"""`mori-tune verify --in-turns N`: what a rule gains over the op's built-in default, N visits each in turns.

Both are visited by the same ranks, one after the other, and each pair begins with the other one: what drifts
is shared between them. Of each phase the medians are shown with the least and the most of the visits. One is
called faster only where no visit of it is slower than any of the other. One visit each decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mori_tune.errors import LaunchError
from mori_tune.search import Failure
from mori_tune.spaces import Candidate
from mori_tune.tuning import Slots

RULE, DEFAULT = "rule", "default"
NO_VERDICT = "no difference can be told from one visit each"


@dataclass(frozen=True)
class Comparison:
    """One phase's visits in us: the rule's and the default's."""

    phase: str
    rule_us: Sequence[float]
    default_us: Sequence[float]

    @property
    def verdict(self) -> str:
        """Of the rule, against the default."""
        if len(self.rule_us) < 2:
            return NO_VERDICT
        if max(self.rule_us) < min(self.default_us):
            return "faster"
        return "SLOWER" if min(self.rule_us) > max(self.default_us) else "no difference"

    def __str__(self) -> str:
        ratio = median(self.default_us) / median(self.rule_us)
        return (
            f"{self.phase} in turns: rule {shown(self.rule_us)}, default {shown(self.default_us)}: "
            f"{ratio:.3f} times as fast, {self.verdict}"
        )


def shown(visits_us: Sequence[float]) -> str:
    """`196.9 us [196.1 198.0]`; of a single visit `196.9 us [-]`"""
    if len(visits_us) < 2:
        return f"{visits_us[0]:.1f} us [-]"
    return f"{median(visits_us):.1f} us [{min(visits_us):.1f} {max(visits_us):.1f}]"


def compare_in_turns(
    slots: Slots, rules: Mapping[str, Candidate], default: Candidate, num_visits: int
) -> list[Comparison]:
    """A Comparison of each phase whose rule is not the default itself; LaunchError if a visit fails.

    A phase without a rule runs the default both times.
    """
    differing = [phase for phase in slots.phases if rules.get(phase, default) != default]
    if not differing:
        return []
    sides = {
        RULE: {phase: rules.get(phase, default) for phase in slots.phases},
        DEFAULT: dict.fromkeys(slots.phases, default),
    }
    times: dict[str, dict[str, list[float]]] = {side: {p: [] for p in differing} for side in sides}
    for turn in range(num_visits):
        for side in list(sides) if turn % 2 == 0 else reversed(sides):
            result = slots.visit(sides[side])
            if isinstance(result, Failure):
                raise LaunchError(f"visit {turn + 1} of the {side} in turns: {result}")
            for phase in differing:
                times[side][phase].append(result.average(phase))
    return [Comparison(phase, times[RULE][phase], times[DEFAULT][phase]) for phase in differing]
