"""What an op implements to be tuned, and how it is found.

    Tunable                                  one object per op, named by an entry point
      .problems(options, device)  -> the problems that the command line asks for
      .space(problem, device)     -> the candidates
      .open(problem, device, ...) -> Session, in every rank's process: buffers, inputs, reference
    Session
      .make(by_phase)             -> Trial, the op built with this candidate
    Trial
      .check()                       runs once, raises WrongOutput where the output is not the reference
      .measure()                  -> one timed round: microseconds of each phase on this rank

An op's package declares its object as an entry point of the group `mori_tune.tunables`; nothing here
imports an op, and an op imports nothing of this package but data classes. Everything a Tunable
does at import must be cheap; torch and the op's targets are imported in `device` and `open`.
What a Tunable may have besides (Preloads, ChecksOptions, ChecksRules, SavedAs) stands below.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from mori_tune.device import Device
from mori_tune.errors import TuneError
from mori_tune.rules.format import Format, Query
from mori_tune.spaces.space import Candidate, Space

GROUP = "mori_tune.tunables"
Scalar = int | float | str | bool | None


@dataclass(frozen=True)
class Problem:
    """One case to tune: plain values, so that it travels to the ranks and into the journal as it is."""

    values: Mapping[str, Scalar]

    def __getitem__(self, name: str) -> Scalar:
        return self.values[name]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Place:
    """Where a session runs: its rank, the ranks in all, and what the command line said for all of them."""

    rank: int
    world_size: int
    local_rank: int
    backend: str  # "host", "cuda", "rocm" or "auto"
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)


class Trial(Protocol):
    def check(self) -> Mapping[str, float] | None:
        """Run once and compare with the reference; raise WrongOutput with what differs.

        May return the error that was measured, as `rel_l2` or `mismatched_rows`, for the result row.
        """

    def measure(self) -> Mapping[str, float]:
        """One round, all ranks together: microseconds of each phase, as this rank saw it."""

    def close(self) -> None: ...


class Session(Protocol):
    def make(self, by_phase: Mapping[str, Candidate]) -> Trial:
        """The op with these candidates; raise Refused, touching nothing, for one that cannot be launched."""

    def moved_bytes(self) -> Mapping[str, float]:
        """Bytes each phase moves on this rank, for the bandwidth columns; may be empty."""

    def close(self) -> None: ...


@runtime_checkable
class Tunable(Protocol):
    name: str  # what --op takes
    package: str  # whose data folder `tuned/` holds the shipped rules
    formats: tuple[Format, ...]  # one for each phase; how its rules are keyed

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options of this op alone; --tokens, --hidden, --world-size and the like are there already."""

    def problems(self, options: argparse.Namespace, device: Device) -> Sequence[Problem]: ...

    def query(self, problem: Problem, phase: str, device: Device) -> Query:
        """The key under which the op will look this problem's rule up."""

    def space(self, problem: Problem, device: Device) -> Space: ...

    def default(self, problem: Problem, device: Device) -> Candidate | None:
        """What runs where no rule is found; measured with the rest, so that tuning never makes it worse."""

    def device(self, backend: str) -> Device:
        """The device of this process; called in a rank's process."""

    def open(self, problem: Problem, device: Device, place: Place) -> Session: ...


@runtime_checkable
class Preloads(Protocol):
    """What a Tunable may have besides, for ranks that start sooner."""

    preload: tuple[str, ...]  # modules that a machine's ranks share: imported once; they start no threads


@runtime_checkable
class ChecksOptions(Protocol):
    """What a Tunable may have besides, to refuse problems before any rank is started."""

    def check_options(self, options: argparse.Namespace, backends: Sequence[str]) -> None:
        """Raise SpaceError where on none of these backends all that the options ask for is possible."""


@runtime_checkable
class ChecksRules(Protocol):
    """What a Tunable may have besides, where its op refuses rules that no sweep could have found."""

    def check_rule(self, phase: str, params: Mapping[str, Any], place: str) -> None:
        """Raise RulesError, with the place, for values that the op would refuse."""


@runtime_checkable
class SavedAs(Protocol):
    """What a Tunable may have besides, where different candidates are one and the same launch of a phase."""

    def saved_as(self, problem: Problem, phase: str, winner: Candidate, device: Device) -> Candidate:
        """The candidate that this phase's rule is to hold: one that launches what the winner launches."""


def available() -> dict[str, str]:
    """Names and import paths of the tunables of all installed packages."""
    return {point.name: point.value for point in sorted(entry_points(group=GROUP), key=lambda p: p.name)}


def load(name: str) -> Tunable:
    """The tunable of this name, or of this `module:attribute`."""
    path = available().get(name, name)
    if ":" not in path:
        known = ", ".join(available()) or "none"
        raise TuneError(
            f"no installed package offers the tunable {name!r} (installed: {known}); install the package of "
            f"that op, for example mori-{name}, or give MODULE:ATTRIBUTE"
        )
    module, attribute = path.split(":", 1)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TuneError(f"tunable {name!r} at {path} cannot be loaded: {error}") from error
    if not isinstance(found, Tunable):
        missing = [
            m
            for m in ("name", "package", "formats", "problems", "query", "space", "open")
            if not hasattr(found, m)
        ]
        raise TuneError(
            f"{path} is not a tunable: it lacks {', '.join(missing) or 'some member of the protocol'}"
        )
    return found
