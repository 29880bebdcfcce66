"""Result rows as they are found in files and in a bench's output, and what identifies a row.

A row is nested (`{"shape": {"m": 1024}}`); here it is laid flat with dotted names (`shape.m`). A user may
write the last part alone (`m`) as long as that is not ambiguous.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from mori_bench.result import FIELDS, PREFIX, problems

Row = dict[str, object]

# What was measured, as opposed to what ran.
MEASURED = frozenset(
    (
        *("median_us", "min_us", "max_us", "spread_pct", "max_rank_time_us", "wall_us", "host_enqueue_us"),
        *("rel_l2", "mismatched_rows", "validated", "reps", "warmup", "slow_reps", "slow_us", "rank_us"),
        *("unstable", "canary_us", "canary_drift_pct", "disturbed"),
    )
)
TIMES = ("max_rank_time_us", "median_us", "min_us", "max_us", "wall_us", "host_enqueue_us")


@dataclass
class Found:
    """The rows of one source, and what could not be read there."""

    rows: list[Row] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def read_rows(path: str) -> Found:
    """The rows of a file: a bench's output, a file of --json, or a sweep's. "-" is standard input."""
    if path == "-":
        return rows_in(sys.stdin, "standard input")
    with open(path, encoding="utf-8", errors="replace") as file:
        return rows_in(file, path)


def rows_in(lines: Iterable[str], source: str) -> Found:
    """Rows after RESULT_JSON, or whole lines of JSON; any other text is not ours and is passed over."""
    found = Found()
    for number, line in enumerate(lines, 1):
        at = line.find(PREFIX)
        text = line[at + len(PREFIX) :] if at >= 0 else line.strip()
        if at < 0 and not text.startswith("{"):
            continue
        where = f"{source}, line {number}"
        try:
            row = json.loads(text, parse_constant=_refuse_constant)
        except ValueError as error:
            found.complaints.append(f"{where}: not strict JSON ({error}), left out")
            continue
        if not isinstance(row, dict) or "op" not in row:
            if at >= 0:
                found.complaints.append(f"{where}: a RESULT_JSON line without an op, left out")
            continue
        wrong = problems(row)
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            found.complaints.append(f"{where}: not a complete result: {'; '.join(wrong[:3])}{more}")
        found.rows.append(row)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def flat(row: Mapping[str, object], prefix: str = "") -> Row:
    """The row with nested objects laid flat: {"shape": {"m": 1}} becomes {"shape.m": 1}."""
    out: Row = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def short(name: str, names: Iterable[str]) -> str:
    """The last part of a dotted name, if it means nothing else among the names."""
    last = name.rsplit(".", 1)[-1]
    return last if [n for n in names if n.rsplit(".", 1)[-1] == last] == [name] else name


def full_name(asked: str, names: Iterable[str]) -> str:
    """The field that a user means by `asked`; ValueError if there is none, or more than one."""
    names = list(dict.fromkeys(names))
    if asked in names:
        return asked
    fitting = [name for name in names if name.rsplit(".", 1)[-1] == asked]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"{asked!r} can mean {' or '.join(fitting)}: write it in full")
    raise ValueError(
        f"no row has a field {asked!r}; there are {', '.join(sorted(short(n, names) for n in names))}"
    )


def is_identity(name: str, value: object) -> bool:
    """Whether a flat field says what ran. An op's own floats are measurements, its other fields are not."""
    if name in MEASURED:
        return False
    return name.split(".")[0] in FIELDS or not isinstance(value, float)


def identity(flat_row: Row) -> tuple[tuple[str, str], ...]:
    """Two rows with the same identity measured the same thing."""
    return tuple(
        sorted((name, json.dumps(value)) for name, value in flat_row.items() if is_identity(name, value))
    )


def number(value: object) -> float | None:
    """The value if it is a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
