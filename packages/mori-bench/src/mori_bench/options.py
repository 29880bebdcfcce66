"""The options that every bench of the project has, defined once.

A bench adds its own next to them:
    parser = argparse.ArgumentParser("mori-x-bench")
    mori_bench.add_common_options(parser, reps=11)
    args = parser.parse_args()
    world_size = mori_bench.world_size_of(args, default=8)
    fault = mori_bench.Fault(args.fault)
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable

from mori_bench.environment import launched
from mori_bench.faults import FAULTS

BACKENDS = ("auto", "host", "cuda", "rocm")


def add_common_options(parser: argparse.ArgumentParser, *, reps: int = 11, warmup: int = 2) -> None:
    """Add the common options. `reps` and `warmup` are this bench's defaults."""
    group = parser.add_argument_group("common options")
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="where to run (default: auto)")

    def count(name: str, lowest: int, default: int | None, text: str) -> None:
        group.add_argument(name, type=at_least(lowest), default=default, metavar="N", help=text)

    count("--world-size", 1, None, "ranks to start; under torchrun its number, if given")
    count("--reps", 1, reps, "timed repetitions (default: %(default)s)")
    discarded = "untimed runs before; the first timed run is discarded in any case (default: %(default)s)"
    count("--warmup", 0, warmup, discarded)
    count("--seed", 0, 0, "everything random comes from it (default: 0)")
    group.add_argument(
        "--json", metavar="FILE", help="also append each result to FILE, one JSON object a line"
    )
    group.add_argument(
        "--trace", metavar="FILE", help="write where the time went, for Perfetto or chrome://tracing"
    )
    # For tests of the bench itself: break the output in a known way; `validated` must then be false.
    group.add_argument("--break", dest="fault", choices=sorted(FAULTS), help=argparse.SUPPRESS)


def world_size_of(args: argparse.Namespace, *, default: int) -> int:
    """Ranks of this run: torchrun's if it started us, else --world-size, else the bench's default."""
    asked: int | None = args.world_size
    place = launched()
    if place is None:
        return default if asked is None else asked
    if asked is not None and asked != place.world_size:
        raise ValueError(
            f"--world-size {asked}, but the launcher started {place.world_size} ranks: leave it out"
        )
    return place.world_size


def seed_for(seed: int, *purpose: object) -> int:
    """A seed for one purpose, as in seed_for(args.seed, "a", rank, round): same arguments, same seed."""
    text = "/".join([str(seed), *map(str, purpose)])
    return (
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    )  # fits a signed 64-bit integer


def at_least(lowest: int) -> Callable[[str], int]:
    """For argparse: a whole number that is not below `lowest`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is below {lowest}")
        return value

    return parse


def seconds(text: str) -> float:
    """For argparse: a time limit in seconds, above zero."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time limit: it must be above 0 and finite")
    return value


def why_not_writable(path: str) -> str | None:
    """Why a file could not be appended to or made; None if it can. Asked before the work, not after it."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        return f"{path} is a folder"
    if not os.path.isdir(folder):
        return f"{path} cannot be written: there is no folder {folder}"
    target = path if os.path.exists(path) else folder
    return None if os.access(target, os.W_OK) else f"{path} cannot be written: permission denied"
