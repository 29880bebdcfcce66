"""Tuning a problem on faked ranks: slow crews, confirmation, spoilt crews, and the clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mori_tune import Hardware, NoWinner, Problem, ep_space, host_device
from mori_tune.journal import Journal
from mori_tune.report import provenance, row_cells, row_of
from mori_tune.search import Failure
from mori_tune.slots import CrewFailure
from mori_tune.spaces import Candidate
from mori_tune.tuning import How, Slots, Watcher, tune

TIMES = {"a": 100.0, "b": 90.0, "c": 120.0, "d": 95.0}


def test_the_winner_is_found_confirmed_and_the_default_measured(fake_crew: Any, tune_fake: Any) -> None:
    crew = fake_crew(lambda c, crew, rank: TIMES[c["name"]])
    tuned = tune_fake(TIMES, crew, default="c")
    assert tuned.winner("run") == Candidate.of({"name": "b"})
    assert tuned.candidates[0] == Candidate.of({"name": "c"}), "the default goes first"
    assert tuned.confirmed_us == {"run": 90.0}
    assert tuned.num_visits <= 3 * len(TIMES)
    assert crew.visits[-1] == "name=b", "the last visit is the confirmation"


def test_a_default_that_no_grid_has_is_measured_with_the_rest(fake_crew: Any, tune_fake: Any) -> None:
    crew = fake_crew(lambda c, crew, rank: {**TIMES, "own": 80.0}[c["name"]])
    tuned = tune_fake(TIMES, crew, default="own")
    assert len(tuned.candidates) == len(TIMES) + 1
    assert tuned.winner("run") == Candidate.of({"name": "own"})


def test_a_spread_is_told_of_two_samples_and_more(fake_crew: Any, tune_fake: Any) -> None:
    """One visit of one kept round: nothing is known of it; of two rounds it is their spread."""
    for rounds, told, pct in ((2, "-", None), (3, "0.0%", 0.0)):
        crew = fake_crew(lambda c, crew, rank: 100.0)
        tuned = tune_fake(["a"], crew, rounds=rounds, budget=1.0)
        verdict = tuned.verdicts["run"]
        one = replace(verdict.winner, num_kept=1, spread=tuned.search.kept(0, "run")[0].round_spread("run"))
        tuned.verdicts["run"] = replace(verdict, winner=one)
        assert row_cells(one, tuned, "run")[3] == told
        assert row_of(tuned, "run", "fake")["spread_pct"] == pct
        assert provenance(tuned, "run", one, ties=0)["spread_pct"] == pct


def test_a_slow_first_crew_is_left_before_the_sweep(fake_crew: Any, tune_fake: Any) -> None:
    """Processes that are 1.5 times slow as a whole measure one candidate, which is repeated."""
    crew = fake_crew(lambda c, number, rank: TIMES[c["name"]] * (1.5 if number == 1 else 1.0))
    tuned = tune_fake(TIMES, crew)
    assert tuned.verdicts["run"].winner.average_us == pytest.approx(90.0)
    assert {visit.group for e in tuned.search.entries for visit in e.visits} == {2}
    assert any("slow mode" in note for note in tuned.notes)


def test_a_slow_crew_after_a_failure_is_replaced(fake_crew: Any, tune_fake: Any) -> None:
    def behave(candidate: Candidate, number: int, rank: int) -> float:
        if candidate["name"] == "bad":
            raise ValueError("x")
        return TIMES[str(candidate["name"])] * (1.5 if number in (3, 4) else 1.0)

    names = ["a", "bad", "b", "c", "d"]
    crew = fake_crew(behave)
    tuned = tune_fake(names, crew)
    assert tuned.winner("run") == Candidate.of({"name": "b"})
    assert tuned.verdicts["run"].winner.average_us == pytest.approx(90.0)
    assert str(tuned.search.failures()[1]) == "raised (rank 0): ValueError: x"
    groups = {visit.group for e in tuned.search.entries for visit in e.visits}
    assert not groups & {3, 4}, "what the slow crews measured does not count"


def test_a_sweep_that_was_slow_as_a_whole_is_repeated_once(fake_crew: Any, tune_fake: Any) -> None:
    """Both crews at the start are slow, which only the fresh ones at the end reveal."""
    crew = fake_crew(lambda c, number, rank: TIMES[c["name"]] * (1.5 if number <= 2 else 1.0))
    tuned = tune_fake(TIMES, crew)
    assert tuned.verdicts["run"].winner.average_us == pytest.approx(90.0)
    assert any("set aside" in note for note in tuned.notes)


def test_a_winner_slow_only_in_fresh_processes_is_said(fake_crew: Any, tune_fake: Any) -> None:
    crew = fake_crew(lambda c, number, rank: TIMES[c["name"]] * (1.5 if number > 2 else 1.0))
    tuned = tune_fake(TIMES, crew)
    assert any("1.50, 1.50, 1.50" in note for note in tuned.notes)


def test_TU_5_a_winner_that_is_wrong_in_fresh_processes_is_out(fake_crew: Any, tune_fake: Any) -> None:
    def behave(candidate: Candidate, number: int, rank: int) -> float:
        if candidate["name"] == "b" and number > 2:
            raise AssertionError("output differs")
        return TIMES[str(candidate["name"])]

    tuned = tune_fake(TIMES, fake_crew(behave))
    assert tuned.winner("run") == Candidate.of({"name": "d"})
    assert any("failed when confirmed" in note for note in tuned.notes)


@pytest.mark.parametrize(("deaths", "winner"), [(1, "b"), (2, "d")])
def test_TU_3_ranks_that_somebody_kills_do_not_cost_the_winner_its_place(
    fake_crew: Any, tune_fake: Any, deaths: int, winner: str
) -> None:
    """Once, while it is confirmed. Who dies twice in fresh processes is out."""

    class Crew(fake_crew):  # type: ignore[misc]
        def time_of(self, candidate: Candidate, rank: int) -> float:
            if candidate["name"] == "b" and 2 < self.number <= 2 + deaths:
                self.running = False
                raise CrewFailure(Failure("died", rank, "died by signal 9 (SIGKILL)"))
            return super().time_of(candidate, rank)  # type: ignore[no-any-return]

    tuned = tune_fake(TIMES, Crew(lambda c, number, rank: TIMES[c["name"]]))
    assert tuned.winner("run") == Candidate.of({"name": winner})
    assert sum("once more, in other processes" in note for note in tuned.notes) == 1
    assert sum("failed when confirmed" in note for note in tuned.notes) == deaths - 1


def test_TU_3_what_fails_in_used_processes_is_tried_once_more_in_new_ones(
    fake_crew: Any, tune_fake: Any
) -> None:
    """Memory leaked by others must not disqualify a candidate; its own fault shows in new processes too."""
    visits_of_crew: dict[int, list[str]] = {}

    def behave(candidate: Candidate, number: int, rank: int) -> float:
        name = str(candidate["name"])
        seen = visits_of_crew.setdefault(number, [])
        if name not in seen:
            seen.append(name)
        if len(seen) > 3:
            raise MemoryError("left over")
        if name == "bad":
            raise ValueError("x")
        return {**TIMES, "e": 70.0}[name]

    names = ["a", "b", "bad", "c", "d", "e"]
    tuned = tune_fake(names, fake_crew(behave))
    assert [names[i] for i in tuned.search.failures()] == ["bad"]
    assert tuned.winner("run") == Candidate.of({"name": "e"})


def test_all_failing_is_no_winner(fake_crew: Any, tune_fake: Any) -> None:
    def behave(candidate: Candidate, number: int, rank: int) -> float:
        raise ValueError("broken everywhere")

    with pytest.raises(NoWinner):
        tune_fake(TIMES, fake_crew(behave))


def test_phases_are_confirmed_together_with_their_own_winners(fake_crew: Any, tune_fake: Any) -> None:
    asked: list[dict[str, Any]] = []

    class Crew(fake_crew):  # type: ignore[misc]
        def ask(self, question: Any, limit_s: float) -> Any:
            if question["do"] == "visit":
                asked.append(question["candidates"])
            return super().ask(question, limit_s)

    times = {"x": {"dispatch": 10.0, "combine": 50.0}, "y": {"dispatch": 12.0, "combine": 40.0}}
    crew = Crew(lambda c, number, rank: 0.0)
    crew.time_of = lambda candidate, rank: times[candidate["name"]][crew.phase]  # type: ignore[method-assign]

    def ask(question: Any, limit_s: float) -> Any:
        if question["do"] == "open":
            return [{}] * 2
        asked.append(question["candidates"])
        row = {p: times[c["name"]][p] for p, c in question["candidates"].items()}
        return [{"rounds": [row] * question["rounds"], "moved_bytes": {}, "error": {}}] * 2

    crew.ask = ask
    tuned = tune_fake(times, crew, phases=("dispatch", "combine"))
    assert asked[-1] == {"dispatch": {"name": "x"}, "combine": {"name": "y"}}
    assert tuned.confirmed_us == {"dispatch": 10.0, "combine": 40.0}


def test_slow_crews_and_noise_together(fake_crew: Any, tune_fake: Any) -> None:
    """One crew in five slow, visits 10 % apart, one candidate in ten kills its crew: 11 of 12 are right."""
    names = [f"c{i}" for i in range(30)]
    right = 0
    for seed in range(12):
        random_ = random.Random(seed)
        true = {name: 100.0 * (1.06 + 0.5 * random_.random()) for name in names}
        best = random_.choice(names)
        true[best] = 100.0
        deadly = set(random_.sample([n for n in names if n != best], 3))
        speed: dict[int, float] = {}

        def behave(
            candidate: Candidate,
            number: int,
            rank: int,
            r: random.Random = random_,
            t: dict[str, float] = true,
            d: set[str] = deadly,
            s: dict[int, float] = speed,
        ) -> float:
            if candidate["name"] in d:
                raise RuntimeError("dies")
            factor = s.setdefault(number, 1.5 if r.random() < 0.2 else 1.0)
            return t[str(candidate["name"])] * factor * r.uniform(0.95, 1.05)

        tuned = tune_fake(names, fake_crew(behave))
        assert tuned.num_visits <= 6 * len(names)
        right += tuned.winner("run") == Candidate.of({"name": best})
    assert right >= 11


def test_TU_4_a_scope_bounds_the_candidates(fake_crew: Any, tune_fake: Any) -> None:
    crew = fake_crew(lambda c, number, rank: TIMES[c["name"]])
    assert tune_fake(TIMES, crew, scope="quick").how.scope == "quick"


def test_rounds_and_warmup_reach_the_ranks(fake_crew: Any, tune_fake: Any) -> None:
    rounds_seen = []

    class Crew(fake_crew):  # type: ignore[misc]
        def ask(self, question: Any, limit_s: float) -> Any:
            if question["do"] == "visit":
                rounds_seen.append((question["rounds"], limit_s))
            return super().ask(question, limit_s)

    crew = Crew(lambda c, number, rank: TIMES[c["name"]])
    tuned = tune_fake(TIMES, crew, rounds=7, warmup=2, limit_s=3.0)
    assert set(rounds_seen) == {(7, 3.0)}
    (visit, *_) = tuned.search.entries[0].visits
    assert len(visit.times.by_phase["run"]) == 5


@pytest.mark.parametrize("cut", [1, 3, 6, 8])
def test_resumption_continues_where_it_stopped(
    fake_crew: Any, tune_fake: Callable[..., Any], cut: int
) -> None:
    """Killed after `cut` visits: the next run repeats none of them and finds the same winner."""
    behave = lambda c, number, rank: TIMES[c["name"]]  # noqa: E731
    whole = tune_fake(TIMES, fake_crew(behave))

    class Killed(BaseException):
        pass

    class Dying(fake_crew):  # type: ignore[misc]
        def ask(self, question: Any, limit_s: float) -> Any:
            if question["do"] == "visit" and len(self.visits) == cut:
                raise Killed
            return super().ask(question, limit_s)

    with pytest.raises(Killed):
        tune_fake(TIMES, Dying(behave))
    resumed = tune_fake(TIMES, fake_crew(behave))
    assert resumed.num_resumed == cut
    assert resumed.winner("run") == whole.winner("run")
    visited = [len(e.visits) for e in resumed.search.entries]
    assert sum(visited) <= sum(len(e.visits) for e in whole.search.entries) + 2, "canaries of the new crew"


def test_a_default_that_is_not_valid_here_is_left_out_and_said(fake_crew: Any, tmp_path: Path) -> None:
    """More blocks than compute units would hang the ranks."""
    space = ep_space(Hardware(16, lanes=64), nodes="inter")
    default = Candidate.of({"block_num": 80, "rdma_block_num": 32, "warp_per_block": 8})
    crew = fake_crew(lambda c, number, rank: float(c["block_num"]))
    said: list[str] = []

    class Notes(Watcher):
        def note(self, text: str) -> None:
            said.append(text)

    slots = Slots(crew, Problem({}), host_device(), ("dispatch",), How(), Notes())
    tuned = tune(slots.problem, space, default, slots, Journal(tmp_path, {"op": "x"}), now=crew.clock)
    assert default not in tuned.candidates
    assert any("80 blocks on 16 compute units" in text for text in said)
