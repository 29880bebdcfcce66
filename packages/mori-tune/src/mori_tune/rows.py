"""`RESULT_JSON {...}`: one line for each problem and phase, with the fields that every bench here prints.

In a row, as everywhere outside the tuner's own table, the time of a round is that of its slowest rank; the
grand mean that selects stands beside it as `average_us`. Strict JSON: no NaN, whole byte counts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mori_tune.device import Device
from mori_tune.search import Times
from mori_tune.settings import settings
from mori_tune.tunable import Problem

PREFIX = "RESULT_JSON "


def result_row(
    *,
    op: str,
    device: Device,
    world_size: int,
    mode: str,
    problem: Problem,
    phase: str,
    kept: Sequence[Times],
    slow_us: Sequence[float],
    spread: float | None,
    rounds: int,
    warmup: int,
    versions: Mapping[str, str],
    validated: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    per_round = [ranks for times in kept for ranks in times.by_phase[phase]]
    slowest = [max(ranks) for ranks in per_round]
    commit, dirty = commit_of(Path(__file__))
    text = {name: value for name, value in problem.values.items() if isinstance(value, str)}
    row = {
        "op": op,
        "backend": device.backend,
        "device": str(device),
        "world_size": world_size,
        "mode": mode,
        "shape": {name: value for name, value in problem.values.items() if name not in text},
        "dtype": text,
        "median_us": rounded(median(slowest)) if slowest else None,
        "min_us": rounded(min(slowest)) if slowest else None,
        "max_us": rounded(max(slowest)) if slowest else None,
        "spread_pct": None if spread is None else rounded(100 * spread),
        "max_rank_time_us": rounded(median(slowest)) if slowest else None,
        "wall_us": None,  # the op says what a round takes, on the clock that it chooses
        "host_enqueue_us": None,
        "rel_l2": worst("rel_l2", kept),
        "mismatched_rows": worst("mismatched_rows", kept),
        "validated": validated,
        "reps": rounds - warmup if kept else 0,
        "warmup": warmup,
        "slow_reps": len(slow_us),
        "slow_us": [rounded(us) for us in slow_us],
        "rank_us": [rounded(median(of_rank)) for of_rank in zip(*per_round, strict=True)],
        "unstable": False,
        "canary_us": None,
        "canary_drift_pct": None,
        "disturbed": False,
        "settings": {one.name: plain(one.value) for one in settings().effective()},
        "commit": commit,
        "dirty": dirty,
        "versions": dict(versions),
    }
    return {**row, **extra}


def emit(row: Mapping[str, Any], json_file: str | None) -> None:
    """Print the line; append the object to the file of --json."""
    text = json.dumps(row, allow_nan=False)
    print(PREFIX + text, flush=True)
    if json_file is not None:
        with open(json_file, "a") as file:
            file.write(text + "\n")


def worst(name: str, kept: Sequence[Times]) -> float | None:
    """The largest error of the comparisons around these visits, of the kind that the op's check reports."""
    found = [times.error[name] for times in kept if name in times.error]
    return max(found, default=None)


def rounded(value: float) -> float:
    return round(float(value), 3)


def plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def commit_of(file: Path) -> tuple[str | None, bool | None]:
    """Of the checkout that this file is part of, and whether tracked files differ from it; else None."""
    git = ["git", "-C", str(file.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", file.name], check=True, capture_output=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.stdout.strip(), bool(changed.stdout.strip())
