"""`mori-shmem-bench`: what each part of the transport costs, beside what one would use instead.

On the host, without arguments, it runs the parts that its targets are about: copies and latencies between 2
ranks, barriers at 2, 4 and 8, the all-reduce at 4; then it says which targets this run met. On NVIDIA GPUs
(bench/cuda) it runs every part with one rank a GPU, beside NCCL. On AMD GPUs and their software node it runs
what the host starts: copies, latencies, barriers. `--world-size N` runs every part at N ranks. Every row is
checked in this run; the exit code is 1 if any of them is wrong, 2 if the run could not be made.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import mori_bench
from mori_bench import Result
from mori_bench.options import at_least

from mori_shmem import settings
from mori_shmem.bench.put import SIZES
from mori_shmem.bench.stage import Options, Stage
from mori_shmem.bench.targets import targets
from mori_shmem.comm import backend_of
from mori_shmem.errors import ArgumentError, DescriptorLimitError, MoriError
from mori_shmem.launch import run_ranks, started_by_launcher

PARTS = ("put", "latency", "barrier", "all_reduce")
CUDA_PARTS = (*PARTS, "pairs")
ROCM_PARTS = ("put", "latency", "barrier")  # the all-reduce of this package runs on the CPU
DEFAULT_RUNS = ((2, ("put", "latency", "barrier")), (4, ("barrier", "all_reduce")), (8, ("barrier",)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script's exit status. Under torchrun every rank calls it and rank 0 reports."""
    args = _parse(arguments)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("interrupted; the ranks have been ended", file=sys.stderr)
        return 130
    except (MoriError, ValueError) as failure:
        print(f"mori-shmem-bench: error: {failure}", file=sys.stderr)
        told = isinstance(failure, (ValueError, DescriptorLimitError))  # where a rank stood adds nothing
        for note in getattr(failure, "__notes__", ()) if not told else ():
            print(note, file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    settings.effective()  # a variable with a bad value is refused here, not by each rank
    mori_bench.world_size_of(args, default=2)  # refuses a --world-size that is not the launcher's
    backend = backend_of(args.backend)
    options = Options(args.reps, args.warmup, args.seed, args.fault, backend, args.max_bytes)
    offered = {"cuda": CUDA_PARTS, "rocm": ROCM_PARTS}.get(backend, PARTS)
    parts = tuple(args.part or offered)
    if absent := [part for part in parts if part not in offered]:
        raise ArgumentError(f"--part {absent[0]}: on the {backend} backend there are {', '.join(offered)}")
    if started_by_launcher():
        results = run_rank(options, parts)
        return _report(results, args.json) if os.environ["RANK"] == "0" else 0
    if args.world_size is not None:
        runs = [(args.world_size, parts)]
    elif backend == "cuda":
        runs = [(_num_gpus(), parts)]
    elif backend == "rocm":
        runs = [(2, parts)]
    else:
        runs = [(n, tuple(p for p in of_run if p in parts)) for n, of_run in DEFAULT_RUNS]
    results = []
    for world_size, of_run in runs:
        if of_run:
            print(f"{world_size} ranks: {', '.join(of_run)} ...", file=sys.stderr, flush=True)
            results += run_ranks(run_rank, world_size, options, of_run)[0]
    return _report(results, args.json)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("mori-shmem-bench", description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=CUDA_PARTS, help="only this part; may be given several times"
    )
    parser.add_argument(
        "--max-bytes",
        type=at_least(min(SIZES)),
        default=max(SIZES),
        metavar="N",
        help="nothing larger than this (default: %(default)s)",
    )
    mori_bench.add_common_options(parser)
    args = parser.parse_args(arguments)
    if args.trace:
        parser.error("--trace: this bench has no phases to trace; mori-gemm-ar-bench does")
    return args


def run_rank(options: Options, parts: Sequence[str]) -> list[Result]:
    """One rank of one run; the results are rank 0's to report."""
    import importlib

    import torch.distributed as dist

    import mori_shmem

    where = "mori_shmem.bench.cuda" if options.backend == "cuda" else "mori_shmem.bench"
    has_nccl = options.backend == "cuda" and _one_gpu_a_rank()
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_nccl else "gloo")
    try:
        with mori_shmem.init(options.backend) as comm:
            stage = Stage(comm, options, has_nccl)
            for part in parts:
                importlib.import_module(f"{where}.{part}").run(stage)
            comm.barrier()
            return stage.results
    finally:
        dist.destroy_process_group()


def _one_gpu_a_rank() -> bool:
    """Take this rank's GPU; whether NCCL can be used, which wants one for each rank."""
    import torch

    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.cuda.set_device(local % count)
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) <= count


def _num_gpus() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def _report(results: Sequence[Result], json_file: str | None) -> int:
    rows = [result.emit(json_file) for result in results]
    columns = ("op", "mode", "world_size", "shape", "max_rank_time_us", "spread_pct", "gb_per_s", "validated")
    print("\n" + mori_bench.table(rows, columns))
    if any(result.backend == "host" for result in results):
        print("\nTargets, for two idle cores:")
        for target in targets(results):
            print(f"  {target}")
    wrong = [result for result in results if not result.validated]
    if wrong:
        print(f"\n{len(wrong)} of {len(results)} results are wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
