"""Tuning one problem: the search's decisions, carried out in slots, recorded, and confirmed.

search.next() -> visit in the crew -> journal -> search.feed()          until the search is over
settle:  after the first good visit, the same candidate in a second crew. Some sets of processes are slow
         as a whole; the slow one's visits are set aside. Every later crew is compared in the same way.
confirm: the winners together, in a fresh crew, which then serves the next problem. If the time is another
         there, in two more; if they are mostly faster, the whole sweep was in slow mode and is repeated,
         once. Wrong or dead there: the winner is out after all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mori_tune.device import Device
from mori_tune.errors import LaunchError, NoWinner, TuneError
from mori_tune.journal import Journal
from mori_tune.search import Failure, Request, Search, Times, Verdict
from mori_tune.search.samples import gather_times
from mori_tune.slots import Crew, CrewFailure
from mori_tune.spaces import Candidate, Space
from mori_tune.tunable import Problem

SLOW_CREW = 1.25  # a crew this much slower than another on the same candidate is in slow mode
MAX_CREWS_TRIED = 3
RESERVED_VISITS = 4  # of the budget, for settling and confirming


@dataclass(frozen=True)
class How:
    """The choices of a run, the same for all its problems."""

    scope: str = "full"
    rounds: int = 10
    warmup: int = 1
    margin: float = 0.0
    budget: float = 3.0  # visits for each candidate, everything included
    limit_s: float = 60.0
    open_limit_s: float = 300.0


@dataclass
class Tuned:
    """What came out of one problem."""

    problem: Problem
    device: Device
    how: How
    candidates: list[Candidate]
    default: int | None
    refused: list[tuple[Candidate, str]]
    search: Search
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    confirmed_us: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    num_visits: int = 0
    num_resumed: int = 0
    wall_s: float = 0.0

    def winner(self, phase: str) -> Candidate:
        return self.candidates[self.verdicts[phase].winner.index]


class Watcher:
    """Told about everything that happens; this one keeps quiet, reports and progress bars derive from it."""

    def begins(self, tuned: Tuned) -> None: ...

    def visited(
        self, tuned: Tuned, request: Request, result: Times | Failure, group: int, seconds: float
    ) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass
class Slots:
    """Visits: asks the crew, replaces it when it was lost, and says what a visit yielded."""

    crew: Crew
    problem: Problem
    device: Device
    phases: Sequence[str]
    how: How
    watcher: Watcher
    first_group: int = 0
    opened_in: int = -1  # the crew that has this problem open
    used: int = 0  # visits that crew has had

    @property
    def group(self) -> int:
        return self.first_group + self.crew.number

    def ready(self) -> None:
        """A running crew with this problem open; where it fails a second crew tries, then an error."""
        if self.crew.running and self.opened_in == self.crew.number:
            return
        for last_try in (False, True):
            if not self.crew.running:
                self.crew.start()
            try:
                self.open()
                return
            except CrewFailure as failure:
                self.crew.stop()
                if last_try:
                    tail = f"\n{failure.tail}" if failure.tail else ""
                    raise LaunchError(f"the ranks cannot open {self.problem}: {failure}{tail}") from failure

    def open(self) -> None:
        question = {"do": "open", "problem": dict(self.problem.values), "device": self.device.as_dict()}
        self.crew.ask(question, self.how.open_limit_s)
        self.opened_in, self.used = self.crew.number, 0

    def replace_crew(self) -> None:
        self.crew.stop()
        self.ready()

    def visit(self, by_phase: Mapping[str, Candidate]) -> Times | Failure:
        """One slot. A crew that others have used may have been spoilt: then once more in a new one."""
        self.ready()
        was_used = self.used > 0
        result = self.visit_once(by_phase)
        if isinstance(result, Failure) and result.kind in ("raised", "died") and was_used:
            self.watcher.note(f"{result}; tried again in new processes")
            self.ready()
            result = self.visit_once(by_phase)
        return result

    def visit_once(self, by_phase: Mapping[str, Candidate]) -> Times | Failure:
        candidates = {phase: candidate.as_dict() for phase, candidate in by_phase.items()}
        question = {"do": "visit", "candidates": candidates, "rounds": self.how.rounds}
        try:
            answers = self.crew.ask(question, self.how.limit_s)
        except CrewFailure as failure:
            if failure.tail:
                self.watcher.note("last output: " + failure.tail)
            self.used += 1
            return failure.failure
        self.used += 1
        try:
            return gather_times(
                [answer["rounds"] for answer in answers],
                self.phases,
                warmup=self.how.warmup,
                moved_bytes=[answer["moved_bytes"] for answer in answers],
                errors=[answer["error"] for answer in answers],
            )
        except TuneError as error:
            return Failure("raised", None, str(error))


def tune(
    problem: Problem,
    space: Space,
    default: Candidate | None,
    slots: Slots,
    journal: Journal,
    *,
    versions: Mapping[str, str] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Tuned:
    """The winner of each phase; NoWinner if all candidates failed, LaunchError if ranks cannot be started."""
    reason = None if default is None else space.why_invalid(default)
    if reason is not None:
        slots.watcher.note(f"the default {default} is not valid here and not measured: {reason}")
        default = None
    candidates, default_index = with_default(space.candidates(slots.how.scope), default)
    if not candidates:
        raise NoWinner(f"space {space.name} has no valid candidate for {problem} on {slots.device}")
    search = Search(
        len(candidates),
        slots.phases,
        max_visits=max(len(candidates), int(slots.how.budget * len(candidates)) - RESERVED_VISITS),
        margin=slots.how.margin,
        default=default_index,
        smaller_first=lambda index: space.smaller_first(candidates[index]),
    )
    tuned = Tuned(
        problem, slots.device, slots.how, candidates, default_index, space.refused(slots.how.scope), search
    )
    tuned.versions = dict(versions or {})
    tuned.world_size = slots.crew.world_size
    return Tuning(tuned, slots, journal, now).run()


def with_default(
    candidates: Sequence[Candidate], default: Candidate | None
) -> tuple[list[Candidate], int | None]:
    """The present default first: all are compared with it, and it is measured even if no grid has it."""
    if default is None:
        return list(candidates), None
    return [default, *(c for c in candidates if c != default)], 0


class Tuning:
    """One run of `tune`."""

    def __init__(self, tuned: Tuned, slots: Slots, journal: Journal, now: Callable[[], float]) -> None:
        self.tuned = tuned
        self.search = tuned.search
        self.slots = slots
        self.journal = journal
        self.now = now
        self.canary: int | None = None  # the first candidate that worked
        self.repeated = False

    def run(self) -> Tuned:
        began = self.now()
        self.replay()
        self.journal.open()
        self.slots.watcher.begins(self.tuned)
        while True:
            self.search_on()
            if self.confirm():
                break
        self.tuned.verdicts = {phase: self.search.verdict(phase) for phase in self.search.phases}
        self.tuned.wall_s = self.now() - began
        return self.tuned

    def search_on(self) -> None:
        while (request := self.search.next()) is not None:
            crew_before = self.slots.crew.number
            result = self.visit(request, asked=True)
            if self.canary is None and isinstance(result, Times):
                self.canary = request.index
                if not self.slots.crew.proven:
                    self.settle()
            elif self.canary is not None and self.slots.crew.number != crew_before:
                self.check_crew()

    # -- one visit ---------------------------------------------------------------------------------------

    def visit(self, request: Request, *, asked: bool) -> Times | Failure:
        candidate = self.tuned.candidates[request.index]
        began = self.now()
        result = self.slots.visit(dict.fromkeys(self.search.phases, candidate))
        self.record(request, result, self.slots.group, asked=asked, seconds=self.now() - began)
        return result

    def record(
        self, request: Request, result: Times | Failure, group: int, *, asked: bool, seconds: float
    ) -> None:
        kind = "failure" if isinstance(result, Failure) else "times"
        event = {
            "visit": request.index,
            "why": request.why,
            "asked": asked,
            "group": group,
            kind: result.as_dict(),
        }
        self.journal.write(event)
        self.search.feed(request.index, result, group)
        self.tuned.num_visits += 1
        self.slots.watcher.visited(self.tuned, request, result, group, seconds)

    def set_aside(self, group: int, why: str) -> None:
        self.journal.write({"aside": group})
        lost = self.search.set_aside(group)
        self.note(f"{why}: what processes {group} measured is set aside ({lost} visits) and repeated")

    def note(self, text: str) -> None:
        self.tuned.notes.append(text)
        self.slots.watcher.note(text)

    # -- resuming ----------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Bring the search to where the journal ends; an event that does not fit ends the replay there."""
        for number, event in enumerate(self.journal.events):
            if not self.replay_one(event):
                self.journal.keep(number)
                break
        groups = [event.get("group", 0) for event in self.journal.events]
        self.slots.first_group = max(groups, default=0)
        self.tuned.num_resumed = sum("visit" in event for event in self.journal.events)

    def replay_one(self, event: Mapping[str, Any]) -> bool:
        if "aside" in event:
            self.search.set_aside(event["aside"])
            return True
        if event["asked"]:
            request = self.search.next()
            if request is None or request.index != event["visit"]:
                return False
        result = Failure(**event["failure"]) if "failure" in event else Times(**event["times"])
        if self.canary is None and isinstance(result, Times):
            self.canary = event["visit"]
        self.search.feed(event["visit"], result, event["group"])
        self.tuned.num_visits += 1
        return True

    # -- slow crews --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The first candidate again in a second crew, to begin in the faster one."""
        self.slots.replace_crew()
        self.check_crew()

    def check_crew(self) -> None:
        """Measure the canary in this new crew; leave it if slow, set aside an older slow crew's visits."""
        for _ in range(MAX_CREWS_TRIED):
            assert self.canary is not None
            for _ in range(2):  # one slow visit does not make a slow crew
                result = self.visit(Request(self.canary, "canary"), asked=False)
                if isinstance(result, Failure) or not self.is_slow(self.slots.group):
                    break
            if isinstance(result, Failure):
                self.canary = None  # works now and then: the next that works takes its place
                return
            if not self.is_slow(self.slots.group):
                self.slots.crew.proven = True
                for group in self.slow_groups():
                    self.set_aside(group, "slow mode")
                return
            self.set_aside(self.slots.group, "slow mode")
            self.slots.replace_crew()
        self.note(f"{MAX_CREWS_TRIED} new sets of processes in a row were slow: going on with this one")

    def canary_by_group(self) -> dict[int, float]:
        """The fastest visit to the canary in each crew, over all phases together."""
        assert self.canary is not None
        found: dict[int, float] = {}
        for visit in self.search.entries[self.canary].visits:
            total = sum(visit.times.average(phase) for phase in self.search.phases)
            found[visit.group] = min(total, found.get(visit.group, total))
        return found

    def is_slow(self, group: int) -> bool:
        seen = self.canary_by_group()
        return group in seen and seen[group] > SLOW_CREW * min(seen.values())

    def slow_groups(self) -> list[int]:
        return [group for group in self.canary_by_group() if self.is_slow(group)]

    # -- confirming --------------------------------------------------------------------------------------

    def confirm(self) -> bool:
        """True when the winners hold in a fresh crew; False to search on without what did not hold."""
        verdicts = {phase: self.search.verdict(phase) for phase in self.search.phases}
        winners = {phase: self.tuned.candidates[v.winner.index] for phase, v in verdicts.items()}
        expected = sum(v.winner.average_us for v in verdicts.values())
        ratios: list[float] = []
        has_died = False
        while len(ratios) < MAX_CREWS_TRIED:
            self.slots.replace_crew()
            result = self.slots.visit(winners)
            self.tuned.num_visits += 1
            if isinstance(result, Failure):
                if result.kind != "died" or has_died:
                    return self.winner_failed(verdicts, result)
                has_died = True  # killed by somebody, or for want of memory: its own fault shows again
                self.note(f"while the winner was confirmed: {result}; once more, in other processes")
                continue
            self.tuned.confirmed_us = {phase: result.average(phase) for phase in self.search.phases}
            ratios.append(sum(self.tuned.confirmed_us.values()) / expected)
            if 1 / SLOW_CREW <= ratios[-1] <= SLOW_CREW:
                self.slots.crew.proven = True
                return True
        ratio = sorted(ratios)[len(ratios) // 2]
        if ratio < 1 and not self.repeated:
            return self.repeat_all(ratio)
        took = ", ".join(f"{r:.2f}" for r in ratios)
        self.note(f"in fresh sets of processes the winner took {took} times what the sweep says")
        return True

    def winner_failed(self, verdicts: Mapping[str, Verdict], failure: Failure) -> bool:
        """Out with it. Where the phases' winners differ, the last phase's goes: each had worked alone."""
        index = list(verdicts.values())[-1].winner.index
        self.note(f"the winner {self.tuned.candidates[index]} failed when confirmed: {failure}")
        self.record(Request(index, "confirm"), failure, self.slots.group, asked=False, seconds=0.0)
        return False

    def repeat_all(self, ratio: float) -> bool:
        self.repeated = True
        groups = {visit.group for entry in self.search.entries for visit in entry.visits}
        for group in sorted(groups):
            self.set_aside(group, f"the winner takes {ratio:.2f} of the sweep's time in fresh processes")
        return False
