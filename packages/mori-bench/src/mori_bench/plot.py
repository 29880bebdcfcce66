"""Results as a picture: time over one field, a line per configuration. Needs matplotlib, the extra [plot]."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from mori_bench.rows import Row, full_name, is_identity, number, short

SUFFIXES = (".png", ".svg")
TIME = "max_rank_time_us"


def plot(rows: Sequence[Row], path: str, *, x: str | None = None, by: str | None = None) -> None:
    """Draw flat, validated rows into a .png or .svg file, one panel per op. Bars reach from min to max."""
    if os.path.splitext(path)[1].lower() not in SUFFIXES:
        raise ValueError(f"{path}: a plot is {' or '.join(SUFFIXES)}")
    rows = [row for row in rows if number(row.get(TIME)) is not None]
    if not rows:
        raise ValueError("no validated result with a time to plot")
    figure_type = _figure_type()
    ops = list(dict.fromkeys(str(row["op"]) for row in rows))
    figure = figure_type(figsize=(7.5, 4.5 * len(ops)), layout="constrained")
    for axes, op in zip(figure.subplots(len(ops), squeeze=False)[:, 0], ops, strict=True):
        _panel(axes, [row for row in rows if str(row["op"]) == op], op, x, by)
    figure.savefig(path, dpi=150)


def _figure_type() -> Any:
    """matplotlib's Figure, which draws without a display and without global state."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ValueError(f"a plot needs matplotlib ({error}): pip install 'mori-bench[plot]'") from None


def _panel(axes: Any, rows: list[Row], op: str, x: str | None, by: str | None) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    varying = [n for n in names if is_identity(n, rows[0].get(n)) and len({repr(r.get(n)) for r in rows}) > 1]
    x_name = full_name(x, names) if x else _usual_x(rows, varying)
    by_names = (
        [full_name(by, names)] if by else [n for n in varying if n != x_name and n not in ("runs", "marks")]
    )
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(", ".join(f"{row.get(n)}" for n in by_names) or op, []).append(row)
    numeric = x_name is not None and all(number(row.get(x_name)) is not None for row in rows)
    ticks = list(dict.fromkeys(str(row.get(x_name)) if x_name else op for row in rows))
    for label, of_line in lines.items():
        points = sorted(
            (
                number(row[x_name]) or 0.0
                if numeric and x_name
                else float(ticks.index(_tick(row, x_name, op))),
                _bar(row),
            )
            for row in of_line
        )
        times = [bar[0] for _, bar in points]
        reach = [[bar[0] - bar[1] for _, bar in points], [bar[2] - bar[0] for _, bar in points]]
        axes.errorbar([at for at, _ in points], times, yerr=reach, marker="o", capsize=3, label=label)
    _finish(axes, op, x_name, names, by_names, ticks if not numeric else None)


def _tick(row: Row, x_name: str | None, op: str) -> str:
    return str(row.get(x_name)) if x_name else op


def _bar(row: Row) -> tuple[float, float, float]:
    """(time, lowest, highest); the extremes never cross the time itself."""
    time_us = number(row[TIME]) or 0.0
    lowest, highest = number(row.get("min_us")), number(row.get("max_us"))
    return time_us, min(time_us, lowest if lowest is not None else time_us), max(time_us, highest or time_us)


def _usual_x(rows: list[Row], varying: list[str]) -> str | None:
    """The numeric field with the most values, a part of the shape before anything else."""
    numeric = [n for n in varying if all(number(row.get(n)) is not None for row in rows)]
    candidates = [n for n in numeric if n.startswith("shape.")] or numeric or varying
    return max(candidates, key=lambda n: len({repr(row.get(n)) for row in rows}), default=None)


def _finish(
    axes: Any, op: str, x_name: str | None, names: list[str], by_names: list[str], ticks: list[str] | None
) -> None:
    axes.set_title(op)
    axes.set_ylabel(f"{TIME} (bars: min to max)")
    axes.set_xlabel(short(x_name, names) if x_name else "")
    if ticks is not None:
        axes.set_xticks(range(len(ticks)), ticks)
    else:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.25)
    if by_names:
        axes.legend(title=", ".join(short(n, names) for n in by_names), fontsize="small")
