"""Results as a picture: time over one field, a line per configuration. Needs matplotlib, the extra [plot]."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from mori_bench.rows import Row, full_name, is_identity, number, short
from mori_bench.tables import text_of

SUFFIXES = (".png", ".svg")
TIME = "max_rank_time_us"
MOST_TICKS = 12
WIDE = 8  # a range from which an axis is logarithmic


def plot(rows: Sequence[Row], path: str, *, x: str | None = None, by: str | None = None) -> None:
    """Draw flat, validated rows into a .png or .svg file, one panel per op. Bars reach from min to max."""
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
    """One op: lines where x is a number, groups of columns where it is a word."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    varying = [n for n in names if is_identity(n, rows[0].get(n)) and len({repr(r.get(n)) for r in rows}) > 1]
    x_name = full_name(x, names) if x else _usual_x(rows, varying)
    left = [n for n in varying if n not in (x_name, "runs", "marks")]
    by_names = [full_name(name, names) for name in by.split(",")] if by else left
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(_label(n, row, names) for n in by_names) or op, []).append(row)
    _refuse_overlap(groups, x_name, [short(n, names) for n in left if n not in by_names])

    if all(number(row.get(x_name)) is not None for row in rows):
        _lines(axes, groups, x_name)
    else:
        _columns(axes, groups, x_name)
    axes.set_title(op)
    axes.set_ylabel(f"{TIME} (bars: min to max)")
    axes.set_xlabel(short(x_name, names))
    axes.grid(True, axis="y", alpha=0.25)
    if len(groups) > 1:
        axes.legend(fontsize="small")


def _refuse_overlap(groups: dict[str, list[Row]], x_name: str, hidden: list[str]) -> None:
    """Two results at one place would hide each other, or look like noise."""
    for label, rows in groups.items():
        if len({repr(row.get(x_name)) for row in rows}) < len(rows):
            raise ValueError(
                f"plot: {label!r} has several results for one {x_name}: add {', '.join(hidden)} to --by"
            )


def _lines(axes: Any, groups: dict[str, list[Row]], x_name: str) -> None:
    every = [row for rows in groups.values() for row in rows]
    places = sorted({number(row[x_name]) or 0.0 for row in every})
    _scale(axes, "x", places)
    _scale(axes, "y", [time for row in every for time in _bar(row)])
    for label, rows in groups.items():
        rows = sorted(rows, key=lambda row: number(row[x_name]) or 0.0)
        times, reach = _bars(rows)
        at = [number(row[x_name]) for row in rows]
        axes.errorbar(at, times, yerr=reach, marker="o", capsize=3, label=label)
    if len(places) <= MOST_TICKS:
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xticks([], minor=True)


def _columns(axes: Any, groups: dict[str, list[Row]], x_name: str) -> None:
    places = list(dict.fromkeys(text_of(row.get(x_name)) for rows in groups.values() for row in rows))
    width = 0.8 / len(groups)
    for index, (label, rows) in enumerate(groups.items()):
        times, reach = _bars(rows)
        shift = (index - (len(groups) - 1) / 2) * width
        at = [places.index(text_of(row.get(x_name))) + shift for row in rows]
        axes.bar(at, times, width * 0.9, yerr=reach, capsize=3, label=label)
    axes.set_xticks(range(len(places)), places)
    _scale(axes, "y", [row_time for rows in groups.values() for row in rows for row_time in _bar(row)])


def _bars(rows: list[Row]) -> tuple[list[float], list[list[float]]]:
    """The times, and how far down and up the bars reach from them."""
    bars = [_bar(row) for row in rows]
    return [time for time, _, _ in bars], [[t - low for t, low, _ in bars], [high - t for t, _, high in bars]]


def _scale(axes: Any, which: str, values: list[float]) -> None:
    """Logarithmic where the values span a wide range, always with plain numbers."""
    if not values or min(values) <= 0 or max(values) < WIDE * min(values):
        return
    ticker = importlib.import_module("matplotlib.ticker")
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _label(name: str, row: Row, names: list[str]) -> str:
    """How a field is told in the legend: a word by itself, a number or a truth with its name."""
    value = row.get(name)
    return value if isinstance(value, str) else f"{short(name, names)}={text_of(value, name)}"


def _bar(row: Row) -> tuple[float, float, float]:
    """(time, lowest, highest); the extremes never cross the time itself."""
    time_us = number(row[TIME]) or 0.0
    lowest, highest = number(row.get("min_us")), number(row.get("max_us"))
    return time_us, min(time_us, lowest if lowest is not None else time_us), max(time_us, highest or time_us)


def _usual_x(rows: list[Row], varying: list[str]) -> str:
    """The numeric field with the most values, a part of the shape before anything else."""
    numeric = [n for n in varying if all(number(row.get(n)) is not None for row in rows)]
    candidates = [n for n in numeric if n.startswith("shape.")] or numeric or varying
    return max(candidates, key=lambda n: len({repr(row.get(n)) for row in rows}), default="mode")
