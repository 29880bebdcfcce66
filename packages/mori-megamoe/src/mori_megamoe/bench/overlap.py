"""What overlapping phases can save, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mori_megamoe.bench.phases import PACKING


@dataclass(frozen=True)
class Overlap:
    """Of one mode. Microseconds, each of the slowest rank."""

    stage1_us: float  # the whole, prepare included
    phases: Mapping[str, float]  # by themselves
    packs_in_launch: bool = False  # then packing can be hidden too

    @property
    def serial_us(self) -> float:
        """A launch that overlaps nothing."""
        return sum(us for name, us in self.phases.items() if name != "fused")

    @property
    def bound_us(self) -> float:
        """No way of Stage1 with these puts and this GEMM1 can be faster: the longer of the two hides the
        other at most."""
        return max(self.phases["puts"], self.phases["gemm1"])

    @property
    def limiter(self) -> str:
        """Which of the two."""
        return "puts" if self.phases["puts"] > self.phases["gemm1"] else "gemm1"

    @property
    def packing_us(self) -> float:
        """What is done to rows before they can be sent."""
        return sum(self.phases.get(name, 0.0) for name in PACKING)

    @property
    def hideable_us(self) -> float:
        """What overlap can hide at most: all of the wire, or of GEMM1 where that is the shorter."""
        wire_us = self.phases["puts"] + (self.packing_us if self.packs_in_launch else 0.0)
        return min(wire_us, self.phases["gemm1"])

    @property
    def hidden_us(self) -> float:
        """What it did hide; below 0 where the phases got into each other's way."""
        return self.serial_us - self.stage1_us

    @property
    def beyond(self) -> dict[str, float]:
        """Where the time beyond the bound goes: what is before the two, and what of them did not overlap."""
        before = {name: us for name, us in self.phases.items() if name in ("prepare", *PACKING)}
        rest = self.stage1_us - self.bound_us - sum(before.values())
        return {**before, "not hidden": rest}
