"""Reading rule files: every rule keeps its file and line, and no fault in a file passes without a word.

    {"version": "2.0", "op": "ep", "gpu_arch": ..., "gpu_model": ..., "phase": "dispatch", "rules": [{...}]}
    {"version": "2.0", "tables": [{"op": "ep", ..., "rules": [...]}, ...]}      several tables in one file

Not JSON, or two rules for one key: the file is refused, with the lines. A rule that lacks a field or has one
of the wrong type: that rule is left out, at WARNING. A version that nobody here knows: no rules, at WARNING.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mori_tune.errors import RulesError
from mori_tune.rules.format import DEVICE_FIELDS, OLDER_VERSIONS, VERSION, Format

log = logging.getLogger("mori_tune")


@dataclass(frozen=True)
class Rule:
    values: Mapping[str, Any]
    path: Path
    line: int

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def published(self) -> bool:
        """Taken from published numbers as a starting point, never measured by whoever ships it."""
        provenance = self.values.get("provenance")
        return isinstance(provenance, Mapping) and provenance.get("origin") == "published"


@dataclass(frozen=True)
class Table:
    op: str
    header: Mapping[str, Any]  # everything beside version, op and rules
    rules: tuple[Rule, ...]
    path: Path
    version: str = VERSION
    left_out: tuple[str, ...] = field(default=())  # rules without effect, and why

    @property
    def phase(self) -> str:
        return str(self.header.get("phase"))


def read_tables(path: Path, formats: Mapping[tuple[str, str], Format]) -> list[Table]:
    """The tables of one file whose (op, phase) is in `formats`; others are somebody else's."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RulesError(f"{path}: cannot be read: {error}") from error
    top = parse(text, path)
    version = top["version"]
    if version != VERSION and version not in OLDER_VERSIONS:
        known = ", ".join((VERSION, *OLDER_VERSIONS))
        log.warning(
            "%s has rule format version %s, this mori-tune reads %s: no rule taken from it",
            path,
            version,
            known,
        )
        return []
    found = []
    for block in top["blocks"]:
        op, phase = (
            str(block.get("op", "ep")),
            str(block.get("phase")),
        )  # older files are EP's and do not say so
        if (op, phase) in formats:
            found.append(make_table(block, op, formats[op, phase], path, version))
    refuse_duplicates(found, formats)
    return found


def make_table(block: Mapping[str, Any], op: str, format_: Format, path: Path, version: str) -> Table:
    wanted = (*DEVICE_FIELDS, *format_.header)
    missing = [name for name in wanted if name not in block]
    if missing:
        raise RulesError(f"{path}: a table of {op} {format_.phase} lacks {', '.join(missing)}")
    odd = [name for name in wanted if not isinstance(block[name], (str, int))]
    if odd:
        raise RulesError(f"{path}: {odd[0]} is {block[odd[0]]!r}, wanted a word or a whole number")
    header = {name: value for name, value in block.items() if name not in ("version", "op", "rules")}
    rules, left_out = [], []
    for values, line in block["rules"]:
        problem = what_is_wrong(values, format_)
        if problem is None:
            rules.append(Rule(values, path, line))
        else:
            left_out.append(f"{path}:{line}: {problem}")
            log.warning("%s:%d: rule left out: %s", path, line, problem)
    return Table(op, header, tuple(rules), path, version, tuple(left_out))


def what_is_wrong(values: Mapping[str, Any], format_: Format) -> str | None:
    missing = [n for n in (*format_.key, *format_.params) if n not in values and n not in format_.wildcard]
    if missing:
        return f"lacks {', '.join(missing)}"
    odd = [n for n in format_.key if not isinstance(values.get(n), (str, int, float, bool, type(None)))]
    if odd:
        return f"{odd[0]} is {values[odd[0]]!r}, wanted a single value"
    size = values[format_.size]
    if not is_count(size):
        return f"{format_.size} is {size!r}, wanted a whole number of at least 0"
    for name, value in format_.params_in(values).items():
        if not is_count(value) and not (isinstance(value, str) and value):
            return f"{name} is {value!r}, wanted a whole number of at least 0 or a word"
    return None


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def key_of(values: Mapping[str, Any], format_: Format) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in format_.key)


def identity(table: Table, format_: Format) -> tuple[Any, ...]:
    return (table.op, table.phase, *(table.header[name] for name in (*DEVICE_FIELDS, *format_.header)))


def refuse_duplicates(tables: list[Table], formats: Mapping[tuple[str, str], Format]) -> None:
    """Two rules for one key leave it to chance which is used; nobody wrote both on purpose."""
    seen: dict[tuple[Any, ...], Rule] = {}
    for table in tables:
        format_ = formats[table.op, table.phase]
        for rule in table.rules:
            key = (*identity(table, format_), *key_of(rule.values, format_))
            if key in seen:
                fields = dict(zip(format_.key, key_of(rule.values, format_), strict=True))
                named = " ".join(f"{name}={value}" for name, value in fields.items())
                raise RulesError(
                    f"two rules for {table.op} {table.phase} {named}: {seen[key].place} and {rule.place}"
                )
            seen[key] = rule


RULE_DEPTHS = (["{", "[rules"], ["{", "[tables", "{", "[rules"])
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]')


def rule_lines(text: str) -> list[int]:
    """The line on which each rule of each table begins, in document order."""
    lines: list[int] = []
    inside: list[str] = []  # what is open, each with the name it stands under
    name = ""
    for token in TOKEN.finditer(text):
        kind = token[0]
        if kind == "{" and inside in RULE_DEPTHS:
            lines.append(text.count("\n", 0, token.start()) + 1)
        if kind in "{[":
            inside.append(kind + name)
        elif kind in "}]" and inside:
            inside.pop()
        name = json.loads(kind) if kind.startswith('"') else ""
    return lines


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def parse(text: str, path: Path) -> dict[str, Any]:
    """The document; in it the elements of every list of rules are (rule, line) pairs."""
    try:
        top = json.loads(text, object_pairs_hook=once_each)
    except json.JSONDecodeError as error:
        raise RulesError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise RulesError(f"{path}: not a rule file: {error}") from error
    if not isinstance(top, dict):
        raise RulesError(f"{path}:1: a rule file is an object, this is a {type(top).__name__}")
    lines = iter(rule_lines(text))
    blocks = top.get("tables", [top])
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RulesError(f'{path}: "tables" must be a list of objects')
    for block in blocks:
        rules = block.get("rules")
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise RulesError(f'{path}: a table\'s "rules" must be a list of objects')
        block["rules"] = [(rule, next(lines)) for rule in rules]
    return {"version": str(top.get("version")), "blocks": blocks}
