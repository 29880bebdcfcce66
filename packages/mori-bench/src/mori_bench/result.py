"""One measured configuration as one line: `RESULT_JSON {...}`. The schema is `FIELDS`, checked by `problems`.

The line says exactly what ran. Strict JSON: no NaN, byte counts are whole numbers. `validated` may be true
only with the error measure of this very run beside it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mori_bench.environment import commit_of, versions
from mori_bench.protocol import Timing

PREFIX = "RESULT_JSON "

NUMBER, WHOLE, TEXT, TRUTH, NAMED, LIST = (int, float), (int,), (str,), (bool,), (dict,), (list,)
OPTIONAL = (type(None),)
# name -> types of its value. Everything else in a row is the op's own.
FIELDS: dict[str, tuple[type, ...]] = {
    "op": TEXT,
    "backend": TEXT,
    "device": TEXT,
    "world_size": WHOLE,
    "mode": TEXT,
    "shape": NAMED,
    "dtype": NAMED,
    "median_us": NUMBER + OPTIONAL,
    "min_us": NUMBER + OPTIONAL,
    "max_us": NUMBER + OPTIONAL,
    "spread_pct": NUMBER + OPTIONAL,
    "max_rank_time_us": NUMBER + OPTIONAL,
    "wall_us": NUMBER + OPTIONAL,
    "host_enqueue_us": NUMBER + OPTIONAL,
    "rel_l2": NUMBER + OPTIONAL,
    "mismatched_rows": WHOLE + OPTIONAL,
    "validated": TRUTH,
    "reps": WHOLE,
    "warmup": WHOLE,
    "slow_reps": WHOLE,
    "slow_us": LIST,
    "rank_us": LIST,
    "unstable": TRUTH,
    "canary_us": NUMBER + OPTIONAL,
    "canary_drift_pct": NUMBER + OPTIONAL,
    "disturbed": TRUTH,
    "settings": NAMED,
    "commit": TEXT + OPTIONAL,
    "dirty": TRUTH + OPTIONAL,
    "versions": NAMED,
}


@dataclass
class Result:
    """Everything one line says. `timing` is None where only the result was checked."""

    op: str
    backend: str  # "host", "cuda" or "rocm": what ran, never "auto"
    device: str
    world_size: int
    mode: str
    shape: Mapping[str, int]  # for instance {"m": 1000, "n": 7168, "k": 2048}
    dtype: Mapping[str, str]  # for instance {"input": "fp8_e4m3fn", "quant": "blockscale", "gather": "bf16"}
    timing: Timing | None
    validated: bool
    rel_l2: float | None = None
    mismatched_rows: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)  # every effective setting
    packages: Sequence[str] = ()  # first the op's own: its commit is the row's
    extra: Mapping[str, object] = field(default_factory=dict)  # the op's own fields
    fault: str | None = None  # what --break broke

    def row(self) -> dict[str, object]:
        """The row as a dict that passes `problems`; raises ValueError where it would not."""
        timing = self.timing
        commit = commit_of(self.packages[0] if self.packages else "mori-bench")
        row: dict[str, object] = {
            "op": self.op,
            "backend": self.backend,
            "device": self.device,
            "world_size": self.world_size,
            "mode": self.mode,
            "shape": dict(self.shape),
            "dtype": dict(self.dtype),
        }
        for name in (
            "median_us",
            "min_us",
            "max_us",
            "spread_pct",
            "max_rank_time_us",
            "wall_us",
            "host_enqueue_us",
        ):
            row[name] = _rounded(getattr(timing, name) if timing else None)
        row["rel_l2"] = self.rel_l2 if self.rel_l2 is not None and math.isfinite(self.rel_l2) else None
        row["mismatched_rows"] = self.mismatched_rows
        row["validated"] = self.validated
        row["reps"] = timing.reps if timing else 0
        row["warmup"] = timing.warmup if timing else 0
        row["slow_reps"] = timing.slow_reps if timing else 0
        row["slow_us"] = [round(us, 3) for us in timing.slow_us] if timing else []
        row["rank_us"] = [round(us, 3) for us in timing.rank_us] if timing else []
        row["unstable"] = timing.unstable if timing else False
        row["canary_us"] = _rounded(timing.canary_us if timing else None)
        row["canary_drift_pct"] = _rounded(timing.canary_drift_pct if timing else None)
        row["disturbed"] = timing.disturbed if timing else False
        row["settings"] = dict(self.settings)
        row["commit"] = commit.hash if commit else None
        row["dirty"] = commit.dirty if commit else None
        row["versions"] = versions(self.packages)
        if self.fault is not None:
            row["broken_on_purpose"] = self.fault
        clash = row.keys() & self.extra.keys()
        if clash:
            raise ValueError(f"extra fields {sorted(clash)} have the names of fields that every row has")
        row.update(self.extra)
        check_row(row)
        return row

    def line(self) -> str:
        """`RESULT_JSON {...}`, without the newline."""
        return PREFIX + _strict_json(self.row())

    def emit(self, json_file: str | os.PathLike[str] | None = None) -> dict[str, object]:
        """Print the line; with `json_file` (the value of --json) append the object too. Gives the row."""
        row = self.row()
        text = _strict_json(row)
        sys.stdout.write(PREFIX + text + "\n")
        sys.stdout.flush()
        if json_file is not None:
            with open(json_file, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        return row


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 3)


def _strict_json(row: Mapping[str, object]) -> str:
    return json.dumps(row, allow_nan=False)


def check_row(row: Mapping[str, object]) -> None:
    """Raise ValueError listing everything that is wrong with a row."""
    found = problems(row)
    if found:
        raise ValueError("this result row is not right: " + "; ".join(found))


def problems(row: Mapping[str, object]) -> list[str]:
    """What is wrong with a row, in words; empty if nothing is."""
    found = [f"{name} is missing" for name in FIELDS if name not in row]
    for name, types in FIELDS.items():
        if name in row and not _fits(row[name], types):
            found.append(f"{name} is {row[name]!r}")
    found += _problems_inside(row, "")
    if row.get("validated") is True and row.get("rel_l2") is None and row.get("mismatched_rows") is None:
        found.append("validated is true with neither rel_l2 nor mismatched_rows of this run")
    return found


def _fits(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def _problems_inside(value: object, path: str) -> Iterator[str]:
    """Strict JSON, and whole bytes, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{path}.{key}" if path else str(key)
            if str(key).endswith("bytes") and item is not None and not _fits(item, WHOLE + NAMED + (list,)):
                yield f"{where} is {item!r}: byte counts are whole numbers"
            yield from _problems_inside(item, where)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _problems_inside(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}: JSON has no such number"
    elif value is not None and not isinstance(value, str | int | float):
        yield f"{path} is a {type(value).__name__}: JSON has no such thing"


def results_in(lines: Iterable[str]) -> list[dict[str, object]]:
    """The rows of all RESULT_JSON lines in a bench's output."""
    found = []
    for line in lines:
        at = line.find(PREFIX)
        if at >= 0:
            found.append(json.loads(line[at + len(PREFIX) :]))
    return found
