"""`mori-tune show`, `explain` and `diff`: which rules there are, which a call gets and why, what changed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from mori_tune.commands.launch import DEFAULT_WORLD_SIZE, refuse_impossible
from mori_tune.commands.verify import book_of
from mori_tune.errors import RulesError, TuneError
from mori_tune.rules.book import is_manual, rule_files
from mori_tune.rules.files import read_tables
from mori_tune.rules.format import EP_COMBINE, EP_DISPATCH, GEMM_AR, Format
from mori_tune.rules.saving import changes_between, describe_header, figures, geometry
from mori_tune.settings import settings
from mori_tune.tunable import ChecksRules, available, load

BUILT_IN = (EP_DISPATCH, EP_COMBINE, GEMM_AR)


def show(options: argparse.Namespace) -> int:
    """All rules of an op, by the place they come from; or, with --settings, every setting in effect."""
    if options.settings:
        for one in settings().effective():
            print(f"{one.name}={one.value}   ({one.origin}; {one.allowed}; {one.doc})")
        return 0
    if options.op is None:
        raise TuneError("show: wanted --op NAME, or --settings")
    tunable = load(options.op)
    if options.file is not None and not Path(options.file).exists():
        raise RulesError(f"{options.file}: no such file or folder")
    book = book_of(tunable, options.file)
    for layer in book.layers:
        print(
            f"{layer.name}: {layer.path or 'not installed'}: {sum(len(t.rules) for t in layer.tables)} rules"
        )
        for table in layer.tables:
            format_ = book.formats[table.op, table.phase]
            print(f"  {describe_header(table.header)}   {table.path}")
            for rule in table.rules:
                key = " ".join(f"{n}={rule.values[n]}" for n in format_.key if n in rule.values)
                numbers = "".join(f", {name} {value}" for name, value in figures(rule.values))
                origin = ", published, not measured by us" if rule.published else ""
                print(f"    {rule.line}: {key}: {geometry(rule.values, format_)}{numbers}{origin}")
    return 0


def explain(options: argparse.Namespace) -> int:
    """The whole decision for each problem and phase. 0: all MATCH. 1: some not. RulesError where the op would
    refuse a rule that its lookups may come to."""
    tunable = load(options.op)
    device = options.device or tunable.device(options.backend)
    book = book_of(tunable, options.file)
    book.manual = options.file is None and is_manual(tunable.name, settings())
    if options.world_size is None:
        options.world_size = DEFAULT_WORLD_SIZE
    refuse_impossible(tunable, options, (device.backend,))
    matched = []
    for problem in tunable.problems(options, device):
        for format_ in tunable.formats:
            query = tunable.query(problem, format_.phase, device)
            if isinstance(tunable, ChecksRules):
                for rule in book.rules_for(query):
                    tunable.check_rule(format_.phase, format_.params_in(rule.values), rule.place)
            decision = book.decide(query, options.policy)
            print("\n".join([decision.steps[0], *(f"  {step}" for step in decision.steps[1:])]))
            matched.append(decision.is_match)
    return 0 if matched and all(matched) else 1


def diff(options: argparse.Namespace) -> int:
    """ADDED, REPLACED and REMOVED rules between two files or folders. 0: no difference, 1: some."""
    formats = all_formats()
    old, new = (
        [table for path in existing(place) for table in read_tables(path, formats)]
        for place in (options.old, options.new)
    )
    changes = changes_between(old, new, formats)
    for change in changes:
        print(f"{describe_header(change.header)}: {change}")
    if not changes:
        print("no difference", file=sys.stderr)
    return 1 if changes else 0


def existing(place: str) -> list[Path]:
    if not Path(place).exists():
        raise RulesError(f"{place}: no such file or folder")
    return rule_files(Path(place))


def all_formats() -> Mapping[tuple[str, str], Format]:
    """Of the ops known here, and of those installed; one that cannot be loaded only lacks its own rules."""
    found = {(f.op, f.phase): f for f in BUILT_IN}
    for name in available():
        try:
            found |= {(f.op, f.phase): f for f in load(name).formats}
        except TuneError as error:
            print(f"mori-tune: {error}", file=sys.stderr)
    return found
