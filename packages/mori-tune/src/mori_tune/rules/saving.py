"""Writing rules: always overwrites the rule of the same key, always says what changed, never half a file.

There is no gate that keeps the better of two runs: it would compare machines, versions and loads rather
than geometries. What is printed, and the file's diff, is where the call gets made.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mori_tune.errors import RulesError, SaveRefused
from mori_tune.rules.files import Table, identity, key_of, read_tables
from mori_tune.rules.format import DEVICE_FIELDS, VERSION, Format, Query

METRIC = "grand_mean"  # the mean over rounds of the mean over ranks, for latency and bandwidth alike


@dataclass(frozen=True)
class Change:
    """One rule before and after; `old` is None for a new one, `new` for one that is gone."""

    format: Format
    header: Mapping[str, Any]
    old: Mapping[str, Any] | None
    new: Mapping[str, Any] | None

    def __str__(self) -> str:
        rule = self.new if self.new is not None else self.old
        assert rule is not None
        kind = "ADDED" if self.old is None else "REMOVED" if self.new is None else "REPLACED"
        key = " ".join(f"{n}={rule[n]}" for n in self.format.key if rule.get(n) is not None)
        text = f"{kind} {self.format.op} {self.format.phase} {key}: "
        if self.old is None or self.new is None:
            return (
                text
                + geometry(rule, self.format)
                + "".join(f", {name} {value}" for name, value in figures(rule))
            )
        text += f"{geometry(self.old, self.format)} -> {geometry(self.new, self.format)}"
        return text + "".join(f", {part}" for part in compare_figures(self.old, self.new))


def geometry(rule: Mapping[str, Any], format_: Format) -> str:
    return " ".join(f"{name}={value}" for name, value in format_.params_in(rule).items())


def latency(rule: Mapping[str, Any]) -> Any:
    return rule.get("latency_us", rule.get("avg_latency_us"))


def figures(rule: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [("latency", latency(rule), "us"), ("bandwidth", rule.get("bandwidth_gbps"), "GB/s")]
    return [(name, f"{number(value)} {unit}") for name, value, unit in pairs if value is not None]


def number(value: Any) -> str:
    return f"{value:.4g}" if is_number(value) else repr(value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def compare_figures(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Both numbers; a percentage only where both were measured by the same definition."""
    same_metric = old.get("bandwidth_metric") == new.get("bandwidth_metric")
    pairs = [("latency", latency(old), latency(new), "us", -1)]
    pairs.append(("bandwidth", old.get("bandwidth_gbps"), new.get("bandwidth_gbps"), "GB/s", +1))
    for name, before, after, unit, better in pairs:
        if before is None and after is None:
            continue
        text = f"{name} {number(before)} -> {number(after)} {unit}"
        if not same_metric:
            text += (
                f" (metric {old.get('bandwidth_metric')} -> {new.get('bandwidth_metric')}: not comparable)"
            )
        elif is_number(before) and is_number(after) and before > 0:
            change = after / before - 1
            word = "same" if change == 0 else "better" if change * better > 0 else "worse"
            text += f" ({abs(change):.1%} {word})"
        yield text


def changes_between(
    old: Iterable[Table], new: Iterable[Table], formats: Mapping[tuple[str, str], Format]
) -> list[Change]:
    """What turns one set of tables into the other, in the order of the keys."""

    def by_key(tables: Iterable[Table]) -> dict[tuple[Any, ...], tuple[Table, Mapping[str, Any]]]:
        found = {}
        for table in tables:
            format_ = formats[table.op, table.phase]
            for rule in table.rules:
                found[(*identity(table, format_), *key_of(rule.values, format_))] = (table, rule.values)
        return found

    before, after, changes = by_key(old), by_key(new), []
    for key in sorted({*before, *after}, key=repr):
        table = (after.get(key) or before[key])[0]
        was = before[key][1] if key in before else None
        now = after[key][1] if key in after else None
        if was != now:
            changes.append(Change(formats[table.op, table.phase], table.header, was, now))
    return changes


def save_rules(
    entries: Sequence[tuple[Query, Mapping[str, Any]]], target: Path, formats: Sequence[Format]
) -> list[Change]:
    """Put each (query, figures and params) into its file; returns what changed, one Change an entry.

    `target` is a folder, where each table has its own file under the name that lookups expect, or a
    file ending in .json, which then holds all tables.
    """
    single = target.suffix == ".json"
    folder = target.parent if single else target
    folder.mkdir(parents=True, exist_ok=True)
    changes: list[Change] = []
    with locked(folder):
        for path, for_file in by_file(entries, target, single).items():
            changes += update_file(path, for_file, {(f.op, f.phase): f for f in formats})
    return changes


def check_target(queries: Sequence[Query], target: Path, formats: Sequence[Format]) -> None:
    """Before hours of measuring: the folder can be made and written, and what is there can be added to."""
    folder = (target.parent if target.suffix == ".json" else target).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise SaveRefused(
            f"rules cannot be saved to {target}: {there} is not a folder that can be written to"
        )
    for path in by_file([(query, {}) for query in queries], target, target.suffix == ".json"):
        read_blocks(path, {(f.op, f.phase): f for f in formats})


def by_file(
    entries: Sequence[tuple[Query, Mapping[str, Any]]], target: Path, single: bool
) -> dict[Path, list[tuple[Query, Mapping[str, Any]]]]:
    found: dict[Path, list[tuple[Query, Mapping[str, Any]]]] = {}
    for query, values in entries:
        path = target if single else target / query.format.file_name(query.device, query.header)
        found.setdefault(path, []).append((query, values))
    return found


def update_file(
    path: Path, entries: Sequence[tuple[Query, Mapping[str, Any]]], formats: Mapping[tuple[str, str], Format]
) -> list[Change]:
    blocks = read_blocks(path, formats)
    changes = []
    for query, values in entries:
        block = block_for(query, blocks)
        rule = {**{n: v for n, v in query.key.items() if v is not None}, **values}
        key = key_of(rule, query.format)
        old = next((r for r in block["rules"] if key_of(r, query.format) == key), None)
        block["rules"] = [r for r in block["rules"] if r is not old] + [rule]
        block["rules"].sort(key=lambda r, f=query.format: sort_key(r, f))
        changes.append(Change(query.format, query.full_header, old, rule))
    write_atomically(path, document(blocks))
    return changes


def read_blocks(path: Path, formats: Mapping[tuple[str, str], Format]) -> list[dict[str, Any]]:
    """The file's tables as plain objects. Refuses duplicates, and a file with parts that would get lost."""
    if not path.exists():
        return []
    tables = read_tables(path, formats)
    lost = [line for table in tables for line in table.left_out]
    if lost:
        raise RulesError(
            f"not written, since rules without effect would get lost: {'; '.join(lost)}: mend or remove them"
        )
    raw = json.loads(path.read_text())
    if len(tables) != len(raw.get("tables", [raw])):
        raise RulesError(f"{path}: holds tables of another version, op or phase; save to another file")
    return [{"op": t.op, **t.header, "rules": [dict(r.values) for r in t.rules]} for t in tables]


def block_for(query: Query, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = {"op": query.format.op, **query.full_header}
    for block in blocks:
        if all(block.get(name) == value for name, value in wanted.items()):
            return block
    blocks.append({**wanted, "rules": []})
    return blocks[-1]


def sort_key(rule: Mapping[str, Any], format_: Format) -> list[tuple[bool, str, Any]]:
    """Absent before present, then by type and value, so that any mixture sorts."""
    values = [rule.get(name) for name in format_.key]
    return [(v is not None, type(v).__name__, 0 if v is None else v) for v in values]


def document(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Readable by hand and by diff: one rule a line, as short as the fields allow."""
    if len(blocks) == 1:
        return "{\n" + f'  "version": "{VERSION}",\n' + body(blocks[0], "  ") + "}\n"
    tables = ",\n".join("    {\n" + body(block, "      ") + "    }" for block in blocks)
    return "{\n" + f'  "version": "{VERSION}",\n  "tables": [\n{tables}\n  ]\n' + "}\n"


def body(block: Mapping[str, Any], indent: str) -> str:
    lines = [f"{indent}{json.dumps(n)}: {json.dumps(v)},\n" for n, v in block.items() if n != "rules"]
    rules = ",\n".join(f"{indent}  {json.dumps(rule)}" for rule in block["rules"])
    return "".join(lines) + f'{indent}"rules": [\n{rules}\n{indent}]\n'


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two runs that save at once take turns; the lock is on the folder itself and leaves nothing behind."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one; a kill in between leaves the old one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def describe_header(header: Mapping[str, Any]) -> str:
    return " ".join(
        str(header[name]) for name in (*DEVICE_FIELDS, *(n for n in header if n not in DEVICE_FIELDS))
    )
