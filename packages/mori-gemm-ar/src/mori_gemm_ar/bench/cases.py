"""What one run measures: a list of cases, from the command line and nothing else.

With one mode, the options are the op's own, and one that the mode would ignore is refused. With `--mode all`
an option goes to the modes in which it means something; if there is none, it is refused as well. Without
--gather-dtype, `all` adds the two fp8 wires to the five modes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mori_shmem.errors import ArgumentError

from mori_gemm_ar.options import (
    GATHER_DTYPES,
    GATHER_SCALES,
    GATHER_TRANSPORTS,
    MODES,
    PUBLISH,
    QUANTS,
    Options,
    resolve,
)

WIRE_OPTIONS = (
    "gather_dtype",
    "gather_transport",
    "chunks",
    "sdma_queues",
    "fuse_quantize",
    "fuse_reduce_push",
    "gather_bands",
    "publish",
    "pull_blocks",
    "gather_scale",
)
DEFAULT_SHAPE = {"m": 1024, "n": 1536, "k": 768}
FP8_MODE = "fused-sdma"  # the one whose fp8 wires `all` shows without being asked


@dataclass(frozen=True)
class Case:
    """One op to be measured. `given` are the options asked for, `options` what they lead to before tuning."""

    given: dict[str, Any]
    options: Options
    name: str = ""  # of a line in a table, where mode and wire do not tell cases apart

    @property
    def label(self) -> str:
        """Short, and different for every case of a run."""
        if self.name:
            return self.name
        return self.options.mode if not self.options.communicates else f"{self.options.mode} {self.wire}"

    @property
    def wire(self) -> str:
        """How finished rows travel, in two words."""
        if not self.options.communicates:
            return "-"
        return f"{self.options.gather_dtype} {self.options.gather_transport}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this bench, next to those common to all."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("--mode", choices=(*MODES, "all"), default="all", help="default: %(default)s")
    group.add_argument("--quant", choices=QUANTS, default="blockscale", help="default: %(default)s")
    for letter, what in (("m", "rows"), ("n", "columns"), ("k", "k of each rank")):
        group.add_argument(
            f"-{letter}",
            type=int,
            metavar=letter.upper(),
            help=f"{what} (default: {DEFAULT_SHAPE[letter]}; of a table: the published one)",
        )
    group.add_argument("--gather-dtype", choices=GATHER_DTYPES, help="the wire of finished rows")
    group.add_argument("--gather-transport", choices=GATHER_TRANSPORTS, help="who moves finished rows")
    group.add_argument("--chunks", type=int, metavar="N", help="fused-sdma: at most so many puts per peer")
    group.add_argument("--sdma-queues", type=int, metavar="N", help="copy queues per peer")
    flag = argparse.BooleanOptionalAction
    group.add_argument("--fuse-quantize", action=flag, help="quantise inside the reduce")
    group.add_argument("--fuse-reduce-push", action=flag, help="push finished rows from inside the reduce")
    group.add_argument("--gather-bands", type=int, metavar="N", help="in so many parts")
    group.add_argument("--publish", choices=PUBLISH, help="how a part is handed to the copy engines")
    group.add_argument("--gather-scale", choices=GATHER_SCALES, help="what a scale of the fp8 wire covers")
    group.add_argument("--pull-blocks", type=int, metavar="N", help="pieces that a pull is cut into")
    group.add_argument(
        "--compare",
        choices=("unfused",),
        help="the same GEMM and then gloo's all-reduce, in turns with the rest",
    )


def cases_from(args: argparse.Namespace) -> list[Case]:
    """The cases of this run; ArgumentError for options that cannot be honoured."""
    given = {name: value for name in WIRE_OPTIONS if (value := getattr(args, name)) is not None}
    if args.mode != "all":
        return [_case(args.mode, args.quant, given)]
    cases = [_case(mode, args.quant, _fitting(mode, args.quant, given)) for mode in MODES]
    unused = [name for name in given if not any(name in case.given for case in cases)]
    if unused:
        raise ArgumentError(f"{', '.join(unused)}: no mode can honour this together with the rest")
    if args.gather_dtype is None and not given.keys() & {"fuse_reduce_push", "gather_bands", "publish"}:
        for transport in GATHER_TRANSPORTS if args.gather_transport is None else (args.gather_transport,):
            fp8 = {**given, "gather_dtype": "fp8", "gather_transport": transport}
            cases.append(_case(FP8_MODE, args.quant, _fitting(FP8_MODE, args.quant, fp8)))
    return cases


def named_case(name: str, quant: str, given: dict[str, Any]) -> Case:
    """One line of a table; `given` are options of the op, its mode among them."""
    return Case({"quant": quant, **given}, resolve(quant=quant, **given), name)


def _case(mode: str, quant: str, given: dict[str, Any]) -> Case:
    options = resolve(mode=mode, quant=quant, **given)
    return Case({"mode": mode, "quant": quant, **given}, options)


def _fitting(mode: str, quant: str, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that this mode can honour, less what is idle without the others."""
    fitting = dict(given)
    while True:
        try:
            _case(mode, quant, fitting)
        except ArgumentError as refusal:
            refused = [name for name in fitting if f"{name}=" in str(refusal)]
            if not refused:
                raise
            for name in refused:
                del fitting[name]
        else:
            return fitting
