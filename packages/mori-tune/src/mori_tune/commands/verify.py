"""`mori-tune verify`: do saved rules take effect, and is what they launch right?

First, for each phase, how many rules there are, of which dtypes, with which dtype one was looked up, and
MATCH or NO MATCH: a phase that fell back to anything else is never called verified, however well it runs.
Then the geometries run, the phases' own together as the op would launch them, with their output compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from mori_tune.commands.launch import crew_for, describe
from mori_tune.device import Device
from mori_tune.rules.book import Book, Decision, fits
from mori_tune.search import Failure
from mori_tune.settings import settings
from mori_tune.spaces import Candidate, Space
from mori_tune.tunable import Problem, Tunable, load
from mori_tune.tuning import How, Slots, Watcher

ROUNDS = 3


def verify(options: argparse.Namespace) -> int:
    """0: every phase of every problem has an exact rule whose output is right. 1: not so."""
    tunable = load(options.op)
    book = book_of(tunable, options.file)
    how = How(rounds=ROUNDS, limit_s=options.limit or settings()["MORI_TUNE_LIMIT_S"])
    phases = [format_.phase for format_ in tunable.formats]
    good = True
    with crew_for(options) as crew:
        device, _ = describe(crew)
        problems = tunable.problems(options, device)
        for problem in problems:
            print(f"{problem}   on {device}, {crew.world_size} ranks", flush=True)
            slots = Slots(crew, problem, device, phases, how, Watcher())
            good = verify_one(tunable, problem, device, book, slots) and good
    verdict = "all phases of all problems verified" if good and problems else "NOT verified"
    print(verdict, flush=True)
    return 0 if good and problems else 1


def book_of(tunable: Tunable, file: str | None) -> Book:
    """The rules an op would find here, or those of one file alone."""
    book = Book(tunable.name, tunable.formats, tunable.package, settings())
    book.manual = False  # what is asked here is what the files hold
    if file is not None:
        book.layers = [book.read_layer("--file", Path(file))]
    return book


def verify_one(tunable: Tunable, problem: Problem, device: Device, book: Book, slots: Slots) -> bool:
    space = tunable.space(problem, device)
    decisions = {
        f.phase: book.decide(tunable.query(problem, f.phase, device), "exact") for f in tunable.formats
    }
    for phase, decision in decisions.items():
        print(f"  {phase} {counted(book, decision)}", flush=True)
    matched = {p: candidate_of(d, space) for p, d in decisions.items() if d.is_match}
    reasons = {p: space.why_invalid(c) for p, c in matched.items()}
    for phase, reason in reasons.items():
        if reason is not None:
            print(f"  {phase}: NOT verified: the rule is not valid on {device}: {reason}", flush=True)
    runnable = {p: c for p, c in matched.items() if reasons[p] is None}
    good = run_them(runnable, tunable.default(problem, device), decisions, slots) if runnable else False
    for phase, decision in decisions.items():
        if not decision.is_match:
            print(f"  {phase}: NOT verified: {decision.line}", flush=True)
    return good and len(runnable) == len(decisions)


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


def candidate_of(decision: Decision, space: Space) -> Candidate:
    """The rule's values in the order of the space, so that they are the candidate that was tuned."""
    params = decision.params or {}
    order = [p.name for p in space.parameters if p.name in params]
    return Candidate.of({name: params[name] for name in [*order, *(n for n in params if n not in order)]})


def run_them(
    runnable: Mapping[str, Candidate],
    default: Candidate | None,
    decisions: Mapping[str, Decision],
    slots: Slots,
) -> bool:
    """One visit with each phase's own candidate; phases without one run with the default or a neighbour's."""
    stand_in = default or next(iter(runnable.values()))
    result = slots.visit({phase: runnable.get(phase, stand_in) for phase in decisions})
    if isinstance(result, Failure):
        for phase in runnable:
            print(f"  {phase}: NOT verified: {result}", flush=True)
        return False
    for phase, candidate in runnable.items():
        rule = decisions[phase].rule
        saved = (
            ""
            if rule is None or "latency_us" not in rule.values
            else f" (saved: {rule.values['latency_us']} us)"
        )
        took = f"{result.average(phase):.2f} us{saved}"
        print(f"  {phase}: verified: {candidate}: output equals the reference, {took}", flush=True)
    return True
