"""Every mode, quantisation and wire, at awkward shapes and world sizes: the exact bytes, on every rank.

Ranks are started once per world size; each case inside reports what was wrong, and becomes a test of its own.
"""

import functools

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.options import MODES, QUANTS
from mori_gemm_ar.reference import rel_l2
from mori_gemm_ar.testing import gx, gx_sum, gx_want

N, K = 130, 320  # neither a multiple of 128
ROWS = (17, 130, 1, 0, 67)  # fewer rows than ranks; a ragged last slice; none at all
WIRES = {
    "bf16": {},
    "bf16 other way": {"gather_transport": "other"},
    "fp8 lsa": {"gather_dtype": "fp8", "pull_blocks": 7},
    "fp8 sdma": {"gather_dtype": "fp8", "gather_transport": "sdma"},
    "fp8 lsa fused": {"gather_dtype": "fp8", "fuse_quantize": True},
    "fp8 sdma fused": {
        "gather_dtype": "fp8",
        "gather_transport": "sdma",
        "fuse_quantize": True,
        "fuse_reduce_push": True,
        "gather_bands": 3,
    },
    "bf16 pushed": {"gather_transport": "sdma", "fuse_reduce_push": True},
    "bf16 pushed fence": {
        "gather_transport": "sdma",
        "fuse_reduce_push": True,
        "gather_bands": 2,
        "publish": "fence",
        "sdma_queues": 2,
    },
}
SIZES = (1, 2, 3, 5, 8)


def cases(world_size):
    """(mode, quant, wire): all of them at 2 ranks, at other sizes every wire with one quantisation."""
    for mode in MODES:
        for wire in WIRES if mode != "gemm-only" else ("bf16",):
            for quant in QUANTS if world_size == 2 or wire == "bf16" else ("blockscale",):
                yield mode, quant, wire


def options_of(mode, wire):
    options = dict(WIRES[wire])
    if options.get("gather_transport") == "other":
        options["gather_transport"] = "lsa" if mode.endswith("sdma") else "sdma"
    return options


def run_cases(world_size):
    comm = mori_shmem.init("host", timeout_s=20)

    @functools.cache
    def want(m, quant, dtype):
        return gx_want(m, N, K, world_size, quant, dtype)

    found = {}
    for mode, quant, wire in cases(world_size):
        options, wrong = options_of(mode, wire), []
        with GemmAllReduce(comm, n=N, k=K, m_max=130, quant=quant, mode=mode, **options) as op:
            for m in ROWS:
                operands = gx(m, N, K, comm.rank, quant)
                out = op(operands.a, operands.b, operands.a_scale, operands.b_scale)
                right = (
                    want(m, quant, op.options.gather_dtype)
                    if mode != "gemm-only"
                    else operands.exact().to(torch.bfloat16)
                )
                if not torch.equal(out, right):
                    wrong.append(f"rank {comm.rank}, m={m}: relL2 {rel_l2(out, right):.3g}")
        found[mode, quant, wire] = wrong
    comm.close()
    return found


@pytest.fixture(scope="module")
def found():
    @functools.cache
    def at(world_size):
        by_rank = mori_shmem.run_ranks(run_cases, world_size, world_size, timeout_s=200)
        return {case: [text for rank in by_rank for text in rank[case]] for case in by_rank[0]}

    return at


@pytest.mark.parametrize(
    ("world_size", "case"),
    [(size, case) for size in SIZES for case in cases(size)],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value),
)
def test_GA_1_exact_at_ragged_shapes(found, world_size, case):
    assert found(world_size)[case] == []


MODEL_SHAPES = [(17, 7168, 2048), (129, 7168, 2048), (1000, 7168, 2048), (129, 384, 2048), (257, 576, 1024)]


def run_model_shapes(quant):
    """All modes at the issue's shapes: bitwise right, the rows around the output untouched, fp8 close."""
    comm, wrong = mori_shmem.init("host", timeout_s=20), []
    for m, n, k in MODEL_SHAPES:
        exact = gx_sum(m, n, k, comm.world_size, quant)
        want, operands = exact.to(torch.bfloat16), gx(m, n, k, comm.rank, quant)
        for mode, dtype in [*((mode, "bf16") for mode in MODES[1:]), ("fused-sdma", "fp8")]:
            with GemmAllReduce(comm, n=n, k=k, m_max=m + 3, quant=quant, mode=mode, gather_dtype=dtype) as op:
                around = torch.full((m + 4, n), 7.0, dtype=torch.bfloat16)
                window_rows = op._runner._output
                window_rows.fill_(9.0)
                comm.barrier()  # a peer may push into the output as soon as it is in the call
                args = (operands.a, operands.b, operands.a_scale, operands.b_scale)
                out = op(*args, out=around[2 : m + 2])
                where = f"rank {comm.rank}, {(m, n, k)}, {mode}, {dtype}"
                if dtype == "bf16" and not torch.equal(out, want):
                    wrong.append(f"{where}: not the exact bytes")
                if dtype == "fp8" and rel_l2(out, exact) > 3e-2:
                    wrong.append(f"{where}: relL2 {rel_l2(out, exact)}")
                if not ((around[:2] == 7).all() and (around[m + 2 :] == 7).all()):
                    wrong.append(f"{where}: rows around out were written to")
                if not (window_rows[m:] == 9).all():
                    wrong.append(f"{where}: rows of the window behind M were written to")
    comm.close()
    return wrong


@pytest.mark.parametrize("quant", ["blockscale", "ptpc"])
def test_GA_1_model_shapes_are_exact_and_leave_their_surroundings_alone(quant):
    by_rank = mori_shmem.run_ranks(run_model_shapes, 2, quant, timeout_s=200)
    assert by_rank == [[], []]
