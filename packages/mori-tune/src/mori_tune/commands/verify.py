"""`mori-tune verify`: do saved rules take effect, and is what they launch right?

First, for each phase, how many rules there are, of which dtypes, with which dtype one was looked up, and
MATCH or NO MATCH: a phase that fell back to anything else is never called verified, however well it runs.
Then the geometries run, the phases' own together as the op would launch them, with their output compared.
With --in-turns N they are then timed beside the op's default; a rule that is slower there is not verified.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mori_tune.commands.in_turns import compare_in_turns
from mori_tune.commands.launch import crew_for, describe, prepare, refuse_impossible
from mori_tune.device import Device
from mori_tune.errors import LaunchError, RulesError, SettingError
from mori_tune.rows import emit, result_row
from mori_tune.rules.book import Book, Decision, fits
from mori_tune.search import Failure, Times
from mori_tune.settings import settings
from mori_tune.slots import Crew
from mori_tune.spaces import Candidate, Space
from mori_tune.tunable import ChecksRules, Problem, Tunable, load
from mori_tune.tuning import How, Slots, Watcher

ROUNDS = 3


def verify(options: argparse.Namespace) -> int:
    """0: every phase of every problem has an exact rule whose output is right. 1: not so."""
    tunable = load(options.op)
    book = book_of(tunable, options.file)
    how = How(
        rounds=options.rounds or ROUNDS,
        warmup=options.warmup,
        limit_s=options.limit or settings()["MORI_TUNE_LIMIT_S"],
    )
    if how.rounds <= how.warmup:
        raise SettingError(f"--reps {how.rounds} with --warmup {how.warmup} leaves no round to measure")
    prepare(tunable, options)
    with crew_for(options) as crew:
        device, versions = describe(crew)
        refuse_impossible(tunable, options, (device.backend,))
        check = Check(tunable, book, device, versions, how, options.json, options.in_turns)
        good = [check.problem(problem, crew) for problem in tunable.problems(options, device)]
    verified = bool(good) and all(good)
    print("all phases of all problems verified" if verified else "NOT verified", flush=True)
    return 0 if verified else 1


def book_of(tunable: Tunable, file: str | None) -> Book:
    """The rules an op would find here, or those of one file alone."""
    book = Book(tunable.name, tunable.formats, tunable.package, settings())
    book.manual = False  # what is asked here is what the files hold
    if file is not None:
        book.layers = [book.read_layer("--file", Path(file))]
    return book


@dataclass
class Check:
    """Verifies one problem after another with the same ranks."""

    tunable: Tunable
    book: Book
    device: Device
    versions: Mapping[str, str]
    how: How
    json_file: str | None
    num_in_turns: int = 0

    def problem(self, problem: Problem, crew: Crew) -> bool:
        print(f"{problem}   on {self.device}, {crew.world_size} ranks", flush=True)
        space = self.tunable.space(problem, self.device)
        decisions = {}
        for format_ in self.tunable.formats:
            query = self.tunable.query(problem, format_.phase, self.device)
            decisions[format_.phase] = decision = self.book.decide(query, "exact")
            print(f"  {format_.phase} {counted(self.book, decision)}", flush=True)
        runnable = {p: candidate_of(d, space) for p, d in decisions.items() if d.is_match}
        found = {
            p: why_refused(self.tunable, decisions[p]) or space.why_invalid(c) for p, c in runnable.items()
        }
        reasons = {phase: reason for phase, reason in found.items() if reason is not None}
        runnable = {p: c for p, c in runnable.items() if p not in reasons}
        result = self.launch(problem, runnable, decisions, crew) if runnable else None
        good = True
        for phase, decision in decisions.items():
            times, said = judge(phase, decision, runnable, reasons, result)
            print(f"  {phase}: {said}", flush=True)
            emit(self.row(problem, phase, times, crew.world_size), self.json_file)
            good = good and times is not None
        if good and self.num_in_turns:
            good = self.in_turns(problem, runnable, crew)
        return good

    def in_turns(self, problem: Problem, rules: Mapping[str, Candidate], crew: Crew) -> bool:
        """Print how the rules compare with the default; false if one is slower."""
        default = self.tunable.default(problem, self.device)
        if default is None:
            print("  in turns: this op has no default to compare with", flush=True)
            return True
        phases = [format_.phase for format_ in self.tunable.formats]
        slots = Slots(crew, problem, self.device, phases, self.how, Watcher())
        try:
            comparisons = compare_in_turns(slots, rules, default, self.num_in_turns)
        except LaunchError as failed:
            print(f"  in turns: NOT verified: {failed}", flush=True)
            return False
        for phase in phases:
            found = next((c for c in comparisons if c.phase == phase), None)
            print(f"  {found or f'{phase} in turns: the rule is the default, {default}'}", flush=True)
        return all(c.verdict != "SLOWER" for c in comparisons)

    def launch(
        self,
        problem: Problem,
        runnable: Mapping[str, Candidate],
        decisions: Mapping[str, Decision],
        crew: Crew,
    ) -> Times | Failure:
        """One visit with each phase's own candidate; a phase without one takes the default or another's."""
        stand_in = self.tunable.default(problem, self.device) or next(iter(runnable.values()))
        slots = Slots(crew, problem, self.device, list(decisions), self.how, Watcher())
        return slots.visit({phase: runnable.get(phase, stand_in) for phase in decisions})

    def row(self, problem: Problem, phase: str, times: Times | None, world_size: int) -> dict[str, object]:
        return result_row(
            op=self.tunable.name,
            device=self.device,
            world_size=world_size,
            mode=f"verify-{phase}",
            problem=problem,
            phase=phase,
            kept=[] if times is None else [times],
            slow_us=[],
            spread=None,
            rounds=self.how.rounds,
            warmup=self.how.warmup,
            versions=self.versions,
            validated=times is not None,
            extra={},
        )


def judge(
    phase: str,
    decision: Decision,
    runnable: Mapping[str, Candidate],
    reasons: Mapping[str, str],
    result: Times | Failure | None,
) -> tuple[Times | None, str]:
    """The times if the phase is verified, and what to say of it."""
    if not decision.is_match:
        return None, f"NOT verified: {decision.line}"
    if phase in reasons:
        return None, f"NOT verified: the rule is not valid here: {reasons[phase]}"
    if not isinstance(result, Times):
        return None, f"NOT verified: {result}"
    saved = "" if decision.rule is None else decision.rule.values.get("latency_us", "")
    took = f"{result.average(phase):.2f} us" + (f" (saved: {saved} us)" if saved else "")
    return result, f"verified: {runnable[phase]}: output equals the reference, {took}"


def counted(book: Book, decision: Decision) -> str:
    """`rules: 4 (dtypes: bf16, fp8) queried with fp8 -> MATCH`; the first exact field names the types."""
    query = decision.query
    field = query.format.exact[0]
    rules = [r for _, table in book.all_tables() if fits(table, query) for r in table.rules]
    seen = ", ".join(sorted({str(r.values[field]) for r in rules})) or "none"
    found = (
        f"MATCH at {decision.rule.place}" if decision.rule is not None and decision.is_match else "NO MATCH"
    )
    return f"rules: {len(rules)} ({field}s: {seen}) queried with {query.key[field]} -> {found}"


def why_refused(tunable: Tunable, decision: Decision) -> str | None:
    """The words in which the op would refuse the rule of a decision, or None."""
    if not isinstance(tunable, ChecksRules) or decision.rule is None or decision.params is None:
        return None
    try:
        tunable.check_rule(decision.query.format.phase, decision.params, decision.rule.place)
    except RulesError as refusal:
        return str(refusal)
    return None


def candidate_of(decision: Decision, space: Space) -> Candidate:
    """The rule's values in the order of the space, so that they are the candidate that was tuned."""
    params = decision.params or {}
    order = [p.name for p in space.parameters if p.name in params]
    return Candidate.of({name: params[name] for name in [*order, *(n for n in params if n not in order)]})
