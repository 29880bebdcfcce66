"""Where the time of a call goes, phase by phase, and how it depends on the grids.

Phases are timed by events between the steps of an eager call, waited for each time, so their sum is more than
a call behind others takes. A fused call is one kernel: its phases overlap, and what can be told of it is how
much longer it takes than its product alone.
"""

from __future__ import annotations

import statistics
from typing import Any

import mori_bench
import mori_shmem
import torch

from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.bench.cuda_measure import Calls, Operands, make_operands, time_rows
from mori_gemm_ar.plan import Phase

FP8 = {"gather_dtype": "fp8"}
WAYS = {
    "gemm-only": {"mode": "gemm-only"},
    "split-sdma": {"mode": "split-sdma"},
    "split-sdma fp8": {"mode": "split-sdma", "gather_transport": "sdma", **FP8},
    "split-lsa": {"mode": "split-lsa"},
    "split-lsa fp8": {"mode": "split-lsa", **FP8},
    "split-lsa fp8, fuse_quantize": {"mode": "split-lsa", "fuse_quantize": True, **FP8},
    "fused-sdma": {"mode": "fused-sdma"},
    "fused-lsa": {"mode": "fused-lsa"},
    "fused-lsa fp8": {"mode": "fused-lsa", **FP8},
}
PULL_BLOCKS = (8, 16, 32, 64, 96, 132)


def phases(comm: mori_shmem.Communicator, m: int, n: int, k: int, reps: int) -> None:
    """Print one row a way: the median of each phase, slowest rank of each repetition. Collective."""
    operands = make_operands(m, n, k, 100 * comm.rank + m, comm.device)
    rows = []
    for name, way in WAYS.items():
        with GemmAllReduce(comm, n=n, k=k, m_max=m, **way) as op:  # type: ignore[arg-type]
            runs = [_phases_of(op, operands) for _ in range(reps + 2)][2:]
            ranks = comm.all_gather(runs)
            torch.cuda.synchronize()
            comm.barrier()
        found = {p: statistics.median(max(r[i][p] for r in ranks) for i in range(reps)) for p in runs[0]}
        rows.append({"way": name, **found, "sum": sum(found.values())})
    if comm.rank == 0:
        seen = [phase for phase in Phase if any(phase in row for row in rows)]
        print(f"phases at M={m}, us")
        print(mori_bench.table(rows, ["way", *seen, "sum"]), flush=True)


def _phases_of(op: GemmAllReduce, operands: Operands) -> dict[str, float]:
    op.comm.barrier()
    op.trace = mori_bench.Trace(op.comm.rank)
    op(*operands)
    op.trace = None
    return dict(op.last_phases_us)


def grids(comm: mori_shmem.Communicator, m: int, n: int, k: int, reps: int) -> None:
    """Print the time of whole calls over the number of blocks that pull. Collective."""
    operands = make_operands(m, n, k, 100 * comm.rank + m, comm.device)
    ops: list[GemmAllReduce] = []
    calls: Calls = {}
    ways: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": {**FP8, "fuse_quantize": True}}
    for name, way in ways.items():
        for blocks in PULL_BLOCKS:
            op = GemmAllReduce(comm, n=n, k=k, m_max=m, mode="split-lsa", pull_blocks=blocks, **way)
            ops.append(op)
            calls[f"{name} {blocks}"] = lambda op=op: op(*operands)  # type: ignore[misc]
    timings = time_rows(calls, reps, comm)
    torch.cuda.synchronize()
    comm.barrier()
    for op in ops:
        op.close()
    if comm.rank == 0:
        rows = [
            {"split-lsa": name, **{str(b): timings[f"{name} {b}"].max_rank_time_us for b in PULL_BLOCKS}}
            for name in ways
        ]
        print(f"us at M={m} over pull_blocks")
        print(mori_bench.table(rows, ["split-lsa", *map(str, PULL_BLOCKS)]), flush=True)
