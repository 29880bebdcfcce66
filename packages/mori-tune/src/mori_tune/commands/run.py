"""`mori-tune run`: tune every problem that the options name, print, and save what may be saved."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from mori_tune import report
from mori_tune.commands.launch import crew_for, describe
from mori_tune.commands.options import refuse_quick_save, save_target
from mori_tune.device import Device
from mori_tune.errors import NoWinner, SaveRefused
from mori_tune.journal import Journal
from mori_tune.rules.format import Query
from mori_tune.rules.saving import save_rules
from mori_tune.settings import Settings, settings
from mori_tune.slots import Crew
from mori_tune.tunable import Problem, Tunable, load
from mori_tune.tuning import How, Slots, Tuned, tune

log = logging.getLogger("mori_tune")


def run(options: argparse.Namespace) -> int:
    """0: a winner for every problem. 1: some problem has none."""
    using = settings()
    how = how_of(options, using)
    target = save_target(options, using)
    refuse_quick_save(how.scope, target)
    tunable = load(options.op)
    watcher = report.Progress(verbose=options.verbose or using["MORI_EP_TUNING_VERBOSE"])
    num_saved, num_failed = 0, 0
    with crew_for(options) as crew:
        device, versions = describe(crew)
        problems = tunable.problems(options, device)
        for number, problem in enumerate(problems, 1):
            watcher.line(f"problem {number} of {len(problems)}")
            try:
                tuned = tune_one(tunable, problem, device, crew, how, watcher, using, options, versions)
            except NoWinner as error:
                num_failed += 1
                log.warning("%s", error)
                continue
            print(report.summary(tuned), flush=True)
            emit(tuned, tunable, options)
            if target is not None:
                num_saved += save(tuned, tunable, target)
    if options.trace:
        watcher.write_trace(options.trace)
    if num_saved == 0:
        log.warning("nothing saved: %s", why_nothing(target, num_failed))
    return 1 if num_failed or not problems else 0


def how_of(options: argparse.Namespace, using: Settings) -> How:
    """Options first, then the environment, then the defaults."""

    def pick(value: Any, name: str) -> Any:
        return using[name] if value is None else value

    rounds = pick(options.rounds, "MORI_EP_ROUNDS")
    if rounds <= options.warmup:
        raise SaveRefused(f"--reps {rounds} with --warmup {options.warmup} leaves no round to measure")
    return How(
        scope=pick(options.scope, "MORI_TUNING_SCOPE"),
        rounds=rounds,
        warmup=options.warmup,
        margin=pick(options.margin, "MORI_EP_TUNING_MARGIN"),
        budget=options.budget,
        limit_s=pick(options.limit, "MORI_TUNE_LIMIT_S"),
    )


def tune_one(
    tunable: Tunable,
    problem: Problem,
    device: Device,
    crew: Crew,
    how: How,
    watcher: report.Progress,
    using: Settings,
    options: argparse.Namespace,
    versions: dict[str, str],
) -> Tuned:
    space = tunable.space(problem, device)
    default = tunable.default(problem, device)
    phases = [format_.phase for format_ in tunable.formats]
    key = {
        "op": tunable.name,
        "problem": dict(problem.values),
        "device": device.as_dict(),
        "versions": versions,
        "space": space.name,
        "scope": how.scope,
        "rounds": how.rounds,
        "warmup": how.warmup,
        "margin": how.margin,
        "budget": how.budget,
        "world_size": crew.world_size,
        "seed": options.seed,
        "default": str(default),
        "candidates": [str(c) for c in space.candidates(how.scope)],
    }
    journal = Journal(using.journal_dir, key)
    if options.fresh:
        journal.forget()
    elif journal.events:
        age = report.clock(journal.age_s)
        watcher.line(f"resuming a sweep left {age} ago, from {journal.path} (--fresh starts over)")
    slots = Slots(crew, problem, device, phases, how, watcher)
    try:
        tuned = tune(problem, space, default, slots, journal, versions=versions)
    except NoWinner:
        journal.done()  # the next attempt tries all of them again
        raise
    journal.done()
    return tuned


def emit(tuned: Tuned, tunable: Tunable, options: argparse.Namespace) -> None:
    for phase in tuned.search.phases:
        line = report.result_json(tuned, phase, tunable.name, tuned.device.backend, tuned.wall_s * 1e6)
        print(line, flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(line + "\n")


def save(tuned: Tuned, tunable: Tunable, target: Path) -> int:
    """Writes one rule for each phase and prints each; only the winner of a full sweep gets here."""
    if tuned.how.scope != "full":
        raise SaveRefused(f"a sweep of scope {tuned.how.scope} is not saved")
    queries: list[Query] = [tunable.query(tuned.problem, f.phase, tuned.device) for f in tunable.formats]
    entries = [(query, report.rule_values(tuned, query)) for query in queries]
    changes = save_rules(entries, target, tunable.formats)
    for change in changes:
        print(change)
    print(f"saved to {target}", flush=True)
    return len(changes)


def why_nothing(target: Path | None, num_failed: int) -> str:
    if target is None:
        return "--save was not given"
    return f"{num_failed} problems have no winner" if num_failed else "no problems"
