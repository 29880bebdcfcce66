"""What the benches of the cuda target share: operands, what one would pick instead, and how rows are timed.

Each row is a CUDA graph of CALLS calls. Repetitions go over all rows in turn, forwards and backwards
(mori_bench.measure); ranks meet before each; a repetition's time is the slowest rank's, between two events
around the graph. Data is random: zeros run faster. Nothing is flushed: at these sizes nothing stays in L2.
"""

from __future__ import annotations

from collections.abc import Callable

import mori_bench
import mori_shmem
import torch
import torch.distributed as dist

CALLS = 4
PUSH_GBPS = 355.0  # 2x H200, both directions: 132 SMs or 32, bulk or tensor stores, 345 to 356
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Calls = dict[str, Callable[[], object]]


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
    """cuBLAS, blockwise scales."""
    a, b, a_scale, b_scale = operands
    return torch._scaled_mm(a, b.t(), a_scale.t(), b_scale.t(), out_dtype=torch.bfloat16)


def world_group() -> str:
    """The name of the default process group."""
    world = dist.group.WORLD
    assert world is not None
    return str(world.group_name)


def shared_matrix(m: int, n: int, device: torch.device) -> torch.Tensor:
    """[m, n] bf16 in torch's symmetric memory. Collective."""
    from torch.distributed import _symmetric_memory as symmetric

    matrix = symmetric.empty(m, n, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(matrix, world_group())  # type: ignore[arg-type]
    return matrix


def unfused(operands: Operands) -> Calls:
    """cuBLAS and then an all-reduce: NCCL's, and torch's over symmetric memory."""
    a, b, *_ = operands
    group, shared = world_group(), shared_matrix(a.shape[0], b.shape[0], a.device)

    def nccl() -> None:
        dist.all_reduce(library_product(operands))

    def one_shot() -> None:
        shared.copy_(library_product(operands))
        torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)

    def two_shot() -> None:
        shared.copy_(library_product(operands))
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

    return {"cuBLAS + NCCL": nccl, "cuBLAS + torch one-shot": one_shot, "cuBLAS + torch two-shot": two_shot}


def capture(call: Callable[[], object], comm: mori_shmem.Communicator) -> torch.cuda.CUDAGraph:
    """CALLS calls as a graph, replayed once."""
    call()
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    torch.cuda.synchronize()
    comm.barrier()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_rows(calls: Calls, reps: int, comm: mori_shmem.Communicator) -> dict[str, mori_bench.Timing]:
    """All rows in turn, as graphs. Collective."""

    def case(graph: torch.cuda.CUDAGraph) -> mori_bench.Case:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def replay() -> None:
            start.record()
            graph.replay()
            end.record()

        def finish() -> float:
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        return mori_bench.Case(replay, finish, CALLS)

    graphs = {name: capture(call, comm) for name, call in calls.items()}
    return mori_bench.measure(
        {name: case(graph) for name, graph in graphs.items()},
        reps=reps,
        warmup=0,
        gather=comm.all_gather,
        before=comm.barrier,
    )


def enqueue_us(call: Callable[[], object], comm: mori_shmem.Communicator, calls: int = 10) -> float:
    """What one eager call costs the host until it returns, the GPU being idle before and the queue short:
    the least of ten runs of `calls` calls, the slowest rank."""
    from time import perf_counter

    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        comm.barrier()
        began = perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    slowest: float = max(comm.all_gather(best))
    return slowest


def floor_us(m: int, n: int, num_ranks: int, fp8: bool) -> float:
    """The wire at the rate at which SMs push to one peer."""
    slice_elements = m / num_ranks * n
    gathered = slice_elements * (1 + 4 / 128 if fp8 else 2)
    return (num_ranks - 1) * (2 * slice_elements + gathered) / PUSH_GBPS / 1e3
