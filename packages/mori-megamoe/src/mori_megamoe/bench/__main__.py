"""`mori-megamoe-bench`: every way of Stage1, checked byte for byte and timed in turns.

    mori-megamoe-bench                               4 ranks of this machine, all modes, a small layer
    mori-megamoe-bench test                          four calls of each mode, inputs alternate; not timed
    mori-megamoe-bench --mode ldsw,in-launch --bs-list 16,64 --routing hot-rank0
    mori-megamoe-bench --shape v4_pro --bs-list 2048,4096,8192 --world-size 8
    torchrun --nproc_per_node=2 -m mori_megamoe.bench        with ranks that somebody else starts

The baseline is always among the modes. The last line is `validated`, and the exit status 0, only if every
byte of the layer's output was compared with the reference in this run, in every mode, and was right; 1 if one
was not, 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mori_bench
from mori_bench import add_common_options
from mori_bench.options import at_least, why_not_writable
from mori_shmem import settings
from mori_shmem.errors import MoriError, SettingError

from mori_megamoe.bench import sizes as sizes_
from mori_megamoe.bench.modes import MODES, Mode, modes_from
from mori_megamoe.bench.sizes import Sizes

if TYPE_CHECKING:
    import mori_shmem

    from mori_megamoe.bench.run import Choice, Measured

DEFAULT_WORLD_SIZE = 4


def parser() -> argparse.ArgumentParser:
    """All options of the command."""
    made = argparse.ArgumentParser(
        "mori-megamoe-bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("command", nargs="?", choices=("bench", "test"), default="bench", help="default: bench")
    add_common_options(made, reps=sizes_.SMALL_REPS, warmup=1)
    modes = "; ".join(f"{mode.name}: {mode.about}" for mode in MODES.values())
    made.add_argument(
        "--mode",
        default="all",
        metavar="MODE",
        help=f"all (default; but for the last two), or of these: {modes}",
    )
    made.add_argument(
        "--copy-delay-us",
        type=at_least(0),
        default=0,
        metavar="N",
        help="hold each copy of the queues back: on CPUs the wire is too quick, beside GEMM1, to be seen",
    )
    made.add_argument("--picture", metavar="FILE", help="draw one launch of the last mode, as SVG")
    sizes_.add_options(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    made = parser()
    args = made.parse_args(argv)
    try:
        settings.effective()  # now, and not in ranks that have started
    except SettingError as refusal:
        print(f"mori-megamoe-bench: {refusal}", file=sys.stderr)
        return 2
    try:
        world_size = mori_bench.world_size_of(args, default=DEFAULT_WORLD_SIZE)
        args.backend = backend_for(args.backend)
        modes = modes_from(args.mode)
        sizes = sizes_.sizes_from(args, world_size)
        sizes_.check_memory(sizes.problem, len(modes))
        _check_options(args, sizes, modes)
        _check_files(args)
    except (MoriError, ValueError) as refusal:
        made.error(str(refusal))
    from mori_megamoe.bench.run import Choice

    choice = Choice(modes, sizes_.reps_for(args), args.warmup, args.fault, args.copy_delay_us)
    try:
        return _run(args, sizes, choice)
    except KeyboardInterrupt:
        print("interrupted; the ranks have been ended", file=sys.stderr)
        return 130
    except MoriError as failure:
        print(f"mori-megamoe-bench: {type(failure).__name__}: {failure}", file=sys.stderr)
        for note in getattr(failure, "__notes__", ()):
            print(note, file=sys.stderr)
        return 2


def _check_options(args: argparse.Namespace, sizes: Sizes, modes: Sequence[Mode]) -> None:
    """What is asked for can have an effect."""
    if args.fault and min(sizes.bs_list) < 2:
        raise ValueError("--break needs two tokens: what it exchanges must differ")
    if args.picture and sizes.bs_list[-1] == 0:
        raise ValueError(f"--picture {args.picture}: without tokens there is nothing to draw")
    if args.copy_delay_us and not any(mode.copy_engines for mode in modes):
        raise ValueError(f"--copy-delay-us {args.copy_delay_us} and --mode {args.mode}, which has no queues")


def _check_files(args: argparse.Namespace) -> None:
    """What a run would write can be written, and is written by that command."""
    for name in ("json", "trace", "picture"):
        path = getattr(args, name)
        if path is None:
            continue
        if args.command == "test":
            raise ValueError(f"--{name} {path}: `test` measures nothing, it is for `bench`")
        if reason := why_not_writable(path):
            raise ValueError(reason)
    if args.command == "test" and not isinstance(args.reps, sizes_.Unasked):
        raise ValueError(f"--reps {args.reps}: `test` repeats nothing, it is for `bench`")


def backend_for(asked: str) -> str:
    """What is asked for, if this bench measures there: its clock and its inputs are the host's."""
    from mori_megamoe.targets import target_for

    if asked == "cuda":
        raise ValueError(
            "--backend cuda: this bench measures on the host target. GPUs have a bench of their own: "
            "python -m mori_megamoe.targets.cuda.bench_layer"
        )
    if asked != "auto":
        target_for(asked)
    return "host" if asked == "auto" else asked


def _run(args: argparse.Namespace, sizes: Sizes, choice: Choice) -> int:
    """In this process if it is a rank already, else in ranks of its own."""
    if mori_bench.launched() is not None:
        return rank_main(args, sizes, choice)
    from mori_shmem import run_ranks

    return max(run_ranks(rank_main, sizes.problem.num_ranks, args, sizes, choice))


def rank_main(args: argparse.Namespace, sizes: Sizes, choice: Choice) -> int:
    """One rank's exit status; rank 0 prints."""
    import mori_shmem

    with mori_shmem.init(args.backend) as comm:
        if args.command == "test":
            from mori_megamoe.bench.trial import trial

            right = trial(comm, sizes, choice)
        else:
            right = _measure_all(comm, args, sizes, choice)
        rank = comm.rank
    if rank == 0:
        print("validated" if right else "NOT VALIDATED: see above", flush=True)
    return 0 if right else 1


def _measure_all(
    comm: mori_shmem.Communicator, args: argparse.Namespace, sizes: Sizes, choice: Choice
) -> bool:
    from mori_megamoe.bench import report
    from mori_megamoe.bench.run import Bench

    device = mori_bench.cpu_name()
    if comm.rank == 0:
        report.print_heading(sizes, choice, comm.backend, device)
    done: list[Measured] = []
    bench = Bench(comm, sizes, choice)
    try:
        for tokens in sizes.bs_list:
            done.append(bench.measure(tokens))
            if comm.rank == 0:
                report.print_measured(done[-1])
    finally:
        bench.close()
    if comm.rank == 0:
        report.print_picture(done[-1].found[-1])
        for measured in done:
            for found in measured.found:
                report.result_of(measured, found, sizes, choice, comm.backend, device).emit(args.json)
        _write_files(args, sizes, done)
    return all(found.checked.ok for measured in done for found in measured.found)


def _write_files(args: argparse.Namespace, sizes: Sizes, done: list[Measured]) -> None:
    """One more launch of each mode as a trace; of the last one a picture."""
    if args.trace:
        everything = mori_bench.Trace.merge(found.trace for measured in done for found in measured.found)
        everything.write_chrome(args.trace)
    if args.picture:
        from mori_megamoe.bench.picture import svg

        found = done[-1].found[-1]
        title = (
            f"Stage1 on rank 0 of {sizes.problem.num_ranks}: {found.mode.name}, {found.tokens} tokens a rank"
        )
        if args.copy_delay_us:
            title += f", each copy held back by {args.copy_delay_us} us"
        drawn = svg(found.trace, rank=0, experts_per_rank=sizes.problem.experts_per_rank, title=title)
        with open(args.picture, "w", encoding="utf-8") as file:
            file.write(drawn)


if __name__ == "__main__":
    sys.exit(main())
