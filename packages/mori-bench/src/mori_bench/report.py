"""`mori-bench report FILE...`: the results of benches and sweeps as tables, Markdown, or a plot.

One table per op. What is the same in all of its rows stands above it once; the columns are what differs, then
what was measured. Rows of the same configuration are merged: their number is shown as `runs`, times are
medians, and the spread is that of the runs (none for less than three). Results that were not validated are
listed, never merged with valid ones, and never plotted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Sequence

from mori_bench.options import why_not_writable
from mori_bench.plot import SUFFIXES, plot
from mori_bench.rows import Row, flat, full_name, identity, is_identity, number, read_rows, short
from mori_bench.samples import Split, median, split_slow, spread
from mori_bench.tables import table, text_of

HEADLINE = "max_rank_time_us"
MEASURES = (
    HEADLINE,
    "median_us",
    "min_us",
    "max_us",
    "spread_pct",
    "runs",
    "slow_reps",
    "rel_l2",
    "mismatched_rows",
    "validated",
    "marks",
)
SHOWN_ELSEWHERE = (*MEASURES, "broken_on_purpose")
FIRST = ("backend", "world_size", "mode")  # identity columns that are shown before the others
QUIET = ("versions.", "commit", "dirty")  # told above the table only where they differ


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "report",
        help="tables and plots of results",
        description="Show results from files: a bench's output, --json, a sweep. `-` is standard input.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument("--columns", metavar="NAMES", help="these columns instead of the usual")
    parser.add_argument(
        "--plot", metavar="FILE", help="also draw FILE (.png or .svg; needs the extra [plot])"
    )
    parser.add_argument(
        "--x", metavar="FIELD", help="horizontal axis of the plot (default: what varies most)"
    )
    parser.add_argument(
        "--by", metavar="FIELDS", help="a line per value of these (default: what else varies)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables. 1 if a file held no result or a result was not validated."""
    problem = _unusable(args)
    if problem is not None:
        print(f"report: {problem}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    missing = False
    for path in args.files:
        try:
            found = read_rows(path)
        except OSError as error:
            print(f"report: {path}: {error.strerror}", file=sys.stderr)
            return 2
        for complaint in found.complaints:
            print(f"report: {complaint}", file=sys.stderr)
        if not found.rows:
            print(f"report: {path}: no results in it", file=sys.stderr)
            missing = True
        rows += [{n: v for n, v in flat(row).items() if not n.startswith("sweep.")} for row in found.rows]
    if not rows:
        return 1
    merged = merge(rows)
    try:
        for text in _texts(merged, args):
            print(text)
        if args.plot:
            plot([row for row in merged if row["validated"] is True], args.plot, x=args.x, by=args.by)
            print(f"drawn: {args.plot}")
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 1 if missing or any(row["validated"] is not True for row in merged) else 0


def _unusable(args: argparse.Namespace) -> str | None:
    """Options that could have no effect, or fail only after the work."""
    if not args.plot:
        return "--x and --by are about the plot: they need --plot FILE" if args.x or args.by else None
    if os.path.splitext(args.plot)[1].lower() not in SUFFIXES:
        return f"{args.plot}: a plot is {' or '.join(SUFFIXES)}"
    return why_not_writable(args.plot)


def merge(rows: Iterable[Row]) -> list[Row]:
    """Rows of the same configuration and the same validity as one, in order of first appearance."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault((identity(row), row.get("validated") is True), []).append(row)
    return [_merged(group) for group in groups.values()]


def _merged(group: list[Row]) -> Row:
    """One row for several runs: medians of what was measured, extremes of min and max, spread of the runs.

    Runs that took more than 1.3 times the best are left out, and told in `marks`.
    """
    timed = [row for row in group if number(row.get(HEADLINE)) is not None]
    split = split_slow([number(row[HEADLINE]) or 0.0 for row in timed]) if timed else None
    kept = [timed[i] for i in split.kept] if split else group
    out: Row = dict(kept[0])
    for name, value in kept[0].items():
        values = [v for v in (number(row.get(name)) for row in kept) if v is not None]
        if len(kept) > 1 and values and not is_identity(name, value):
            typical = _combined(name, values)
            out[name] = int(typical) if isinstance(value, int) and typical == int(typical) else typical
    if len(group) > 1 and split:
        times = [number(row[HEADLINE]) or 0.0 for row in kept]
        apart = spread(times)
        out["spread_pct"] = (
            None if apart is None else 100 * apart / median(times) if median(times) > 0 else 0.0
        )
    out["validated"] = group[0].get("validated") is True
    out["runs"] = len(kept)
    out["marks"] = ", ".join(_marks(group, split)) or None
    return out


def _marks(group: list[Row], split: Split | None) -> list[str]:
    """What a reader must know before believing the row."""
    marks = [mark for mark in ("unstable", "disturbed") if any(row.get(mark) is True for row in group)]
    if split and split.unstable and len(group) > 1 and "unstable" not in marks:
        marks.append("unstable")
    elif split and split.slow and not split.unstable:
        marks.append(f"{len(split.slow)} slow left out")
    if any("broken_on_purpose" in row for row in group):
        marks.append("broken on purpose")
    return marks


def _combined(name: str, values: list[float]) -> float:
    if name == "slow_reps":
        return sum(values)
    return min(values) if name == "min_us" else max(values) if name == "max_us" else median(values)


def _texts(rows: list[Row], args: argparse.Namespace) -> Iterable[str]:
    """The heading and the table of every op."""
    for op in dict.fromkeys(str(row["op"]) for row in rows):
        of_op = [row for row in rows if str(row["op"]) == op]
        names = list(dict.fromkeys(name for row in of_op for name in row))
        if args.columns:
            columns = [_column(name.strip(), names, rows) for name in args.columns.split(",")]
        else:
            columns = usual_columns(of_op, names)
        yield f"## {op}\n" if args.markdown else op
        yield _constants(of_op, names) + ("\n" if args.markdown else "")
        yield _fitting(of_op, columns, names, args)


def _column(asked: str, names: list[str], rows: list[Row]) -> str:
    """A column of this op, or one that another op of the same files has and that is empty here."""
    try:
        return full_name(asked, names)
    except ValueError:
        return full_name(asked, [name for row in rows for name in row])


def usual_columns(rows: list[Row], names: Sequence[str]) -> list[str]:
    """What differs, then what was measured; columns that would say nothing are left out."""
    telling = [
        n for n in names if is_identity(n, _first(rows, n)) and n not in SHOWN_ELSEWHERE and _varies(rows, n)
    ]
    telling.sort(key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST) + n.startswith(QUIET))
    own = [
        n for n in names if "." not in n and not is_identity(n, _first(rows, n)) and _is_own_measure(rows, n)
    ]
    measured = [n for n in MEASURES if _says_something(rows, n)]
    before = [n for n in measured if n in ("max_rank_time_us", "median_us", "min_us", "max_us", "spread_pct")]
    return [*telling, *before, *own, *[n for n in measured if n not in before]]


def _is_own_measure(rows: list[Row], name: str) -> bool:
    """A float that the op adds, like a bandwidth."""
    from mori_bench.result import FIELDS

    return name not in FIELDS and name not in MEASURES and isinstance(_first(rows, name), float)


def _first(rows: list[Row], name: str) -> object:
    return next((row[name] for row in rows if row.get(name) is not None), None)


def _varies(rows: list[Row], name: str) -> bool:
    return len({repr(row.get(name)) for row in rows}) > 1


def _says_something(rows: list[Row], name: str) -> bool:
    values = [row.get(name) for row in rows]
    if name == "runs":
        return any(value != 1 for value in values)
    if name == "slow_reps":
        return any(values)
    if name == "median_us":  # the headline under another name, unless another tool wrote the row
        return any(row.get(name) not in (None, row.get(HEADLINE)) for row in rows)
    return any(value is not None for value in values)


def _constants(rows: list[Row], names: Sequence[str]) -> str:
    """One line of what all rows have in common."""
    shared = [
        f"{short(n, names)}={text_of(rows[0].get(n), n)}"
        for n in names
        if n != "op" and is_identity(n, _first(rows, n)) and n not in MEASURES
        if not _varies(rows, n) and not n.startswith(QUIET) and rows[0].get(n) not in (None, "")
    ]
    commits = {
        f"{str(row['commit'])[:12]}{'+' if row.get('dirty') else ''}" for row in rows if row.get("commit")
    }
    if len(commits) == 1:
        shared.append(f"commit={commits.pop()}")
    return "  ".join(shared)


def _fitting(rows: list[Row], columns: list[str], names: Sequence[str], args: argparse.Namespace) -> str:
    """The table; on a terminal without the measures that do not fit, and a word about them."""
    shown = list(columns)
    dropped: list[str] = []
    while True:
        renamed = [short(name, names) for name in shown]
        text = table(
            [{short(name, names): row.get(name) for name in shown} for row in rows],
            renamed,
            markdown=args.markdown,
        )
        width = max(len(line) for line in text.splitlines())
        expendable = [
            n for n in ("mismatched_rows", "max_us", "min_us", "median_us", "slow_reps") if n in shown
        ]
        if args.columns or args.markdown or not sys.stdout.isatty() or not expendable:
            break
        if width <= shutil.get_terminal_size().columns:
            break
        shown.remove(expendable[0])
        dropped.append(expendable[0])
    note = f"\n(no room for {', '.join(dropped)}; --columns chooses)" if dropped else ""
    return text + note + "\n"
