"""Is a faster than b? Only when they differ by more than either of them differs from itself."""

from __future__ import annotations

from dataclasses import dataclass

from mori_bench.protocol import Timing


@dataclass(frozen=True)
class Verdict:
    """How a stands to b. `word` is "faster", "slower" or "no difference"."""

    word: str
    ratio: float  # time of b / time of a: 2.0 means that a takes half the time
    gap_us: float  # b - a
    spread_us: float | None  # the larger run-to-run spread of the two; None where one has too few runs
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.spread_us is None:
            text = f"no difference can be told from so few runs (ratio {self.ratio:.3f})"
        elif self.word == "no difference":
            text = f"no difference (gap {abs(self.gap_us):.1f} us, spread {self.spread_us:.1f} us)"
        else:
            factor = self.ratio if self.word == "faster" else 1 / self.ratio
            text = (
                f"{factor:.2f}x {self.word} (gap {abs(self.gap_us):.1f} us, spread {self.spread_us:.1f} us)"
            )
        return text + "".join(f"; {note}" for note in self.notes)


def verdict(a: Timing, b: Timing) -> Verdict:
    """How a stands to b, by max_rank_time_us and the measured run-to-run spread of both."""
    notes = [f"{side} is unstable" for side, timing in (("a", a), ("b", b)) if timing.unstable]
    if a.disturbed or b.disturbed:
        notes.append("the machine was disturbed")
    return judge(a.max_rank_time_us, b.max_rank_time_us, a.spread_us, b.spread_us, tuple(notes))


def judge(
    a_us: float,
    b_us: float,
    a_spread_us: float | None,
    b_spread_us: float | None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """The rule itself, on plain numbers."""
    gap_us = b_us - a_us
    ratio = b_us / a_us if a_us > 0 else float("inf")
    if a_spread_us is None or b_spread_us is None:
        return Verdict("no difference", ratio, gap_us, None, notes)
    spread_us = max(a_spread_us, b_spread_us)
    word = "no difference" if abs(gap_us) <= spread_us else "faster" if gap_us > 0 else "slower"
    return Verdict(word, ratio, gap_us, spread_us, notes)
