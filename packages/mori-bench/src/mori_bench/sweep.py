"""`mori-bench sweep --out FILE GRID... -- COMMAND...`: one run of a command for every cell of a grid.

    mori-bench sweep --out r.jsonl -m 1024,2048 --mode fused-sdma,split-sdma -- mori-gemm-ar-bench --reps 11

Each grid option is given with all its values, separated by commas (`\\,` is a comma inside a value); `@on`
and `@off` are an option that takes no value, present and absent. The last option of the grid turns fastest.

FILE is a log of JSON lines. A finished cell is written in one piece and forced to disk: its result rows, then
one line that closes the cell and holds its status. So whatever a kill leaves behind is a whole file, or a
torn piece after the last closing line, which the next start cuts off. Cells closed as "ok" are not run again;
failed cells are, unless --skip-failed. A cell is known by its complete command line.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import IO

from mori_bench.commands import Outcome, run_command
from mori_bench.options import seconds
from mori_bench.progress import Progress

ON, OFF = "@on", "@off"


class UsageError(Exception):
    """The command line cannot be understood."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid: its options with their values, and the command that measures it."""

    values: tuple[tuple[str, str], ...]
    command: tuple[str, ...]

    @property
    def label(self) -> str:
        """For people: m=1024 mode=fused-sdma."""
        return (
            " ".join(f"{option.lstrip('-')}={value}" for option, value in self.values)
            or "(the command itself)"
        )


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's own options; everything else before `--` is the grid."""
    parser = subparsers.add_parser(
        "sweep",
        help="run a command for every cell of a grid of options; can be resumed",
        usage="mori-bench sweep --out FILE [--limit-s S] [--skip-failed] [--dry-run] GRID... -- COMMAND...",
        description="Run COMMAND once for every combination of the grid's options, for instance "
        "`-m 1024,2048 --mode a,b --flag @on,@off`. Started again with the same FILE, it skips what is done.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="results as JSON lines; grows, can be resumed"
    )
    parser.add_argument("--limit-s", type=seconds, metavar="S", help="time limit of one cell")
    parser.add_argument(
        "--skip-failed", action="store_true", help="do not run cells again that failed before"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and whether they are done")
    parser.set_defaults(run=run)


def run(
    args: argparse.Namespace, run_one: Callable[[Sequence[str], float | None], Outcome] = run_command
) -> int:
    """Run what is not done yet. 0 if every cell is ok now, 1 if some failed, 130 if interrupted."""
    try:
        cells = grid(args.grid, args.command_line)
        if args.dry_run:
            return _dry_run(args, cells)
        with open(args.out, "a+b") as file:
            status = open_log(file, args.out)
            return _run_cells(args, cells, status, file, run_one)
    except (UsageError, OSError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2


def grid(tokens: Sequence[str], command: Sequence[str]) -> list[Cell]:
    """All cells, in the order they are run."""
    if not command:
        raise UsageError("no command: write it after `--`")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no command {command[0]!r}")
    axes = [[(option, value) for value in values] for option, values in _axes(tokens)]
    return [Cell(values, (*command, *_arguments(values))) for values in product(*axes)]


def _axes(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    axes: list[tuple[str, list[str]]] = []
    waiting = list(tokens)
    while waiting:
        option, equals, text = waiting.pop(0).partition("=")
        if not option.startswith("-") or not option.strip("-"):
            raise UsageError(f"{option!r} is not an option: the grid is written as `--option VALUE,VALUE`")
        if not equals:
            if not waiting:
                raise UsageError(f"{option} has no values; if it takes none, write {option} {ON},{OFF}")
            text = waiting.pop(0)
        values = [value.replace("\0", ",") for value in text.replace("\\,", "\0").split(",")]
        if "" in values or len(set(values)) < len(values):
            raise UsageError(f"{option} {text!r}: an empty value, or one given twice")
        if option in (known for known, _ in axes):
            raise UsageError(f"{option} is given twice: write all of its values together")
        axes.append((option, values))
    return axes


def _arguments(values: tuple[tuple[str, str], ...]) -> list[str]:
    arguments: list[str] = []
    for option, value in values:
        if value == ON:
            arguments.append(option)
        elif value != OFF:
            arguments += [f"{option}={value}"] if option.startswith("--") else [option, value]
    return arguments


def open_log(file: IO[bytes], name: str, *, repair: bool = True) -> dict[tuple[str, ...], str]:
    """Lock the log, cut off a torn end, and return the status of every cell in it by its command."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"{name} is in use by another sweep") from None
    file.seek(0)
    content = file.read()
    status: dict[tuple[str, ...], str] = {}
    whole = position = 0
    for line in content.splitlines(keepends=True):
        position += len(line)
        record = _record(line)
        if record is None and not (position == len(content) and _may_be_torn(line)):
            raise UsageError(f"{name} holds a line that no sweep wrote: {line[:60]!r}; give another file")
        if record is not None and "sweep_cell" in record and line.endswith(b"\n"):
            status[_command_of(record)] = str(record["status"])
            whole = position
    if whole < len(content) and repair:
        print(f"{name}: the last cell was cut off while it was written; it will run again", file=sys.stderr)
        file.truncate(whole)
        os.fsync(file.fileno())
    return status


def _record(line: bytes) -> dict[str, object] | None:
    """The record on a line of a sweep's log, None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and ("sweep" in record or "sweep_cell" in record) else None


def _may_be_torn(line: bytes) -> bool:
    """Whether a record may have begun like this. (A crash of the machine may also leave zeros.)"""
    starts = (b'{"op": ', b'{"sweep_cell": ')
    return not line.strip(b"\0") or any(line[: len(start)] == start[: len(line)] for start in starts)


def _command_of(record: dict[str, object]) -> tuple[str, ...]:
    command = record["command"]
    return tuple(map(str, command)) if isinstance(command, list) else ()


def _dry_run(args: argparse.Namespace, cells: list[Cell]) -> int:
    status: dict[tuple[str, ...], str] = {}
    if os.path.exists(args.out):
        with open(args.out, "rb") as file:
            status = open_log(file, args.out, repair=False)
    for cell in cells:
        print(f"{status.get(cell.command, 'to do'):<7} {shlex.join(cell.command)}")
    return 0


def _run_cells(
    args: argparse.Namespace,
    cells: list[Cell],
    status: dict[tuple[str, ...], str],
    file: IO[bytes],
    run_one: Callable[[Sequence[str], float | None], Outcome],
) -> int:
    skipped = ("ok", "failed") if args.skip_failed else ("ok",)
    to_do = [cell for cell in cells if status.get(cell.command) not in skipped]
    progress = Progress(len(cells), len(cells) - len(to_do), sys.stderr)
    failed: list[tuple[Cell, str]] = []
    try:
        for cell in to_do:
            progress.begin(cell.label)
            outcome = run_one(cell.command, args.limit_s)
            _write(file, cell, outcome)
            if outcome.cause is not None:
                failed.append((cell, outcome.cause))
            progress.end(outcome.cause)
    except KeyboardInterrupt:
        progress.close()
        print("sweep: interrupted; start it again with the same --out to go on", file=sys.stderr)
        return 130
    progress.close()
    before = [cell for cell in cells if args.skip_failed and status.get(cell.command) == "failed"]
    _conclude(args.out, cells, failed, before)
    return 1 if failed or before else 0


def _write(file: IO[bytes], cell: Cell, outcome: Outcome) -> None:
    """One cell in one piece: the rows of a good run, and the closing line."""
    values = dict(cell.values)
    rows = [] if outcome.cause is not None else [{**row, "sweep": values} for row in outcome.rows]
    closing = {
        "sweep_cell": values,
        "command": list(cell.command),
        "status": "ok" if outcome.cause is None else "failed",
        "cause": outcome.cause,
        "rows": len(rows),
        "seconds": round(outcome.seconds, 3),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    piece = "".join(json.dumps(record, allow_nan=False) + "\n" for record in [*rows, closing])
    file.write(piece.encode())
    file.flush()
    os.fsync(file.fileno())


def _conclude(out: str, cells: list[Cell], failed: list[tuple[Cell, str]], before: list[Cell]) -> None:
    good = len(cells) - len(failed) - len(before)
    print(f"{good} of {len(cells)} cells ok, in {out}; see them with: mori-bench report {shlex.quote(out)}")
    for cell, cause in failed:
        print(f"failed: {cell.label}\n        {cause}\n        {shlex.join(cell.command)}")
    for cell in before:
        print(f"failed in an earlier run: {cell.label}")
