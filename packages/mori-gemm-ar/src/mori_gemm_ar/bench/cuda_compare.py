"""The op beside what one would pick instead, on NVIDIA GPUs:

    tools/gpu_run python -m torch.distributed.run --nproc_per_node=2 -m mori_gemm_ar.bench.cuda_compare

    table      (the default) every mode beside cuBLAS, NCCL and torch's symmetric memory, and the floor
    crossover  from which M on fusing pays (cuda_crossover.py)
    phases     where the time of a call goes, and how it depends on the grids (cuda_phases.py)
    soak       thousands of calls of random size, each compared bit for bit (cuda_soak.py)
    kernels    every kernel once at a small size, for compute-sanitizer (cuda_kernels.py)

How it measures stands in cuda_measure.py. Each of our rows is compared with the library's product and
all-reduce in fp32 before it is timed, and the exit status is 1 if one was off. `floor` is the wire at the
rate at which SMs push to one peer, or the library's GEMM where that takes longer, beside it what is reached
of it.
"""

from __future__ import annotations

import argparse
import os
import sys

import mori_bench
import mori_shmem
import torch
import torch.distributed as dist

from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.bench.cuda_crossover import SIZES, crossover
from mori_gemm_ar.bench.cuda_kernels import every_kernel
from mori_gemm_ar.bench.cuda_measure import (
    Calls,
    Operands,
    enqueue_us,
    floor_us,
    library_product,
    make_operands,
    time_rows,
    unfused,
    world_group,
)
from mori_gemm_ar.bench.cuda_phases import grids, phases
from mori_gemm_ar.bench.cuda_soak import soak

WAYS = {
    "fused-lsa": {"mode": "fused-lsa"},
    "fused-lsa fp8": {"mode": "fused-lsa", "gather_dtype": "fp8"},
    "fused-sdma": {"mode": "fused-sdma"},
    "fused-sdma fp8": {"mode": "fused-sdma", "gather_dtype": "fp8", "gather_transport": "sdma"},
    "split-lsa": {"mode": "split-lsa"},
    "split-sdma": {"mode": "split-sdma"},
    "split-lsa fp8": {"mode": "split-lsa", "gather_dtype": "fp8", "fuse_quantize": True},
    "gemm-only": {"mode": "gemm-only"},
}
BASE = "cuBLAS + NCCL"


def torch_fused(operands: Operands) -> Calls:
    """torch's fused reduce-scatter and then an all-gather. It takes no block scales, so it gets scales of
    rows."""
    a, b, a_scale, _ = operands
    m, n, group = a.shape[0], b.shape[0], world_group()
    row_scale, column_scale = a_scale.t()[:, :1].contiguous(), torch.ones(1, n, device=a.device)

    def call() -> None:
        part = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            *[a, b.t(), row_scale, column_scale, "sum", 0, 0, group, [m, n]], out_dtype=torch.bfloat16
        )
        dist.all_gather_into_tensor(torch.empty(m, n, dtype=torch.bfloat16, device=a.device), part)

    return {"torch fused (row scales) + gather": call}


def compare(comm: mori_shmem.Communicator, m: int, n: int, k: int, reps: int) -> bool:
    """Print the rows of one M; whether all of ours were right. Collective."""
    operands = make_operands(m, n, k, 100 * comm.rank + m, comm.device)
    want = library_product(operands).float()
    alone = want.clone()
    dist.all_reduce(want)
    calls: Calls = {"cuBLAS": lambda: library_product(operands), **unfused(operands), **torch_fused(operands)}
    ops: dict[str, GemmAllReduce] = {}
    errors: dict[str, float] = {}
    for name, way in WAYS.items():
        op = ops[name] = GemmAllReduce(comm, n=n, k=k, m_max=m, quant="blockscale", **way)  # type: ignore[arg-type]
        got, target = op(*operands).float(), alone if name == "gemm-only" else want
        errors[name] = max(comm.all_gather(float((got - target).norm() / target.norm())))
        calls[name] = lambda op=op: op(*operands)  # type: ignore[misc]
    timings = time_rows(calls, reps, comm)
    enqueue = {name: enqueue_us(calls[name], comm) for name in ops}
    right = {name: error <= (3e-2 if "fp8" in name else 4e-3) for name, error in errors.items()}
    if comm.rank == 0:
        floors = {
            fp8: max(floor_us(m, n, comm.world_size, fp8), timings["cuBLAS"].median_us)
            for fp8 in (False, True)
        }
        for name, timing in timings.items():
            print(
                _row(m, name, timing, timings[BASE].median_us, floors["fp8" in name], enqueue.get(name)),
                flush=True,
            )
        for name, op in ops.items():
            _result(op, name, m, timings[name], errors[name], right[name], enqueue[name]).emit()
        for name in [name for name in right if not right[name]]:
            print(f"NOT VALIDATED: {name} at M={m} is off by {errors[name]:.2e}", flush=True)
    comm.barrier()
    for op in ops.values():
        op.close()
    return all(right.values())


def _row(
    m: int, name: str, timing: mori_bench.Timing, base_us: float, floor: float, enqueue: float | None
) -> str:
    median = timing.median_us
    row = (
        f"{m:6d} {name:34s} {median:8.1f} [{timing.min_us:.1f} {timing.max_us:.1f}]  {base_us / median:5.2f}x"
    )
    if name.startswith(("fused", "split")):
        row += f"  floor {floor:6.1f}  {floor / median:4.0%} of it"
    return row if enqueue is None else f"{row}  eager enqueue {enqueue:.0f} us"


def _result(
    op: GemmAllReduce, name: str, m: int, timing: mori_bench.Timing, error: float, right: bool, enqueue: float
) -> mori_bench.Result:
    options = op.options
    return mori_bench.Result(
        op="gemm_ar",
        backend="cuda",
        device=torch.cuda.get_device_name(op.comm.device),
        world_size=op.comm.world_size,
        mode=options.mode,
        shape={"m": m, "n": op.n, "k": op.k},
        dtype={
            "input": "fp8_e4m3fn",
            "quant": options.quant,
            "gather": options.gather_dtype or "none",
            "output": "bf16",
        },
        timing=timing,
        validated=right,
        rel_l2=error,
        settings={
            "name": name,
            "gather_transport": options.gather_transport,
            "ran": op.ran(m),
            "graph_of_calls": 4,
        },
        packages=("mori-gemm-ar", "mori-shmem", "torch"),
        extra={"eager_enqueue_us": round(enqueue, 1), "window_bytes": op.window_bytes},
    )


def table(comm: mori_shmem.Communicator, args: argparse.Namespace) -> bool:
    """All rows of all M."""
    if comm.rank == 0:
        print("     M what                                    median us [least most]   over cuBLAS + NCCL")
    right = True
    for m in args.m or (4096, 8192, 16384):
        right = compare(comm, m, args.n, args.k, args.reps) and right
    return right


def _crossover(comm: mori_shmem.Communicator, args: argparse.Namespace) -> bool:
    crossover(comm, args.m or list(SIZES), args.n, args.k, args.reps)
    return True


def _phases(comm: mori_shmem.Communicator, args: argparse.Namespace) -> bool:
    for m in args.m or (4096, 16384):
        phases(comm, m, args.n, args.k, args.reps)
        grids(comm, m, args.n, args.k, args.reps)
    return True


def _soak(comm: mori_shmem.Communicator, args: argparse.Namespace) -> bool:
    return soak(comm, args.calls, max(args.m or [4096]), args.n, args.k)


def _kernels(comm: mori_shmem.Communicator, args: argparse.Namespace) -> bool:
    return every_kernel(comm)


PARTS = {"table": table, "crossover": _crossover, "phases": _phases, "soak": _soak, "kernels": _kernels}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="the op beside cuBLAS, NCCL and torch's symmetric memory")
    parser.add_argument("what", nargs="*", help=f"of {', '.join(PARTS)}, one after the other; default: table")
    parser.add_argument("-m", type=int, nargs="+", help="rows; soak: the most")
    parser.add_argument("-n", type=int, default=7168)
    parser.add_argument("-k", type=int, default=2048)
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--calls", type=int, default=10_000, help="soak: how many")
    args = parser.parse_args()
    if unknown := set(args.what) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    right = True
    with mori_shmem.init(backend="cuda") as comm:
        for part in args.what or ["table"]:
            right = PARTS[part](comm, args) and right
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
