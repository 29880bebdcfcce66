"""From which M on does fusing pay? Fused calls beside everything that is not fused, over M, in turns.

Not fused: cuBLAS and NCCL's or torch's all-reduce, and our own GEMM with the sum in one stage (every rank
adds all rows of all ranks) or two (split-lsa). The crossover is the least M from which on fused is faster
than the best of them at every larger M that was measured.
"""

from __future__ import annotations

import mori_shmem
import torch

from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.bench.cuda_measure import Calls, make_operands, time_rows, unfused

SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
FUSED = {
    "fused-lsa": {"mode": "fused-lsa"},
    "fused-lsa fp8": {"mode": "fused-lsa", "gather_dtype": "fp8"},
}
OWN = {
    "one-stage": {"mode": "fused-lsa", "small_m": "one-stage", "small_m_below": 1 << 20},
    "two-stage": {"mode": "split-lsa"},
}


def crossover(comm: mori_shmem.Communicator, sizes: list[int], n: int, k: int, reps: int) -> None:
    """Print the table and the crossovers. Collective."""
    if comm.rank == 0:
        names = [*FUSED, "cuBLAS + NCCL", "+ one-shot", "+ two-shot", *OWN]
        print(
            f"{'M':>6} " + " ".join(f"{name:>14}" for name in names) + "   best not fused: which, us",
            flush=True,
        )
    faster: dict[str, list[tuple[int, bool]]] = {name: [] for name in FUSED}
    for m in sorted(sizes):
        times = _times(comm, m, n, k, reps)
        best = min((name for name in times if name not in FUSED), key=times.__getitem__)
        for name, wins in faster.items():
            wins.append((m, times[name] < times[best]))
        if comm.rank == 0:
            row = " ".join(f"{us:14.1f}" for us in times.values())
            print(f"{m:6d} {row}   {best}, {times[best]:.1f}", flush=True)
    if comm.rank == 0:
        for name, wins in faster.items():
            print(f"{name} is the fastest {crossover_of(wins)}", flush=True)


def crossover_of(wins: list[tuple[int, bool]]) -> str:
    """From ascending (M, whether fused was faster)."""
    start = len(wins)
    while start and wins[start - 1][1]:
        start -= 1
    if start == len(wins):
        return f"at no end of this range: not at M={wins[-1][0]}"
    return f"from M={wins[start][0]} on" + (" (the least that was measured)" if start == 0 else "")


def _times(comm: mori_shmem.Communicator, m: int, n: int, k: int, reps: int) -> dict[str, float]:
    operands = make_operands(m, n, k, 100 * comm.rank + m, comm.device)
    ways = {**FUSED, **OWN}
    ops = {name: GemmAllReduce(comm, n=n, k=k, m_max=m, **way) for name, way in ways.items()}  # type: ignore[arg-type]
    calls: Calls = {name: lambda op=ops[name]: op(*operands) for name in FUSED}  # type: ignore[misc]
    calls |= unfused(operands)
    calls |= {name: lambda op=ops[name]: op(*operands) for name in OWN}  # type: ignore[misc]
    timings = time_rows(calls, reps, comm)
    torch.cuda.synchronize()
    comm.barrier()
    for op in ops.values():
        op.close()
    return {name: timing.max_rank_time_us for name, timing in timings.items()}
