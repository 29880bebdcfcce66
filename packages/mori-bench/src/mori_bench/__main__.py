"""`mori-bench`: compare two commands, sweep a grid of options, report results."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from mori_bench import compare, report, sweep
from mori_bench.environment import versions


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of the console script. Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our characters shows "?" instead
    parser = argparse.ArgumentParser("mori-bench", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mori-bench {versions()['mori-bench']}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (compare, sweep, report):
        command.add_parser(subparsers)
    if given[:1] == [
        "sweep"
    ]:  # its grid is made of other programs' options, which argparse need not understand
        before, after = _split(given)
        args, args_grid = parser.parse_known_args(before)
        args.grid, args.command_line = args_grid, after
    else:
        args = parser.parse_args(given)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`."""
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
