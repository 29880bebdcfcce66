"""`mori-tune run`: tune every problem that the options name, print, and save what may be saved."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mori_tune import report
from mori_tune.commands.launch import crew_for, describe, prepare, refuse_impossible
from mori_tune.commands.options import refuse_quick_save, save_target
from mori_tune.device import Device
from mori_tune.errors import NoWinner, SaveRefused, SettingError, SpaceError
from mori_tune.journal import Journal
from mori_tune.rows import emit
from mori_tune.rules.format import Query
from mori_tune.rules.saving import check_target, save_rules
from mori_tune.settings import Settings, settings
from mori_tune.slots import Crew
from mori_tune.spaces import Space
from mori_tune.tunable import Problem, Tunable, load
from mori_tune.tuning import How, Slots, Tuned, tune

log = logging.getLogger("mori_tune")


def run(options: argparse.Namespace) -> int:
    """0: a winner for every problem. 1: some problem has none."""
    using = settings()
    how = how_of(options, using)
    target = save_target(options, using)
    refuse_quick_save(how.scope, target)
    check_writable(options.json, options.trace)
    check_can_save(target)
    watcher = report.Progress(verbose=options.verbose or using["MORI_EP_TUNING_VERBOSE"])
    tunable = load(options.op)
    prepare(tunable, options)
    batch = Batch(tunable, options, using, how, target, watcher)
    with crew_for(options) as crew:
        batch.run(crew)
    if options.trace:
        watcher.write_trace(options.trace)
    if batch.num_saved == 0:
        log.warning("nothing saved: %s", batch.why_nothing())
    return 1 if batch.num_failed or not batch.num_tuned else 0


def how_of(options: argparse.Namespace, using: Settings) -> How:
    """Options first, then the environment, then the defaults."""

    def pick(value: Any, name: str) -> Any:
        return using[name] if value is None else value

    rounds = pick(options.rounds, "MORI_EP_ROUNDS")
    if rounds <= options.warmup:
        raise SettingError(f"--reps {rounds} with --warmup {options.warmup} leaves no round to measure")
    return How(
        scope=pick(options.scope, "MORI_TUNING_SCOPE"),
        rounds=rounds,
        warmup=options.warmup,
        margin=pick(options.margin, "MORI_EP_TUNING_MARGIN"),
        budget=options.budget,
        limit_s=pick(options.limit, "MORI_TUNE_LIMIT_S"),
    )


def check_writable(*paths: str | None) -> None:
    """Now rather than after the sweep."""
    for path in paths:
        if path is not None:
            with open(path, "a"):
                pass


def check_can_save(target: Path | None) -> None:
    """Likewise. A folder that is missing is not made yet."""
    if target is None:
        return
    folder = (target.parent if target.suffix else target).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise SaveRefused(
            f"--save {target}: nothing can be written in {folder} ({error.strerror}): name another folder "
            "or file"
        ) from error


@dataclass
class Batch:
    """The problems of one command, tuned one after another by the same ranks."""

    tunable: Tunable
    options: argparse.Namespace
    using: Settings
    how: How
    target: Path | None
    watcher: report.Progress
    num_tuned: int = 0
    num_failed: int = 0
    num_saved: int = 0

    def run(self, crew: Crew) -> None:
        device, versions = describe(crew)
        refuse_impossible(self.tunable, self.options, (device.backend,))
        problems = self.tunable.problems(self.options, device)
        queries = [self.queries(problem, device) for problem in problems]
        if self.target is not None:
            check_target([q for of_problem in queries for q in of_problem], self.target, self.tunable.formats)
        for number, problem in enumerate(problems, 1):
            self.watcher.line(f"problem {number} of {len(problems)}")
            try:
                tuned = self.tune_one(problem, crew, device, versions)
            except NoWinner as error:
                self.num_failed += 1
                log.warning("%s", error)
                continue
            self.num_tuned += 1
            print(report.summary(tuned), flush=True)
            if self.target is not None:
                self.save(tuned, queries[number - 1], self.target)
            self.emit(tuned)

    def queries(self, problem: Problem, device: Device) -> list[Query]:
        return [self.tunable.query(problem, f.phase, device) for f in self.tunable.formats]

    def tune_one(self, problem: Problem, crew: Crew, device: Device, versions: dict[str, str]) -> Tuned:
        space = self.tunable.space(problem, device)
        refuse_unsaved_parameters(space, self.tunable)
        default = self.tunable.default(problem, device)
        phases = [format_.phase for format_ in self.tunable.formats]
        key = {
            "op": self.tunable.name,
            "problem": dict(problem.values),
            "device": device.as_dict(),
            "versions": versions,
            "scope": self.how.scope,
            "rounds": self.how.rounds,
            "warmup": self.how.warmup,
            "margin": self.how.margin,
            "budget": self.how.budget,
            "world_size": crew.world_size,
            "seed": self.options.seed,
            "default": str(default),
            "candidates": [str(c) for c in space.candidates(self.how.scope)],
        }
        with closing(Journal(self.using.journal_dir, key)) as journal:
            self.announce(journal)
            slots = Slots(crew, problem, device, phases, self.how, self.watcher)
            try:
                tuned = tune(problem, space, default, slots, journal, versions=versions)
            except NoWinner:
                journal.done()  # the next attempt tries all of them again
                raise
            journal.done()
        return tuned

    def announce(self, journal: Journal) -> None:
        if self.options.fresh:
            journal.keep(0)
        elif journal.events:
            age = report.clock(journal.age_s)
            self.watcher.line(f"resuming a sweep left {age} ago, from {journal.path} (--fresh starts over)")

    def save(self, tuned: Tuned, queries: Sequence[Query], target: Path) -> None:
        """One rule for each phase, each printed; only the winner of a full sweep gets here."""
        if tuned.how.scope != "full":
            raise SaveRefused(f"a sweep of scope {tuned.how.scope} is not saved")
        entries = [(query, report.rule_values(tuned, query, self.tunable)) for query in queries]
        changes = save_rules(entries, target, self.tunable.formats)
        for change in changes:
            print(change)
        print(f"saved to {target}", flush=True)
        self.num_saved += len(changes)

    def emit(self, tuned: Tuned) -> None:
        for phase in tuned.search.phases:
            emit(report.row_of(tuned, phase, self.tunable.name), self.options.json)

    def why_nothing(self) -> str:
        if self.target is None:
            return "--save was not given"
        return f"{self.num_failed} problems have no winner" if self.num_failed else "no problems"


def refuse_unsaved_parameters(space: Space, tunable: Tunable) -> None:
    """A parameter that no rule can hold would be tuned and then lost."""
    for format_ in tunable.formats:
        lost = [p.name for p in space.parameters if p.name not in (*format_.params, *format_.mode_params)]
        if lost:
            raise SpaceError(
                f"space {space.name} tunes {', '.join(lost)}, which rules of {format_.phase} lack"
            )
