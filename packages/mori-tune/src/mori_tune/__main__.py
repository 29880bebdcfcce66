"""`mori-tune {run,verify,show,explain,diff}`: the command line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from mori_tune.commands.look import diff, explain, show
from mori_tune.commands.options import (
    USER_FOLDER,
    add_host_options,
    add_measuring_options,
    add_shape_options,
    as_setting,
    device_option,
    positive,
)
from mori_tune.commands.run import run
from mori_tune.commands.verify import verify
from mori_tune.errors import TuneError
from mori_tune.rules.book import POLICIES
from mori_tune.slots.torchrun import be_an_agent, is_under_torchrun
from mori_tune.tunable import load


def budget(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text}: wanted 1 to 100 visits for each candidate")
    return value


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="mori-tune",
        description="Pick the fastest right geometry of an op, save it as a rule, and verify it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name, help=text, allow_abbrev=False) for name, text in HELP.items()}
    for name in ("run", "verify", "explain"):
        add_shape_options(made[name])
    for name in ("run", "verify"):
        add_measuring_options(made[name])
        add_host_options(made[name])
    run_options(made["run"])
    for name in ("verify", "show", "explain"):
        made[name].add_argument("--file", metavar="FILE", help="look at these rules only, a file or a folder")
    made["verify"].add_argument(
        "--in-turns",
        type=positive,
        default=0,
        metavar="N",
        help="also time each rule beside the op's default, N visits each in turns",
    )
    made["show"].add_argument("--op", help="which op's rules")
    made["show"].add_argument("--settings", action="store_true", help="every environment variable in effect")
    made["explain"].add_argument(
        "--device", type=device_option, metavar="ARCH/MODEL/UNITS", help="default: this one"
    )
    made["explain"].add_argument("--policy", choices=POLICIES, help="default: MORI_TUNE_LOOKUP")
    made["diff"].add_argument("old", help="rule file or folder")
    made["diff"].add_argument("new", help="rule file or folder")
    return parser, made


HELP = {
    "run": "tune, print, and with --save write rules",
    "verify": "run saved rules and compare their output with the reference",
    "show": "list the rules that can be found here",
    "explain": "say which rule a call gets, and why",
    "diff": "what changed between two rule files",
}


def run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scope", choices=["quick", "full"], help="how much of the space (MORI_TUNING_SCOPE)"
    )
    parser.add_argument(
        "--save",
        nargs="?",
        const=USER_FOLDER,
        metavar="FILE",
        help="write the winners as rules: to this .json file or folder, or to the user's folder",
    )
    parser.add_argument("--verbose", action="store_true", help="every visit's table (MORI_EP_TUNING_VERBOSE)")
    parser.add_argument("--trace", metavar="FILE", help="write the visits as a Chrome trace")
    margin = as_setting("MORI_EP_TUNING_MARGIN")
    parser.add_argument(
        "--margin", type=margin, help="gain over the default that is asked for (MORI_EP_TUNING_MARGIN)"
    )
    parser.add_argument(
        "--budget", type=budget, default=3.0, help="visits for each candidate at most (default 3)"
    )
    parser.add_argument("--fresh", action="store_true", help="do not resume an unfinished sweep")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The op's own options are added to its subcommand once --op is known."""
    parser, made = make_parser()
    name = op_named(arguments)
    command = next((a for a in arguments if a in made), None)
    if name is not None and command in ("run", "verify", "explain"):
        load(name).add_options(made[command])
    return parser.parse_args(arguments)


def op_named(arguments: Sequence[str]) -> str | None:
    for i, argument in enumerate(arguments):
        if argument == "--op" and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith("--op="):
            return argument.removeprefix("--op=")
    return None


def stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


COMMANDS = {"run": run, "verify": verify, "show": show, "explain": explain, "diff": diff}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 1 not all as wished (no winner, no match, a difference), 2 refused, 130 interrupted."""
    signal.signal(signal.SIGTERM, stop)
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if (
            options.command in ("run", "verify")
            and is_under_torchrun(os.environ)
            and os.environ["RANK"] != "0"
        ):
            be_an_agent(os.environ)
            return 0
        return COMMANDS[options.command](options)
    except (TuneError, FileNotFoundError, PermissionError) as error:
        print(f"mori-tune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmori-tune: interrupted; the same command resumes an unfinished sweep", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader left, as `| head` does
        return 141


if __name__ == "__main__":
    sys.exit(main())
