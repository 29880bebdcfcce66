"""Finding the rule for a call, and saying so.

Where rules come from, first to last:
  1. the file or folder that MORI_<OP>_TUNING_CONFIG names; then nothing else is looked at,
  2. the user's folder, where `mori-tune run --save` writes,
  3. the folder `tuned/` of the *installed* package of the op.

`agreed_book` is what a collective op looks up in: the same rules on every rank, whatever files each can see.

A rule whose every key field equals the call's is a MATCH; the first place that has one wins. Everything else
is NO MATCH and is said once at WARNING, with the field that differs and with what stands in:
  exact       nothing: the op's built-in default
  nearest     (default) a rule for the same device, ranks, and exact fields: preferred fields are given up
              from the right; of the size the smallest at or above the call's, else the largest
  any-model   nearest, and where the device's model has no rule another model of its architecture
MORI_TUNE_LOOKUP chooses. MORI_<OP>_LAUNCH_CONFIG_MODE=MANUAL ignores all rules.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mori_tune.device import Device
from mori_tune.errors import RulesError
from mori_tune.rules.files import Rule, Table, identity, key_of, read_tables
from mori_tune.rules.format import Format, Query
from mori_tune.settings import Settings, settings, variable

log = logging.getLogger("mori_tune")
POLICIES = ("exact", "nearest", "any-model")


@dataclass(frozen=True)
class Decision:
    """What a lookup found. `params` is None where the op's built-in default has to serve."""

    query: Query
    outcome: str  # "MATCH", "NO MATCH" or "MANUAL"
    used: str  # "rule", "nearest" or "default"
    rule: Rule | None
    line: str  # the one line that says which file and rule won, or why none
    cause: tuple[Any, ...]  # decisions with the same cause are said once
    steps: tuple[str, ...]  # the whole way there, for `explain`

    @property
    def params(self) -> dict[str, Any] | None:
        return None if self.rule is None else self.query.format.params_in(self.rule.values)

    @property
    def is_match(self) -> bool:
        return self.outcome == "MATCH"


@dataclass(frozen=True)
class Layer:
    name: str
    path: Path | None
    tables: tuple[Table, ...]


class Book:
    """All rules of one op that this environment can see, read once."""

    def __init__(self, op: str, formats: Iterable[Format], package: str | None, using: Settings) -> None:
        self.op = op
        self.formats = {(f.op, f.phase): f for f in formats}
        self.policy: str = using["MORI_TUNE_LOOKUP"]
        self.manual = is_manual(op, using)
        explicit = per_op(using, op, "TUNING_CONFIG")
        if explicit is not None:
            places = [(variable(op, "TUNING_CONFIG"), explicit)]
        else:
            places = [("user folder", using.user_dir), (f"package {package}", package_data(package))]
        self.layers = [self.read_layer(name, path) for name, path in places]
        self._decided: dict[Any, Decision] = {}

    def read_layer(self, name: str, path: Path | None) -> Layer:
        files = [] if path is None or not path.exists() else rule_files(path)
        tables = [table for file in files for table in read_tables(file, self.formats)]
        self.refuse_twice(tables)
        return Layer(name, path, tuple(tables))

    def refuse_twice(self, tables: Sequence[Table]) -> None:
        """Two files of one folder with a rule for one key; within a file `read_tables` has refused it."""
        seen: dict[tuple[Any, ...], Rule] = {}
        for table in tables:
            format_ = self.formats[table.op, table.phase]
            for rule in table.rules:
                key = (*identity(table, format_), *key_of(rule.values, format_))
                if key in seen:
                    raise RulesError(f"two rules for one key: {seen[key].place} and {rule.place}; remove one")
                seen[key] = rule

    def decide(self, query: Query, policy: str | None = None) -> Decision:
        policy = policy or self.policy
        if policy not in POLICIES:
            raise RulesError(f"lookup policy {policy!r}: wanted one of {', '.join(POLICIES)}")
        memo = (policy, query.format.phase, query.device, *query.header.values(), *sorted_items(query.key))
        if memo not in self._decided:
            self._decided[memo] = decide(self, query, policy)
        return self._decided[memo]

    def look_up(self, query: Query, policy: str | None = None, *, manual: str | None = None) -> Decision:
        """The decision for one call, said once in this process; repeated calls cost a dictionary access.

        manual  why the caller wants no rule, where that is so
        """
        decision = by_hand(query, manual) if manual is not None else self.decide(query, policy)
        say(decision, settings()["MORI_TUNE_REPORT"])
        return decision

    def all_tables(self) -> list[tuple[Layer, Table]]:
        return [(layer, table) for layer in self.layers for table in layer.tables]

    def rules_for(self, query: Query) -> list[Rule]:
        """For this architecture and header: those that a lookup may come to, whatever its policy."""
        tables = [table for _, table in self.all_tables()]
        return [rule for table in tables if fits(table, query, ignore=("gpu_model",)) for rule in table.rules]

    def knows(self, device: Device) -> bool:
        """Whether any rule is for this architecture."""
        return any(t.rules and t.header["gpu_arch"] == device.arch for _, t in self.all_tables())

    def without_memory(self) -> Book:
        """A copy to be sent: what was decided here is not the receiver's."""
        other = copy.copy(self)
        other._decided = {}
        return other

    def content(self) -> tuple[Any, ...]:
        """What decisions depend on, as plain values that can be compared between ranks."""
        tables = [
            (t.op, tuple(sorted_items(t.header)), [sorted_items(r.values) for r in t.rules])
            for _, t in self.all_tables()
        ]
        return self.manual, self.policy, repr(tables)


def per_op(using: Settings, op: str, what: str) -> Any:
    """A setting that only ops with declared rules have; a tunable of a test has none."""
    try:
        return using[variable(op, what)]
    except KeyError:
        return None


def is_manual(op: str, using: Settings) -> bool:
    return bool(per_op(using, op, "LAUNCH_CONFIG_MODE") == "MANUAL")


def package_data(package: str | None) -> Path | None:
    """`tuned/` of the installed package, found without importing it."""
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "tuned"


def rule_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.glob("*.json") if p.is_file())


def sorted_items(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(values.items())


# -- the decision --------------------------------------------------------------------------------------


def decide(book: Book, query: Query, policy: str) -> Decision:
    name = f"{query.format.op} {query.format.phase}"
    steps = [f"{name}: asked for {query}", f"policy {policy}"]
    if book.manual:
        return by_hand(query, f"{variable(book.op, 'LAUNCH_CONFIG_MODE')}=MANUAL")
    for layer in book.layers:
        steps.append(describe_layer(layer, query))
        rule = exact_rule(layer, query)
        if rule is not None:
            line = f"{name}: MATCH {shown(rule, query)}{caution(rule)}"
            return Decision(query, "MATCH", "rule", rule, line, (name, rule.place), (*steps, line))
    fields, why = why_none(book, query)
    stand_in = (
        None if policy == "exact" else nearest_of(book, query, any_model=policy == "any-model", steps=steps)
    )
    if stand_in is None:
        line = f"{name}: NO MATCH ({why}): the built-in default is used"
        cause = (name, *query.full_header.values(), fields)
        return Decision(query, "NO MATCH", "default", None, line, cause, (*steps, line))
    line = f"{name}: NO MATCH ({why}): nearest rule stands in, {shown(stand_in, query)}{caution(stand_in)}"
    return Decision(
        query, "NO MATCH", "nearest", stand_in, line, (name, fields, stand_in.place), (*steps, line)
    )


def by_hand(query: Query, why: str) -> Decision:
    """No rule, by choice."""
    name = f"{query.format.op} {query.format.phase}"
    line = f"{name}: MANUAL: tuned rules ignored, since {why}"
    return Decision(
        query, "MANUAL", "default", None, line, (name, "MANUAL", why), (f"{name}: asked for {query}", line)
    )


def describe_layer(layer: Layer, query: Query) -> str:
    here = [t for t in layer.tables if t.phase == query.format.phase]
    fitting = [t for t in here if fits(t, query)]
    where = "no such folder" if layer.path is None or not layer.path.exists() else str(layer.path)
    return (
        f"{layer.name}: {where}: {sum(len(t.rules) for t in here)} rules of this phase, "
        f"{sum(len(t.rules) for t in fitting)} for this device and header"
    )


def fits(table: Table, query: Query, *, ignore: Sequence[str] = ()) -> bool:
    wanted = query.full_header
    return table.op == query.format.op and all(
        table.header[n] == wanted[n] for n in wanted if n not in ignore
    )


def fields_differing(rule: Rule, query: Query) -> list[str]:
    """Key fields in which the rule is not for this call; an absent wildcard is for all."""
    format_, values = query.format, rule.values
    return [
        name
        for name in format_.key
        if values.get(name) != query.key.get(name)
        and not (name in format_.wildcard and (values.get(name) is None or query.key.get(name) is None))
    ]


def exact_rule(layer: Layer, query: Query) -> Rule | None:
    rules = [r for t in layer.tables if fits(t, query) for r in t.rules if not fields_differing(r, query)]
    return min(rules, key=lambda rule: num_wildcards(rule, query), default=None)


def num_wildcards(rule: Rule, query: Query) -> int:
    return sum(rule.values.get(name) is None for name in query.format.wildcard)


def nearest_of(book: Book, query: Query, *, any_model: bool, steps: list[str]) -> Rule | None:
    """The first layer's nearest rule of this device; then, if allowed, that of another model."""
    for ignore in [(), ("gpu_model",)] if any_model else [()]:
        for layer in book.layers:
            rules = [r for t in layer.tables if fits(t, query, ignore=ignore) for r in t.rules]
            rule = nearest_rule(rules, query, steps)
            if rule is not None:
                return rule
    return None


def nearest_rule(rules: Sequence[Rule], query: Query, steps: list[str]) -> Rule | None:
    format_, size = query.format, query.key[query.format.size]
    same = [r for r in rules if all(r.values.get(n) == query.key[n] for n in format_.exact)]
    for kept in format_.passes(query.key):
        allowed = {n for n in format_.preferred if n not in kept} | {format_.size}
        found = [r for r in same if set(fields_differing(r, query)) <= allowed]
        steps.append(f"with {', '.join((*format_.exact, *kept))} equal: {len(found)} rules")
        if found:
            above = [r for r in found if r.values[format_.size] >= size]
            wanted = (min if above else max)(r.values[format_.size] for r in above or found)
            at_size = [r for r in above or found if r.values[format_.size] == wanted]
            return min(
                at_size, key=lambda r: (len(fields_differing(r, query)), num_wildcards(r, query), r.line)
            )
    return None


def why_none(book: Book, query: Query) -> tuple[tuple[str, ...], str]:
    """The rule that came closest: the fields in which it is for another call, and the same in words."""
    if not any(t.phase == query.format.phase and t.rules for _, t in book.all_tables()):
        places = ", ".join(f"{layer.name} {layer.path or '(none)'}" for layer in book.layers)
        return (), f"no rules for this phase in {places}"
    wanted, closest = query.full_header, None
    for _, table in book.all_tables():
        if table.phase != query.format.phase:
            continue
        other = [
            f"{n} asked {wanted[n]}, rule has {table.header[n]}"
            for n in wanted
            if table.header[n] != wanted[n]
        ]
        for rule in table.rules:
            fields = fields_differing(rule, query)
            named = [f"{n} asked {query.key.get(n)}, rule has {rule.values.get(n)}" for n in fields]
            distance = (
                len(other) + len(named),
                abs(rule.values[query.format.size] - query.key[query.format.size]),
            )
            if closest is None or distance < closest[0]:
                names = tuple(part.split()[0] for part in [*other, *named])
                closest = (distance, names, f"closest: {'; '.join([*other, *named])} at {rule.place}")
    assert closest is not None
    return closest[1], closest[2]


def shown(rule: Rule, query: Query) -> str:
    params = query.format.params_in(rule.values)
    return " ".join(f"{name}={value}" for name, value in params.items()) + f" from {rule.place}"


def caution(rule: Rule) -> str:
    return (
        " (a starting point from published numbers, not measured on this device by us)"
        if rule.published
        else ""
    )


# -- the calls an op makes -----------------------------------------------------------------------------


@functools.cache
def book_for(op: str, formats: tuple[Format, ...], package: str | None) -> Book:
    """The rules of this process: files are read at the first call and never again."""
    return Book(op, formats, package, settings())


def lookup(
    query: Query, *, formats: tuple[Format, ...], package: str | None, policy: str | None = None
) -> Decision:
    """The decision for one call, said once in this process; repeated calls cost one dictionary access."""
    return book_for(query.format.op, formats, package).look_up(query, policy)


def agreed_book(book: Book, device: Device, all_gather: Callable[[Any], list[Any]]) -> Book:
    """The same book on every rank: this rank's, or, where ranks see other rules, that of the lowest rank that
    has any for this device, since ranks that launched different geometries would wait for each other for
    ever. Collective."""
    every = all_gather(book.content())
    if all(content == every[0] for content in every):
        return book
    books: list[Book] = all_gather(book.without_memory())
    chosen = next((rank for rank, b in enumerate(books) if b.knows(device) and not b.manual), 0)
    differing = [rank for rank, content in enumerate(every) if content != every[chosen]]
    line = f"{book.op}: ranks {differing} see other rules than rank {chosen}, whose are used"
    if is_news((line,)):
        log.warning("%s", line)
    return books[chosen]


_said: set[tuple[Any, ...]] = set()


def is_news(cause: tuple[Any, ...]) -> bool:
    """Whether this was not said yet in this process, and this process is the one that speaks."""
    if cause in _said:
        return False
    _said.add(cause)
    return os.environ.get("LOCAL_RANK", "0") == "0"


def say(decision: Decision, report: str) -> None:
    """One line a rule and reason, on a machine's first rank: misses at WARNING, matches to stderr."""
    if not is_news(decision.cause):
        return
    if report == "full":
        print("\n".join(f"mori-tune: {step}" for step in decision.steps), file=sys.stderr)
    elif decision.outcome == "NO MATCH":
        log.warning("%s", decision.line)
    elif report == "line":
        print(f"mori-tune: {decision.line}", file=sys.stderr)


def agree(decision: Decision, all_gather: Callable[[Any], list[Any]]) -> Decision:
    """One decision for all ranks: the lowest rank that has a MATCH, else the lowest that has any rule.

    Collective. Ranks may see different files; ranks that launched different geometries would wait for ever.
    """
    mine = (decision.outcome, decision.used, decision.params, decision.line)
    every = all_gather(mine)
    if all(other[2] == decision.params for other in every):
        return decision
    order = {"rule": 0, "nearest": 1, "default": 2}
    chosen = min(range(len(every)), key=lambda rank: (order[every[rank][1]], rank))
    outcome, used, params, line = every[chosen]
    differing = [rank for rank, other in enumerate(every) if other[2] != params]
    line = f"{line} (from rank {chosen}; ranks {differing} found other rules)"
    log.warning("%s", line)
    rule = None if params is None else Rule(params, Path(f"<rank {chosen}>"), 0)
    return Decision(decision.query, outcome, used, rule, line, ("agreed", line), (*decision.steps, line))
