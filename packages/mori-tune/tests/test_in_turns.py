"""A rule beside the default: in turns, with a verdict that noise cannot give, and SLOWER where it is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from mori_tune.commands.in_turns import Comparison, compare_in_turns
from mori_tune.device import host_device
from mori_tune.errors import LaunchError
from mori_tune.spaces import Candidate
from mori_tune.tunable import Problem
from mori_tune.tuning import How, Slots, Watcher

RULE, DEFAULT = Candidate.of({"name": "rule"}), Candidate.of({"name": "default"})


def slots_of(crew: Any, phases: Sequence[str] = ("run",)) -> Slots:
    return Slots(crew, Problem({"m": 1}), host_device(), phases, How(), Watcher())


def test_the_two_take_turns_and_the_drift_is_shared(fake_crew: Any) -> None:
    made: list[float] = []

    def drifting(candidate: Candidate, crew: int, rank: int) -> float:
        made.append(1.0)
        return (90.0 if candidate == RULE else 100.0) + 0.01 * len(made)

    crew = fake_crew(drifting)
    (found,) = compare_in_turns(slots_of(crew), {"run": RULE}, DEFAULT, 4)
    names = [name.split("=")[1] for name in crew.visits]
    assert names == ["rule", "default", "default", "rule"] * 2
    assert found.verdict == "faster"
    assert 1.10 < sum(found.default_us) / sum(found.rule_us) < 1.12


@pytest.mark.parametrize(
    ("rule_us", "default_us", "verdict"),
    [
        ((90, 91), (92, 99), "faster"),
        ((90, 93), (92, 99), "no difference"),
        ((100, 101), (90, 99), "SLOWER"),
        ((100, 100), (100, 100), "no difference"),
        ((90,), (100,), "no difference can be told from one visit each"),
    ],
)
def test_one_is_faster_only_where_no_visit_says_otherwise(
    rule_us: tuple[float, ...], default_us: tuple[float, ...], verdict: str
) -> None:
    found = Comparison("run", rule_us, default_us)
    assert found.verdict == verdict
    assert str(found).endswith(f"times as fast, {verdict}")


def test_a_phase_whose_rule_is_the_default_is_not_timed(fake_crew: Any) -> None:
    crew = fake_crew(lambda candidate, crew, rank: 90.0 if candidate == RULE else 100.0)
    assert compare_in_turns(slots_of(crew), {"run": DEFAULT}, DEFAULT, 3) == []
    assert crew.visits == []
    (found,) = compare_in_turns(slots_of(crew, ("a", "b")), {"a": RULE, "b": DEFAULT}, DEFAULT, 3)
    assert (found.phase, found.verdict) == ("a", "faster")


def test_a_visit_that_fails_is_said(fake_crew: Any) -> None:
    def failing(candidate: Candidate, crew: int, rank: int) -> float:
        if candidate == RULE:
            raise ValueError("x")
        return 1.0

    with pytest.raises(LaunchError, match=r"visit 1 of the rule in turns: .*ValueError: x"):
        compare_in_turns(slots_of(fake_crew(failing)), {"run": RULE}, DEFAULT, 2)


def test_verify_compares_with_the_default_when_asked(
    cli: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shape = ("--op", "toy_op.op:TOY", "--tokens", "2", "--hidden", "64", "--reps", "3")
    assert cli("run", *shape, "--save", "--budget", "1").returncode == 0
    done = cli("verify", *shape, "--in-turns", "2")
    for phase in ("dispatch", "combine"):
        assert f"  {phase} in turns: " in done.stdout, done.stdout + done.stderr
    assert done.returncode == int("SLOWER" in done.stdout)
