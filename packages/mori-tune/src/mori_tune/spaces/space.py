"""A space: parameters in order, each with its candidates, and constraints that say why one is refused.

A parameter's candidates may depend on the hardware and on the values chosen before it (the share of the
blocks that serves the network depends on how many blocks there are). `quick` is a reduced list for a
look around; a winner from it is never saved. A parameter without a quick list uses its full one.

`candidates` are in the order of the parameters; `refused` holds what the constraints took out, with the
reason, so that a report can say what was never tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mori_tune.errors import SpaceError
from mori_tune.spaces.hardware import Hardware

Value = int | str | bool
SCOPES = ("quick", "full")


@dataclass(frozen=True)
class Candidate:
    """One point of a space; hashable, ordered as the space's parameters are."""

    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Candidate:
        return cls(tuple(values.items()))

    def __getitem__(self, name: str) -> Value:
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, Value]:
        return dict(self.items)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.items) or "(nothing to choose)"


Choices = tuple[Value, ...] | Callable[[Hardware, Mapping[str, Any]], Iterable[Value]]


@dataclass(frozen=True)
class Parameter:
    name: str
    full: Choices
    quick: Choices | None = None

    def choices(self, scope: str, hardware: Hardware, chosen: Mapping[str, Any]) -> list[Value]:
        source = self.quick if scope == "quick" and self.quick is not None else self.full
        return list(source(hardware, chosen) if callable(source) else source)


@dataclass(frozen=True)
class Constraint:
    """`refuses` returns why a candidate is not valid on this hardware, or None."""

    name: str
    refuses: Callable[[Mapping[str, Any], Hardware], str | None]


def no_size(values: Mapping[str, Any]) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True)
class Space:
    name: str
    hardware: Hardware
    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...] = ()
    grid_size: Callable[[Mapping[str, Any]], tuple[int, ...]] = no_size  # a tie goes to the smallest

    def points(self, scope: str) -> Iterator[Candidate]:
        """Every combination, valid or not."""
        if scope not in SCOPES:
            raise SpaceError(f"scope {scope!r} of space {self.name}: wanted quick or full")
        yield from self._extend(scope, {}, self.parameters)

    def _extend(
        self, scope: str, chosen: dict[str, Value], rest: tuple[Parameter, ...]
    ) -> Iterator[Candidate]:
        if not rest:
            yield Candidate.of(chosen)
            return
        for value in rest[0].choices(scope, self.hardware, chosen):
            yield from self._extend(scope, {**chosen, rest[0].name: value}, rest[1:])

    def why_invalid(self, candidate: Candidate) -> str | None:
        """The first constraint that refuses this candidate, in words; None if all accept it."""
        values = candidate.as_dict()
        names, wanted = list(values), [p.name for p in self.parameters]
        if names != wanted:
            return f"has parameters {names}, space {self.name} has {wanted}"
        for constraint in self.constraints:
            reason = constraint.refuses(values, self.hardware)
            if reason is not None:
                return f"{constraint.name}: {reason}"
        return None

    def candidates(self, scope: str = "full") -> list[Candidate]:
        return [c for c in self.points(scope) if self.why_invalid(c) is None]

    def refused(self, scope: str = "full") -> list[tuple[Candidate, str]]:
        reasons = ((c, self.why_invalid(c)) for c in self.points(scope))
        return [(c, reason) for c, reason in reasons if reason is not None]

    def smaller_first(self, candidate: Candidate) -> tuple[int, ...]:
        return self.grid_size(candidate.as_dict())
