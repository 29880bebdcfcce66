"""The op beside what one would pick instead, in one run on NVIDIA GPUs:

    tools/gpu_run python -m torch.distributed.run --nproc_per_node=2 -m mori_gemm_ar.bench.cuda_compare

How it measures: each row is a CUDA graph of 4 calls. Repetitions go over all rows in turn, forwards and
backwards; ranks meet before each; a repetition's time is the slowest rank's, the first one is dropped, the
median is printed with the least and the most. Data is random (zeros run faster). Each of our rows is compared
with the library's product and all-reduce in fp32 before it is timed. `floor` is the wire at the rate at which
SMs push to one peer, beside it what is reached of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable

import mori_shmem
import torch
import torch.distributed as dist

from mori_gemm_ar import GemmAllReduce

PUSH_GBPS = 355.0  # 2x H200, both directions: 132 SMs or 32, bulk or tensor stores, 345 to 356
CALLS = 4
WAYS = {
    "fused-lsa": {"mode": "fused-lsa"},
    "fused-lsa fp8": {"mode": "fused-lsa", "gather_dtype": "fp8"},
    "fused-sdma": {"mode": "fused-sdma"},
    "fused-sdma fp8": {"mode": "fused-sdma", "gather_dtype": "fp8", "gather_transport": "sdma"},
    "split-lsa": {"mode": "split-lsa"},
    "split-sdma": {"mode": "split-sdma"},
    "gemm-only": {"mode": "gemm-only"},
}
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_operands(m: int, n: int, k: int, seed: int, device: torch.device) -> Operands:
    """a, b, a_scale [k / 128, m], b_scale [n / 128, k / 128]: normal data, its rows of different size."""
    generator = torch.Generator(device=device).manual_seed(seed)
    a = torch.randn(m, k, device=device, generator=generator) * (
        0.5 + torch.rand(m, 1, device=device, generator=generator)
    )
    b = torch.randn(n, k, device=device, generator=generator) * 0.05
    a_blocks, b_blocks = a.view(m, k // 128, 128), b.view(n // 128, 128, k // 128, 128)
    a_scale, b_scale = a_blocks.abs().amax(2) / 448, b_blocks.abs().amax((1, 3)) / 448
    a_codes = (a_blocks / a_scale[..., None]).view(m, k).to(torch.float8_e4m3fn)
    b_codes = (b_blocks / b_scale[:, None, :, None]).reshape(n, k).to(torch.float8_e4m3fn)
    return a_codes, b_codes, a_scale.t().contiguous(), b_scale.contiguous()


def library_product(operands: Operands) -> torch.Tensor:
    a, b, a_scale, b_scale = operands
    return torch._scaled_mm(a, b.t(), a_scale.t(), b_scale.t(), out_dtype=torch.bfloat16)


def baselines(operands: Operands, group: str) -> dict[str, Callable[[], object]]:
    """What torch offers. Its fused reduce-scatter takes no block scales, so it gets scales of rows."""
    from torch.distributed import _symmetric_memory as symmetric

    a, b, a_scale, _ = operands
    m, n = a.shape[0], b.shape[0]
    shared = symmetric.empty(m, n, dtype=torch.bfloat16, device=a.device)
    symmetric.rendezvous(shared, group)  # type: ignore[arg-type]
    row_scale, column_scale = a_scale.t()[:, :1].contiguous(), torch.ones(1, n, device=a.device)

    def nccl() -> None:
        dist.all_reduce(library_product(operands))

    def two_shot() -> None:
        shared.copy_(library_product(operands))
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

    def reduce_scatter() -> None:
        part = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            *[a, b.t(), row_scale, column_scale, "sum", 0, 0, group, [m, n]], out_dtype=torch.bfloat16
        )
        dist.all_gather_into_tensor(torch.empty(m, n, dtype=torch.bfloat16, device=a.device), part)

    return {
        "cuBLAS": lambda: library_product(operands),
        "cuBLAS + NCCL": nccl,
        "cuBLAS + torch two-shot": two_shot,
        "torch fused (row scales) + gather": reduce_scatter,
    }


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def measure(
    calls: dict[str, Callable[[], object]], reps: int, device: torch.device
) -> dict[str, tuple[float, ...]]:
    """(median, least, most) in us a call."""
    graphs = {name: capture(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for rep in range(reps + 1):
        for name in list(graphs) if rep % 2 else reversed(graphs):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            dist.barrier()
            torch.cuda.synchronize()
            start.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(list(times.values()), device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    rows = slowest[:, 1:].tolist()
    return {n: (statistics.median(r), min(r), max(r)) for n, r in zip(times, rows, strict=True)}


def _group() -> str:
    world = dist.group.WORLD
    assert world is not None
    return str(world.group_name)


def floor_us(m: int, n: int, num_ranks: int, fp8: bool) -> float:
    slice_elements = m / num_ranks * n
    gathered = slice_elements * (1 + 4 / 128 if fp8 else 2)
    return (num_ranks - 1) * (2 * slice_elements + gathered) / PUSH_GBPS / 1e3


def compare(comm: mori_shmem.Communicator, m: int, n: int, k: int, reps: int) -> bool:
    """Print the rows of one M; whether all of ours were right."""
    device = comm.device
    operands = make_operands(m, n, k, 100 * comm.rank + m, device)
    want = library_product(operands).float()
    alone = want.clone()
    dist.all_reduce(want)
    calls, ops, right = baselines(operands, _group()), [], True
    for name, way in WAYS.items():
        op = GemmAllReduce(comm, n=n, k=k, m_max=m, quant="blockscale", **way)  # type: ignore[arg-type]
        ops.append(op)
        got, target = op(*operands).float(), alone if name == "gemm-only" else want
        error = float((got - target).norm() / target.norm())
        good = error <= (3e-2 if "fp8" in name else 4e-3)
        right = right and good
        if not good:
            print(f"rank {comm.rank}: {name} at M={m} is off by {error:.2e}", flush=True)
        calls[name] = lambda op=op: op(*operands)  # type: ignore[misc]
    times = measure(calls, reps, device)
    base = times["cuBLAS + NCCL"][0]
    if comm.rank == 0:
        for name, (median, least, most) in times.items():
            row = f"{m:6d} {name:34s} {median:8.1f} [{least:.1f} {most:.1f}]  {base / median:5.2f}x"
            if name.startswith(("fused", "split")):
                floor = floor_us(m, n, comm.world_size, "fp8" in name)
                row += f"  floor {floor:6.1f}  {floor / median:4.0%} of it"
            print(row, flush=True)
    for op in ops:
        op.close()
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="the op beside cuBLAS, NCCL and torch's symmetric memory")
    parser.add_argument("-m", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("-n", type=int, default=7168)
    parser.add_argument("-k", type=int, default=2048)
    parser.add_argument("--reps", type=int, default=10)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    with mori_shmem.init(backend="cuda") as comm:
        if comm.rank == 0:
            print(
                "     M what                                    median us [least most]   over cuBLAS + NCCL"
            )
        right = True
        for m in args.m:
            right = compare(comm, m, args.n, args.k, args.reps) and right
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
