"""What the tests share: the toy op's environment, the command line, a crew and a clock that are faked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mori_tune.device import host_device
from mori_tune.journal import Journal
from mori_tune.search import Failure, Search, Times
from mori_tune.slots import CrewFailure
from mori_tune.spaces import Candidate, Parameter, Space, hardware_of
from mori_tune.tunable import Problem
from mori_tune.tuning import How, Slots, Tuned, Watcher, tune

TOY_OP = Path(__file__).parent / "toy_op"
NOT_INHERITED = ("MORI_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")


@pytest.fixture
def toy_env(tmp_path: Path) -> dict[str, str]:
    """A clean environment in which the toy op can be imported and rules and journals are the test's own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
    return {
        **env,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(TOY_OP),
        "MORI_TUNE_DIR": str(tmp_path / "rules"),
        "MORI_TUNE_JOURNALS": str(tmp_path / "journals"),
    }


@pytest.fixture
def cli(toy_env: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`cli("run", "--op", ...)` in a process of its own."""

    def call(*arguments: str, timeout: float = 200, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mori_tune", *arguments],
            env={**toy_env, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return call


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class FakeCrew:
    """Ranks that take no time: `behave(candidate, crew number, rank)` gives a rank's microseconds, or raises.

    Each answer costs the clock one second, a start ten.
    """

    def __init__(self, behave: Callable[[Candidate, int, int], float], world_size: int = 2) -> None:
        self.behave = behave
        self.world_size = world_size
        self.clock = FakeClock()
        self.number = 0
        self.running = False
        self.proven = False
        self.visits: list[str] = []

    def start(self) -> None:
        self.number += 1
        self.running = True
        self.proven = False
        self.clock.seconds += 10

    def stop(self) -> None:
        self.running = False

    def ask(self, question: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        self.clock.seconds += 1
        if question["do"] == "open":
            return [{}] * self.world_size
        self.visits.append(str(Candidate.of(next(iter(question["candidates"].values())))))
        answers = []
        for rank in range(self.world_size):
            chosen = {p: Candidate.of(c) for p, c in question["candidates"].items()}
            rounds = [
                {p: self.time_of(c, rank) for p, c in chosen.items()} for _ in range(question["rounds"])
            ]
            answers.append({"rounds": rounds, "moved_bytes": {}, "error": {}})
        return answers

    def time_of(self, candidate: Candidate, rank: int) -> float:
        try:
            return self.behave(candidate, self.number, rank)
        except Exception as error:
            self.running = False
            raise CrewFailure(Failure("raised", rank, f"{type(error).__name__}: {error}")) from error


@pytest.fixture
def fake_crew() -> type[FakeCrew]:
    return FakeCrew


class Notes(Watcher):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def tune_fake(tmp_path: Path) -> Callable[..., Tuned]:
    """Tunes `names` on a FakeCrew; `grid` gives each candidate's size, the phases are named."""

    def call(
        names: Sequence[str],
        crew: FakeCrew,
        *,
        phases: Sequence[str] = ("run",),
        default: str | None = None,
        grid: Mapping[str, int] | None = None,
        **how: Any,
    ) -> Tuned:
        sizes = grid or {}
        size = lambda values: (sizes.get(values["name"], 0),)  # noqa: E731
        space = Space("fake", hardware_of(host_device()), (Parameter("name", tuple(names)),), grid_size=size)
        slots = Slots(crew, Problem({"m": 1}), host_device(), phases, How(**how), Notes())  # type: ignore[arg-type]
        journal = Journal(tmp_path, {"op": "fake", "names": list(names)})
        start = None if default is None else Candidate.of({"name": default})
        tuned = tune(slots.problem, space, start, slots, journal, now=crew.clock)
        journal.done()
        return tuned

    return call


def times_of(*per_rank: float, phases: Sequence[str] = ("run",), rounds: int = 9) -> Times:
    return Times({phase: [list(per_rank)] * rounds for phase in phases}, {})


def search_with(answers: Sequence[Times | Failure | Callable[[], Times | Failure]], **options: Any) -> Search:
    """A search run to its end, where candidate i always answers answers[i]."""
    search = Search(len(answers), ("run",), **options)
    while (request := search.next()) is not None:
        answer = answers[request.index]
        search.feed(request.index, answer() if callable(answer) else answer)
    return search


@pytest.fixture(name="times_of")
def times_of_fixture() -> Callable[..., Times]:
    return times_of


@pytest.fixture(name="search_with")
def search_with_fixture() -> Callable[..., Search]:
    return search_with
