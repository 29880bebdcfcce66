"""`mori-gemm-ar-bench`: every mode of the fused GEMM + all-reduce, checked against float64 and timed in
turns.

    mori-gemm-ar-bench                                  8 ranks of this machine, all modes, under a minute
    mori-gemm-ar-bench --mode fused-sdma -m 4096 -n 7168 -k 2048 --gather-dtype fp8
    mori-gemm-ar-bench --compare unfused                beside a separate GEMM and gloo's all-reduce
    mori-gemm-ar-bench accuracy                         what fp8 costs, by scale granularity and by wire
    mori-gemm-ar-bench table headline                   published figures beside those measured here; also
                                                        phases, pull-grid, granularity, negative
    torchrun --nproc_per_node=8 -m mori_gemm_ar.bench   with ranks that somebody else starts

The last line is `validated`, and the exit status 0, only if every case was compared with the reference in
this run and passed; 1 if one did not pass, 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import mori_bench
from mori_bench import add_common_options
from mori_shmem import settings
from mori_shmem.errors import ArgumentError, DescriptorLimitError, MoriError

from mori_gemm_ar.bench.cases import DEFAULT_SHAPE, Case, add_options, cases_from
from mori_gemm_ar.bench.limits import check_memory, check_run, reference_bytes
from mori_gemm_ar.bench.published import TABLES

DEFAULT_WORLD_SIZE = 8


def parser() -> argparse.ArgumentParser:
    """All options of the command."""
    made = argparse.ArgumentParser(
        "mori-gemm-ar-bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = ("run", "accuracy", "table")
    made.add_argument("command", nargs="?", choices=commands, default="run", help="default: run")
    made.add_argument("table", nargs="?", choices=TABLES, help="of `table`: which one")
    made.set_defaults(time_phases=False)
    add_common_options(made, reps=5, warmup=1)
    add_options(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    made = parser()
    args = made.parse_args(argv)
    if (args.command == "table") != (args.table is not None):
        made.error(f"`table` takes one of {', '.join(TABLES)}, and nothing else does")
    if args.command == "table":
        return _table(args)
    for name, size in DEFAULT_SHAPE.items():
        setattr(args, name, size if getattr(args, name) is None else getattr(args, name))
    if args.command == "accuracy":
        return _accuracy(args)
    try:
        settings.effective()  # a variable with a bad value is refused here, not by each rank
        world_size = mori_bench.world_size_of(args, default=DEFAULT_WORLD_SIZE)
        args.backend = backend_for(args.backend, world_size)
        if args.m < 0:
            raise ValueError(f"-m {args.m}: at least 0 rows")
        cases = cases_from(args)
        largest = {"quant": args.quant, "mode": "gemm-only"} if args.mode == "all" else cases[0].given
        check_run(args.backend, args.m, args.n, args.k, world_size, largest)
        if args.compare and args.backend != "host":
            raise ValueError(
                f"--compare {args.compare} is a baseline for the host backend, not {args.backend}"
            )
    except (MoriError, ValueError) as refusal:
        return _refused(refusal)
    return _on_ranks(rank_main, world_size, args, cases)


def _refused(refusal: Exception) -> int:
    """The exit status of a run that was not begun."""
    print(f"mori-gemm-ar-bench: error: {refusal}", file=sys.stderr)
    return 2


def _accuracy(args: argparse.Namespace) -> int:
    """What fp8 costs."""
    from mori_gemm_ar.bench.accuracy import WIRE_SAMPLE, print_accuracy

    m, n = WIRE_SAMPLE
    try:
        settings.effective()
        if args.k < 1:
            raise ValueError(f"-k {args.k}: at least 1")
        check_memory(reference_bytes(m, n, args.k, 1), f"-k {args.k}")
    except (MoriError, ValueError) as refusal:
        return _refused(refusal)
    print_accuracy(args)
    return 0


def _table(args: argparse.Namespace) -> int:
    """One of the published tables."""
    from mori_gemm_ar.bench.tables import print_granularity

    if args.table == "granularity":
        print_granularity(args)
        return 0
    try:
        settings.effective()
        world_size = mori_bench.world_size_of(args, default=DEFAULT_WORLD_SIZE)
        args.backend = backend_for(args.backend, world_size)
        check_run(args.backend, args.m or 1, args.n or 256, args.k or 256, world_size, {"mode": "gemm-only"})
    except (MoriError, ValueError) as refusal:
        return _refused(refusal)
    return _on_ranks(table_main, world_size, args)


def table_main(args: argparse.Namespace) -> int:
    """One rank's exit status; rank 0 prints."""
    import torch.distributed as dist

    from mori_gemm_ar.bench.run import run
    from mori_gemm_ar.bench.tables import measured_arguments, print_table

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")  # one for all runs: a store is good for one
    done, rank = [], 0
    for run_args, cases in measured_arguments(args):
        found, rank = run(run_args, cases)
        done.append((run_args, found))
    if dist.is_initialized():
        dist.destroy_process_group()
    right = all(measured.validated for _, found in done for measured in found.measured)
    if rank == 0:
        print_table(args, done)
        print("validated" if right else "NOT VALIDATED: see the rows above", flush=True)
    return 0 if right else 1


def backend_for(asked: str, world_size: int) -> str:
    """What is asked for; "auto" is the GPUs only where each rank has one of its own."""
    if asked != "auto":
        return asked
    import torch
    from mori_shmem.comm import backend_of

    found = backend_of("auto")
    enough = found == "host" or "MORI_SHMEM_BACKEND" in os.environ or torch.cuda.device_count() >= world_size
    return found if enough else "host"


def _on_ranks(main: Callable[..., int], world_size: int, *args: object) -> int:
    """The exit status of ranks: of this process if it is a rank already, else of ranks of its own."""
    try:
        if mori_bench.launched() is not None:
            return main(*args)
        from mori_shmem import run_ranks

        return max(run_ranks(main, world_size, *args))
    except KeyboardInterrupt:
        print("interrupted; the ranks have been ended", file=sys.stderr)
        return 130
    except MoriError as failure:
        print(f"mori-gemm-ar-bench: {type(failure).__name__}: {failure}", file=sys.stderr)
        told = isinstance(failure, (ArgumentError, DescriptorLimitError))  # where a rank stood adds nothing
        for note in getattr(failure, "__notes__", ()) if not told else ():
            print(note, file=sys.stderr)
        return 2


def rank_main(args: argparse.Namespace, cases: list[Case]) -> int:
    """One rank's exit status; rank 0 prints."""
    from mori_gemm_ar.bench.report import report, validated
    from mori_gemm_ar.bench.run import run

    found, rank = run(args, cases)
    if rank != 0:
        return 0 if validated(found) else 1
    right = report(found, args)
    print("validated" if right else "NOT VALIDATED: see the rows above", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
