"""`mori-bench compare "CMD A" "CMD B"`: is A faster than B, whole processes against whole processes.

Round 0 runs both once and throws the numbers away. Then each round runs A and B, in turns first. A run that
took more than 1.3 times the best run of its own side is marked and left out. The spread is that of the runs
(see `samples`); a difference below it is no difference.

Rows are only compared if they are about the same problem: shape, dtype, backend and number of ranks must
agree unless `--vary` names the field that is meant to differ.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mori_bench.commands import Outcome, run_command
from mori_bench.options import at_least, seconds, why_not_writable
from mori_bench.rows import TIMES, Row, flat, full_name, number, short
from mori_bench.samples import median, split_slow, spread
from mori_bench.tables import table
from mori_bench.verdicts import Verdict, judge

SIDES = ("A", "B")
Key = tuple[tuple[str, str], ...]


class NotComparable(Exception):
    """The two commands did not measure the same thing."""


@dataclass
class Pair:
    """A row of A and the row of B it is compared with, and their times over the rounds."""

    label: str
    differs: list[str]
    times_us: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    disturbed: int = 0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "compare",
        help="run two commands in turns and say which is faster",
        description="Run two bench commands in turns, in alternating order, and compare what they print.",
    )
    parser.add_argument("a", metavar="CMD_A", help="a whole command line, in quotes")
    parser.add_argument("b", metavar="CMD_B", help="the other one")
    parser.add_argument(
        "--rounds", type=at_least(3), default=5, metavar="N", help="rounds that count (default: 5)"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FIELD",
        help="a field that is meant to differ",
    )
    parser.add_argument(
        "--metric", choices=TIMES, default=TIMES[0], help="what to compare (default: %(default)s)"
    )
    parser.add_argument("--limit-s", type=seconds, metavar="S", help="time limit of one run")
    parser.add_argument("--json", metavar="FILE", help="append the outcome of each pair to FILE")
    parser.set_defaults(run=run)


def run(
    args: argparse.Namespace, run_one: Callable[[Sequence[str], float | None], Outcome] = run_command
) -> int:
    """Measure, print, and say in the exit code whether there was something valid to compare."""
    try:
        commands = [shlex.split(args.a), shlex.split(args.b)]
    except ValueError as error:
        commands = []
        print(f"compare: {error}", file=sys.stderr)
    if not commands or not all(commands):
        print("compare: both commands must be whole command lines, each in quotes", file=sys.stderr)
        return 2
    if args.json and (problem := why_not_writable(args.json)):
        print(f"compare: {problem}", file=sys.stderr)
        return 2
    pairs: dict[Key, Pair] = {}
    varied: set[str] = set()
    rounds = 0
    try:
        for number_of_round in range(args.rounds + 1):
            rows = _one_round(commands, number_of_round, args, run_one)
            if rows is None:
                return 1
            if number_of_round == 0:
                varied = _varied(args.vary, rows)
                pairs = pair_up(rows[0], rows[1], varied)
                _note_what_does_not_vary(rows, varied)
                continue
            _take(pairs, rows, varied, args.metric)
            rounds += 1
    except NotComparable as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted after {rounds} whole rounds", file=sys.stderr)
        if rounds:
            _report(args, pairs, rounds)
        return 130
    _report(args, pairs, rounds)
    return 0


def _one_round(
    commands: list[list[str]],
    number_of_round: int,
    args: argparse.Namespace,
    run_one: Callable[[Sequence[str], float | None], Outcome],
) -> tuple[list[Row], list[Row]] | None:
    """The rows of A and of B; None, with the cause printed, if one of them failed."""
    rows: dict[int, list[Row]] = {}
    for side in (0, 1) if number_of_round % 2 == 0 else (1, 0):
        outcome = run_one(commands[side], args.limit_s)
        if outcome.cause is not None:
            print(
                f"compare: {SIDES[side]} failed: {outcome.cause}\n  {shlex.join(commands[side])}",
                file=sys.stderr,
            )
            return None
        rows[side] = [flat(row) for row in outcome.rows]
        which = f"round {number_of_round}/{args.rounds}" if number_of_round else "discarded"
        print(f"{which:<12} {SIDES[side]}  {outcome.seconds:6.1f} s", file=sys.stderr)
    return rows[0], rows[1]


def _varied(asked: list[str], rows: tuple[list[Row], list[Row]]) -> set[str]:
    names = [name for side in rows for row in side for name in row]
    try:
        return {full_name(one, names) for text in asked for one in text.split(",")}
    except ValueError as error:
        raise NotComparable(f"--vary: {error}") from None


def _note_what_does_not_vary(rows: tuple[list[Row], list[Row]], varied: set[str]) -> None:
    for name in sorted(varied):
        if len({repr(row.get(name)) for side in rows for row in side}) == 1:
            print(f"note: --vary {name}, but it is {rows[0][0].get(name)!r} on both sides", file=sys.stderr)


def pair_up(a: list[Row], b: list[Row], varied: set[str]) -> dict[Key, Pair]:
    """Which row of A belongs to which row of B. Raises NotComparable if that is not certain."""
    if len(a) == len(b) == 1:
        unlike = [n for n in _differing(a[0], b[0]) if _must_agree(n) and n not in varied]
        if unlike:
            raise NotComparable(_how_unlike(a[0], b[0], unlike))
        return {(): _pair(a[0], b[0], "")}
    rows_a, rows_b = _by_key(a, varied), _by_key(b, varied)
    for side, rows, keyed in (("A", a, rows_a), ("B", b, rows_b)):
        if len(keyed) < len(rows):
            raise NotComparable(
                f"{side} has rows that differ only in settings: ask for one of them at a time"
            )
    everywhere = set.intersection(*(set(key) for key in [*rows_a, *rows_b]))
    lonely = [f"only A has {_words(key, everywhere)}" for key in rows_a if key not in rows_b]
    lonely += [f"only B has {_words(key, everywhere)}" for key in rows_b if key not in rows_a]
    if lonely:
        raise NotComparable(f"these are different problems: {'; '.join(lonely)}. See --vary")
    return {key: _pair(row, rows_b[key], _words(key, everywhere)) for key, row in rows_a.items()}


def _how_unlike(a: Row, b: Row, names: list[str]) -> str:
    asked = ",".join(short(name, a) for name in names)
    values = ", ".join(f"{short(n, a)} is {a.get(n)!r} in A, {b.get(n)!r} in B" for n in names)
    return f"these are different problems: {values}. To compare them all the same, say --vary {asked}"


def _by_key(rows: list[Row], varied: set[str]) -> dict[Key, Row]:
    """The rows by what they are about."""
    return {_key(row, varied): row for row in rows}


def _must_agree(name: str) -> bool:
    return name.startswith(("shape.", "dtype.")) or name in ("backend", "world_size")


def _key(row: Row, varied: set[str]) -> Key:
    """What a row is about, among several rows of one command."""
    names = [n for n in row if (_must_agree(n) or n in ("op", "mode")) and n not in varied]
    return tuple((name, str(row[name])) for name in sorted(names))


def _words(key: Key, leave_out: set[tuple[str, str]]) -> str:
    names = [name for name, _ in key]
    return " ".join(f"{short(name, names)}={value}" for name, value in key if (name, value) not in leave_out)


def _differing(a: Row, b: Row) -> list[str]:
    return [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]


def _pair(a: Row, b: Row, label: str) -> Pair:
    """`differs` lists how the configurations of the two rows differ."""
    names = dict.fromkeys([*a, *b])
    told = [n for n in _differing(a, b) if _must_agree(n) or n in ("op", "mode") or n.startswith("settings.")]
    return Pair(label, [f"{short(n, names)}: {a.get(n)} / {b.get(n)}" for n in told])


def _take(pairs: dict[Key, Pair], rows: tuple[list[Row], list[Row]], varied: set[str], metric: str) -> None:
    """Add one round's times to the pairs."""
    for side in (0, 1):
        by_key = {(): rows[side][0]} if list(pairs) == [()] else _by_key(rows[side], varied)
        if by_key.keys() != pairs.keys() or len(rows[side]) != len(pairs):
            raise NotComparable(f"{SIDES[side]} did not print the same rows as in the round before")
        for key, row in by_key.items():
            time_us = number(row.get(metric))
            if time_us is None:
                raise NotComparable(f"a row of {SIDES[side]} has no {metric}")
            pairs[key].times_us[side].append(time_us)
            pairs[key].disturbed += row.get("disturbed") is True


def summary(pair: Pair) -> tuple[list[dict[str, object]], Verdict]:
    """The two lines of the table, and the verdict on A."""
    lines: list[dict[str, object]] = []
    spreads: list[float | None] = []
    notes: list[str] = []
    for side, times_us in zip(SIDES, pair.times_us, strict=True):
        split = split_slow(times_us)
        kept = [times_us[i] for i in split.kept]
        spreads.append(spread(kept))
        typical, apart = median(kept), spreads[-1]
        lines.append(
            {
                "side": side,
                "runs": len(kept),
                "slow": len(split.slow),
                "median_us": typical,
                "min_us": min(kept),
                "max_us": max(kept),
                "spread_pct": None if apart is None else 100 * apart / typical if typical > 0 else 0.0,
            }
        )
        if split.unstable:
            notes.append(f"{side} is unstable: half of its runs or more took 1.3 times its best")
        elif split.slow:
            notes.append(f"{len(split.slow)} slow run(s) of {side} left out")
    if pair.disturbed:
        notes.append(f"the machine was disturbed in {pair.disturbed} of {2 * len(pair.times_us[0])} runs")
    a_us, b_us = (number(line["median_us"]) or 0.0 for line in lines)
    return lines, judge(a_us, b_us, spreads[0], spreads[1], tuple(notes))


def _report(args: argparse.Namespace, pairs: dict[Key, Pair], rounds: int) -> None:
    print(f"A  {args.a}\nB  {args.b}")
    print(f"{args.metric} of {rounds} rounds in alternating order, after one that was discarded\n")
    columns = ["side", "runs", "slow", "median_us", "min_us", "max_us", "spread_pct"]
    for pair in pairs.values():
        lines, verdict = summary(pair)
        if pair.label:
            print(pair.label)
        print(table(lines, columns))
        for difference in pair.differs:
            print(f"A / B differ in {difference}")
        print(f"A against B: {verdict}\n")
        if args.json:
            with open(args.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(_outcome(args, pair, lines, verdict), allow_nan=False) + "\n")


def _outcome(
    args: argparse.Namespace, pair: Pair, lines: list[dict[str, object]], verdict: Verdict
) -> dict[str, object]:
    return {
        "compare": {"a": args.a, "b": args.b, "rows": pair.label, "metric": args.metric},
        "differs": pair.differs,
        "a": {**lines[0], "times_us": pair.times_us[0]},
        "b": {**lines[1], "times_us": pair.times_us[1]},
        "verdict": verdict.word,
        "ratio": verdict.ratio if math.isfinite(verdict.ratio) else None,
        "gap_us": verdict.gap_us,
        "spread_us": verdict.spread_us,
        "notes": list(verdict.notes),
    }
