"""`mori-ep-bench`: dispatch and combine, checked against the reference and timed in turns.

    mori-ep-bench                                       4 ranks of this machine, 128 tokens, beside gloo's
                                                        all_to_all
    mori-ep-bench bench --tokens 8 --kernel-type IntraNodeLL --dtype fp8_e4m3 --routing zipf
    mori-ep-bench test                                  many calls of odd shapes, checked and not timed
    mori-ep-bench sweep --tokens 1,8,64 --kernel-type IntraNode,IntraNodeLL
    mori-ep-bench --kernel-type InterNodeV1 --nodes 2 --engine gloo
                                                        ranks of this machine that stand for two nodes
    torchrun --nproc_per_node=2 -m mori_ep.bench        with ranks that somebody else starts

The last line is `validated`, and the exit status 0, only if every configuration was compared with the
reference in this run and passed; 1 if one did not pass, 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mori_bench
from mori_bench import add_common_options
from mori_bench.options import at_least, why_not_writable
from mori_shmem.errors import MoriError
from mori_tune.settings import settings

from mori_ep.config import QUANT_TYPES, EpDispatchCombineKernelType

if TYPE_CHECKING:
    from mori_ep.bench.inputs import Sizes
    from mori_ep.bench.run import Choice

DEFAULT_WORLD_SIZE = 4
ENGINES = ("nixl", "gloo")
DTYPES = {  # by the names that are usual
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3_fnuz": "float8_e4m3fnuz",
    "fp4": "float4_e2m1fn_x2",
}
SWEPT = (
    "tokens",
    "hidden",
    "topk",
    "kernel_type",
    "dtype",
    "combine_dtype",
    "quant_type",
    "num_qp",
    "zero_copy",
)


def parser() -> argparse.ArgumentParser:
    """All options of the command. `sweep` takes several values, with commas, for those of SWEPT."""
    made = argparse.ArgumentParser(
        "mori-ep-bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("command", nargs="?", choices=("bench", "test", "sweep"), default="bench")
    add_common_options(made, reps=7, warmup=1)
    kinds = [kind.name for kind in EpDispatchCombineKernelType]
    group = made.add_argument_group("what is exchanged (sweep: several values with commas)")
    group.add_argument("--tokens", type=_list(at_least(0)), default=[128], help="of each rank (default: 128)")
    group.add_argument(
        "--hidden", type=_list(at_least(1)), default=[7168], help="elements of a row; of fp4: pairs (7168)"
    )
    group.add_argument("--topk", type=_list(at_least(1)), default=[8], help="experts per token (8)")
    group.add_argument(
        "--experts", type=at_least(1), metavar="N", help="of all ranks (default: 256, or near)"
    )
    group.add_argument(
        "--kernel-type", type=_choice(kinds), default=["IntraNode"], metavar="KIND", help=str(kinds)
    )
    group.add_argument(
        "--dtype", type=_choice(list(DTYPES)), default=["bf16"], metavar="DTYPE", help=", ".join(DTYPES)
    )
    group.add_argument(
        "--combine-dtype",
        type=_choice(list(DTYPES)),
        default=[None],
        metavar="DTYPE",
        help="default: that of dispatch where rows of it can be added, else bf16",
    )
    group.add_argument(
        "--quant-type",
        type=_choice(list(QUANT_TYPES)),
        default=["none"],
        metavar="TYPE",
        help=", ".join(QUANT_TYPES),
    )
    group.add_argument(
        "--scale-dim",
        type=at_least(0),
        help="fp32 scales per row (default: one per 128 elements of fp8, else none)",
    )
    group.add_argument(
        "--zero-copy",
        type=_choice(["0", "1"]),
        default=["1"],
        metavar="0|1",
        help="combine reads the registered buffer (default: 1; quantised transports: 0)",
    )
    group.add_argument(
        "--num-qp", type=_list(at_least(1)), default=[1], help="copy queues per peer (AsyncLL)"
    )
    group.add_argument(
        "--nodes",
        type=at_least(1),
        help="for InterNode kinds: nodes that the ranks are on, or that this machine stands for (default: "
        "torchrun's, else 2)",
    )
    group.add_argument(
        "--engine", choices=ENGINES, help="between nodes (default: MORI_EP_INTERNODE_ENGINE, or nixl)"
    )
    group.add_argument(
        "--routing",
        default="uniform",
        metavar="HOW",
        help="uniform, zipf, hot-rank, one-expert, or a file of ids",
    )
    group.add_argument(
        "--rounds",
        type=at_least(1),
        help="calls per timed run (default: MORI_EP_ROUNDS, which is 10 and holds for mori-tune as well)",
    )
    group.add_argument("--no-compare", action="store_true", help="without torch's all_to_all beside it")
    return made


def _list(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """For argparse: values with commas between."""

    def parse(text: str) -> list[Any]:
        return [one(word) for word in text.split(",")]

    return parse


def _choice(allowed: list[str]) -> Callable[[str], list[Any]]:
    def one(word: str) -> str:
        if word not in allowed:
            raise argparse.ArgumentTypeError(f"{word!r}: one of {', '.join(allowed)}")
        return word

    return _list(one)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    made = parser()
    args = made.parse_args(argv)
    try:
        world_size = mori_bench.world_size_of(args, default=DEFAULT_WORLD_SIZE)
        args.backend = backend_for(args.backend, world_size)
        configurations = configurations_from(args, world_size)
        for sizes, choice in configurations:
            _check(args.backend, sizes, choice, world_size)
        for path in filter(None, (args.json, args.trace)):
            if reason := why_not_writable(path):
                raise ValueError(reason)
    except (MoriError, ValueError) as refusal:
        made.error(str(refusal))
    try:
        return _run(args, configurations, world_size)
    except KeyboardInterrupt:
        print("interrupted; the ranks have been ended", file=sys.stderr)
        return 130
    except MoriError as failure:
        print(f"mori-ep-bench: {type(failure).__name__}: {failure}", file=sys.stderr)
        for note in getattr(failure, "__notes__", ()):
            print(note, file=sys.stderr)
        return 2


def backend_for(asked: str, world_size: int) -> str:
    """What is asked for; "auto" is the GPUs only where each rank has one of its own."""
    if asked != "auto":
        return asked
    import torch
    from mori_shmem.comm import backend_of

    found = backend_of("auto")
    enough = found == "host" or "MORI_SHMEM_BACKEND" in os.environ or torch.cuda.device_count() >= world_size
    return found if enough else "host"


def configurations_from(args: argparse.Namespace, world_size: int) -> list[tuple[Sizes, Choice]]:
    """Every combination of the options given."""
    several = [f"--{name.replace('_', '-')}" for name in SWEPT if len(getattr(args, name)) > 1]
    if several and args.command != "sweep":
        raise ValueError(f"several values for {', '.join(several)}: that is what `sweep` is for")
    experts = args.experts or -(-256 // world_size) * world_size
    if experts % world_size:
        raise ValueError(f"--experts {experts} cannot be shared out evenly among {world_size} ranks")
    combinations = itertools.product(*(getattr(args, name) for name in SWEPT))
    made = [_configuration(args, dict(zip(SWEPT, values, strict=True)), experts) for values in combinations]
    _check_nodes(args, [choice for _, choice in made], world_size)
    return made


def _check_nodes(args: argparse.Namespace, choices: list[Choice], world_size: int) -> None:
    across = any(choice.across_nodes for choice in choices)
    for option in ("nodes", "engine"):
        if getattr(args, option) and not across:
            raise ValueError(f"--{option} {getattr(args, option)}: only with --kernel-type InterNode*")
    if across and world_size % nodes_of(args):
        raise ValueError(
            f"--nodes {nodes_of(args)}: {world_size} ranks cannot be shared out evenly among them"
        )


def nodes_of(args: argparse.Namespace) -> int:
    """Nodes that the ranks are on."""
    if args.nodes:
        return int(args.nodes)
    if mori_bench.launched() is not None and "LOCAL_WORLD_SIZE" in os.environ:
        return max(1, int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]))
    return 2


def _check(backend: str, sizes: Sizes, choice: Choice, world_size: int) -> None:
    """Raise what an op of these sizes would, before ranks are started."""
    from types import SimpleNamespace

    from mori_ep import checks
    from mori_ep.bench.run import make_config
    from mori_ep.plan import NOTHING_SAID
    from mori_ep.targets import target_for

    config = make_config(SimpleNamespace(rank=0, world_size=world_size), sizes, choice)
    config.check()
    target = target_for("internode" if choice.across_nodes else backend)
    checks.check_triple(target, config, sizes.dtype, sizes.combine_dtype)
    if backend == "host":
        window = target.layout_for(config, target.plan_for(config, NOTHING_SAID)).nbytes
        free = mori_bench.free_bytes()
        if world_size * window > free:
            raise ValueError(
                f"windows of {world_size} ranks need {world_size * window / 2**30:.1f} GiB, this machine has "
                f"{free / 2**30:.1f} GiB free: fewer ranks or tokens, or narrower rows"
            )


def _configuration(args: argparse.Namespace, values: dict[str, Any], experts: int) -> tuple[Sizes, Choice]:
    import torch

    from mori_ep import formats
    from mori_ep.bench import routes
    from mori_ep.bench.inputs import Sizes
    from mori_ep.bench.run import Choice

    dtype = getattr(torch, DTYPES[values["dtype"]])
    asked = values["combine_dtype"]
    combine = getattr(torch, DTYPES[asked]) if asked else formats.combine_dtype_for(dtype)
    hidden, topk = values["hidden"], values["topk"]
    if topk > experts:
        raise ValueError(f"--topk {topk} of --experts {experts}: a token's experts are different ones")
    routes.check(args.routing, topk, experts)
    is_fp8 = values["dtype"].startswith("fp8")
    scale_dim = args.scale_dim if args.scale_dim is not None else -(-hidden // 128) if is_fp8 else 0
    quant: str = values["quant_type"]
    sizes = Sizes(values["tokens"], hidden, topk, experts, dtype, combine, args.routing, scale_dim, args.seed)
    choice = Choice(
        kernel_type=values["kernel_type"],
        quant_type=quant,
        zero_copy=values["zero_copy"] == "1" and quant == "none",
        num_qp=values["num_qp"],
        rounds=args.rounds or settings()["MORI_EP_ROUNDS"],
        reps=args.reps,
        warmup=args.warmup,
        compare=not args.no_compare,
        fault=args.fault,
        nodes=nodes_of(args),
        engine=args.engine,
    )
    return sizes, choice


def _run(args: argparse.Namespace, configurations: list[tuple[Sizes, Choice]], world_size: int) -> int:
    """In this process if it is a rank already, else in ranks of its own."""
    if mori_bench.launched() is not None:
        return rank_main(args, configurations)
    from mori_shmem import run_ranks

    return max(run_ranks(rank_main, world_size, args, configurations))


def rank_main(args: argparse.Namespace, configurations: list[tuple[Sizes, Choice]]) -> int:
    """One rank's exit status; rank 0 prints."""
    import torch.distributed as dist

    with _Ranks(args) as ranks:
        if args.command == "test":
            from mori_ep.bench.trial import trial

            sizes, choice = configurations[0]
            right = trial(ranks.joined(choice), sizes, choice)
        else:
            right = _measure_all(ranks, args, configurations)
        rank = ranks.rank
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        print("validated" if right else "NOT VALIDATED: see above", flush=True)
    return 0 if right else 1


class _Ranks(contextlib.ExitStack):
    """The communicators of this process: inside a node, across nodes; made when first needed."""

    rank = 0

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self._args = args
        self._made: dict[bool, Any] = {}

    def joined(self, choice: Choice) -> Any:
        if choice.across_nodes not in self._made:
            self._made[choice.across_nodes] = comm = self.enter_context(self._join(choice))
            self.rank = comm.rank
        return self._made[choice.across_nodes]

    def _join(self, choice: Choice) -> Any:
        import mori_shmem

        if not choice.across_nodes:
            return mori_shmem.init(self._args.backend)
        from mori_ep import internode

        launched = mori_bench.launched()
        assert launched is not None
        return internode.join(
            ranks_per_node=launched.world_size // choice.nodes,
            backend=self._args.backend,
            engine=choice.engine,
            name="mori-ep-bench",
        )


def _measure_all(ranks: _Ranks, args: argparse.Namespace, configurations: list[tuple[Sizes, Choice]]) -> bool:
    from mori_ep.bench.report import print_found, results
    from mori_ep.bench.run import run

    right = True
    for index, (sizes, choice) in enumerate(configurations):
        comm = ranks.joined(choice)
        found = run(comm, sizes, choice)
        right = right and found.validated
        if comm.rank == 0:
            if index:
                print()
            print_found(found, picture=len(configurations) == 1)
            for result in results(found):
                result.emit(args.json)
            if args.trace:
                found.trace.write_chrome(args.trace)
    return right


if __name__ == "__main__":
    sys.exit(main())
