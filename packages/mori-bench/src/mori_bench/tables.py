"""Tables for a terminal or for Markdown: numbers to the right, words to the left, no dependency."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence

MISSING = "–"
UNITS = ("_us", "_ms", "_pct")


def table(rows: Iterable[Mapping[str, object]], columns: Sequence[str], *, markdown: bool = False) -> str:
    """The named columns of the rows as aligned text, one line per row, under a heading."""
    if not columns:
        raise ValueError("a table needs at least one column")
    rows = list(rows)
    cells = [[text_of(row.get(column), column) for column in columns] for row in rows]
    right = [_is_numeric([row.get(column) for row in rows]) for column in columns]
    if markdown:
        return _markdown(columns, cells, right)
    widths = [max(text_width(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    lines = [
        _aligned(list(columns), widths, right),
        _aligned(["─" * width for width in widths], widths, right),
    ]
    lines += [_aligned(line, widths, right) for line in cells]
    return "\n".join(lines)


def text_of(value: object, column: str = "") -> str:
    """A cell's text. The column's name tells the unit, and the unit how many digits are worth reading."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "NO" if column == "validated" else "no"
    if isinstance(value, float) or (isinstance(value, int) and column.endswith(UNITS)):
        return _number(float(value), column)
    if isinstance(value, Mapping):
        return " ".join(f"{key}={text_of(item, str(key))}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text_of(item, column) for item in value)
    return "".join(c if c.isprintable() else " " for c in str(value))


def _number(value: float, column: str) -> str:
    if value == 0 or abs(value) == float("inf") or value != value:
        return f"{value:g}"
    if column.startswith("rel_"):
        return f"{value:.3e}"
    if column.endswith(UNITS):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _is_numeric(values: list[object]) -> bool:
    numbers = [
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in values
        if value is not None
    ]
    return bool(numbers) and all(numbers)


def text_width(text: str) -> int:
    """Columns of a terminal: East Asian wide characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def _aligned(line: list[str], widths: list[int], right: list[bool]) -> str:
    padded = [
        " " * (width - text_width(text)) + text if to_right else text + " " * (width - text_width(text))
        for text, width, to_right in zip(line, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _markdown(columns: Sequence[str], cells: list[list[str]], right: list[bool]) -> str:
    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    rule = "|" + "|".join("---:" if to_right else "---" for to_right in right) + "|"
    return "\n".join([line(columns), rule, *(line(texts) for texts in cells)])
