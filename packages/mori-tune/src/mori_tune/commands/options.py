"""Options that several subcommands share, and the checks that need nothing but the options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mori_tune.device import Device
from mori_tune.errors import SaveRefused, SettingError
from mori_tune.settings import SETTINGS, Settings

USER_FOLDER = object()  # `--save` without a file


def int_list(text: str) -> tuple[int, ...]:
    """ "4,8,16" as numbers; nothing else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len({int(part) for part in parts}) != len(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted different whole numbers, for example 4,8,16")
    return tuple(int(part) for part in parts)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a whole number of at least 1")
    return int(text)


def as_setting(name: str) -> Any:
    """An option with the range of the environment variable that it stands for."""

    def parse(text: str) -> Any:
        try:
            return SETTINGS[name].parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: wanted {SETTINGS[name].allowed}") from None

    return parse


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", required=True, help="which op: ep, gemm-ar, or MODULE:ATTRIBUTE of a tunable")
    parser.add_argument(
        "--tokens", type=int_list, metavar="LIST", help="numbers of tokens (rows), one problem each"
    )
    parser.add_argument("--hidden", type=int_list, metavar="LIST", help="hidden sizes, one problem each")
    parser.add_argument("--backend", choices=["auto", "host", "cuda", "rocm"], default="auto")
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks (default 2; under torchrun its own)"
    )


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    rounds = as_setting("MORI_EP_ROUNDS")
    parser.add_argument(
        "--reps", "--rounds", dest="rounds", type=rounds, help="rounds of a visit (MORI_EP_ROUNDS)"
    )
    parser.add_argument("--warmup", type=positive, default=1, help="rounds dropped from the start of a visit")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--json", metavar="FILE", help="also append each result to this file")
    limit = as_setting("MORI_TUNE_LIMIT_S")
    parser.add_argument("--limit", type=limit, metavar="S", help="time limit of one slot (MORI_TUNE_LIMIT_S)")
    parser.add_argument("--show-output", action="store_true", help="what the ranks print")


def add_host_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts", "ranks are numbered in the order of the hosts")
    group.add_argument(
        "--hosts", metavar="A,B", help="start agents there through ssh; 'localhost' is this machine"
    )
    group.add_argument("--ranks-per-host", type=positive, metavar="N", help="default 8")
    group.add_argument("--master-addr", metavar="ADDR", help="where ranks meet (default: the first host)")
    group.add_argument("--container", metavar="NAME", help="run the other hosts' ranks in this container")
    group.add_argument("--local-container", metavar="NAME", help="run this machine's ranks in this container")
    group.add_argument("--python", help="the interpreter on the other hosts (default python3)")
    group.add_argument("--workdir", metavar="DIR", help="the folder to start in on the other hosts")
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="pass this variable on, besides those that begin with MORI_, NCCL_, GLOO_",
    )


def device_option(text: str) -> Device:
    try:
        return Device.parse(text)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def save_target(options: argparse.Namespace, using: Settings) -> Path | None:
    """Where winners go; None if they are not saved. An empty name says outright that nothing is."""
    if options.save is None or options.save == "":
        return None
    return using.user_dir if options.save is USER_FOLDER else Path(options.save)


def refuse_quick_save(scope: str, target: Path | None) -> None:
    """Before anything is launched: the winner of a reduced sweep is not a result."""
    if scope == "quick" and target is not None:
        raise SaveRefused(
            "--scope quick (MORI_TUNING_SCOPE=quick) and --save exclude each other: a reduced sweep has no "
            "winner worth keeping. Either --scope full, or leave --save away (--save '')"
        )


def plain_values(options: argparse.Namespace) -> Mapping[str, Any]:
    """What travels to the ranks: the options that are plain values or lists of them."""
    plain = (int, float, str, bool, type(None))
    found = {}
    for name, value in vars(options).items():
        if isinstance(value, plain) or (
            isinstance(value, (list, tuple)) and all(isinstance(v, plain) for v in value)
        ):
            found[name] = value
    return found
