"""Every kernel of the cuda target once, at sizes small enough for compute-sanitizer, compared bit for bit:

    compute-sanitizer --target-processes all python3 -m torch.distributed.run --nproc_per_node=2 \\
        -m mori_gemm_ar.bench.cuda_compare kernels

Two sizes, for the two tiles: slices of 65 rows, and of 515 with three in the last 256-row block; 136 columns,
eight in the last block of 128.
"""

from __future__ import annotations

from typing import Any

import mori_shmem
import torch

from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.testing import gx, gx_want

ROWS, COLUMNS, K = (130, 1030), 136, 256
FP8 = {"gather_dtype": "fp8"}
FUSED: tuple[dict[str, Any], ...] = ({"mode": "fused-lsa"}, {"mode": "fused-lsa", **FP8})
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "ptpc": FUSED,
    "mxfp8": FUSED,
    "blockscale": (
        *FUSED,
        {"mode": "fused-sdma"},
        {"mode": "fused-sdma", "gather_transport": "sdma", **FP8},
        {"mode": "split-lsa"},
        {"mode": "split-lsa", **FP8},
        {"mode": "split-lsa", "fuse_quantize": True, "gather_scale": "row", **FP8},
        {"mode": "split-sdma", "gather_transport": "sdma", **FP8},
        {"mode": "fused-lsa", "small_m": "one-stage", "small_m_below": 4096},
    ),
}


def every_kernel(comm: mori_shmem.Communicator) -> bool:
    """Whether all results were right on this rank. Collective."""
    right = True
    for quant, ways in WAYS.items():
        for m in ROWS:
            operands = gx(m, COLUMNS, K, comm.rank, quant).to(comm.device)
            for way in ways:
                with GemmAllReduce(comm, n=COLUMNS, k=K, m_max=m, quant=quant, self_test=False, **way) as op:
                    got = op(operands.a, operands.b, operands.a_scale, operands.b_scale).cpu()
                    options = op.options
                    torch.cuda.synchronize()
                    comm.barrier()
                wire = None if options.small_m else options.gather_dtype
                sizes = (m, COLUMNS, K, comm.world_size)
                want = gx_want(*sizes, quant, wire, gather_scale=options.gather_scale)
                if not torch.equal(got, want):
                    print(f"rank {comm.rank}: WRONG: {quant}, M={m}, {way}", flush=True)
                    right = False
    if comm.rank == 0:
        print(f"every kernel at M={ROWS[0]} and {ROWS[1]}: " + ("right" if right else "WRONG"), flush=True)
    return all(comm.all_gather(right))
