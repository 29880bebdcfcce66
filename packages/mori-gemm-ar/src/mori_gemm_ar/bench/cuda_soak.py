"""Thousands of calls of random M, bf16 and fp8 gather in turns, eager and replayed, compared bit for bit.

Two ops share the run. The operands are the exact fixture (testing.py), whose rows and columns differ, and B
changes from call to call; what must come out is known for the largest M once, and its first M rows are what
must come out for M. Comparing happens on the GPU; the host looks once at the end, so calls follow one another
as closely as they can.
"""

from __future__ import annotations

import random
import time

import mori_shmem
import torch

from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.reference import fp8_wire
from mori_gemm_ar.testing import gx, gx_sum

TURNS = 3
GRAPHS = (256, 1000, 4096)  # sizes that are also replayed
REPLAY_EVERY = 5


def soak(comm: mori_shmem.Communicator, calls: int, m_max: int, n: int, k: int, seed: int = 0) -> bool:
    """Whether every element of every call was right on every rank. Collective."""
    device, draw = comm.device, random.Random(seed)
    turns = [gx(m_max, n, k, comm.rank, "blockscale", turn=t).to(device) for t in range(TURNS)]
    sums = [gx_sum(m_max, n, k, comm.world_size, "blockscale", turn=t).bfloat16() for t in range(TURNS)]
    wanted = {
        "bf16": [s.to(device) for s in sums],
        "fp8": [fp8_wire(s, "1x128").to(device) for s in sums],
    }
    b = turns[0].b.clone()  # one address, for graphs too
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    began = time.monotonic()
    with (
        GemmAllReduce(comm, n=n, k=k, m_max=m_max, mode="fused-lsa") as bf16,
        GemmAllReduce(comm, n=n, k=k, m_max=m_max, mode="fused-lsa", gather_dtype="fp8") as fp8,
    ):
        ops = {"bf16": bf16, "fp8": fp8}
        small = {m: (turns[0].a[:m], turns[0].a_scale[:, :m].contiguous()) for m in GRAPHS if m <= m_max}
        graphs = {
            (m, name): _captured(ops[name], small[m], b, turns[0].b_scale, comm)
            for m in small
            for name in ops
        }
        for call in range(calls):
            turn, name = draw.randrange(TURNS), ("bf16", "fp8")[call % 2]
            b.copy_(turns[turn].b)
            if small and call % REPLAY_EVERY == 0:
                m = draw.choice(sorted(small))
                graph, out = graphs[m, name]
                graph.replay()
            else:
                m = draw.randint(1, m_max)
                a_scale = turns[0].a_scale[:, :m].contiguous()  # freed while the call is still under way
                out = ops[name](turns[0].a[:m], b, a_scale, turns[0].b_scale)
            wrong += (out != wanted[name][turn][:m]).sum()
        torch.cuda.synchronize()
        comm.barrier()
        took_s = time.monotonic() - began
        graphs.clear()
    total: int = sum(comm.all_gather(int(wrong)))
    if comm.rank == 0:
        verdict = "all equal bit for bit" if total == 0 else f"{total} ELEMENTS WRONG"
        print(f"soak: {calls} calls of 1 to {m_max} rows in {took_s:.1f} s: {verdict}", flush=True)
    return total == 0


def _captured(
    op: GemmAllReduce,
    a: tuple[torch.Tensor, torch.Tensor],
    b: torch.Tensor,
    b_scale: torch.Tensor,
    comm: mori_shmem.Communicator,
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    codes, a_scale = a
    op(codes, b, a_scale, b_scale)
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(codes, b, a_scale, b_scale)
    return graph, out
