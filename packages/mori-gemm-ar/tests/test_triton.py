"""The Triton kernels under their interpreter: the host's bytes, chosen by name, said once.

On GPUs the same comparison runs with compiled kernels (tools/gpu_run pytest -m gpu).
"""

from __future__ import annotations

import logging
import mmap
import os
import platform

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.quant.quantize import BLOCKS, dequantize_blocks, quantize_blocks
from mori_gemm_ar.testing import gx, gx_want
from mori_shmem.errors import MoriError

# One row in the second tile, n and k no multiples of a tile or a block; 3 ranks of which one has 1 row.
SHAPES = {2: (129, 136, 160), 3: (5, 136, 128)}
FP8 = {"gather_dtype": "fp8"}
WAYS = (("blockscale", {}), ("blockscale", FP8), ("ptpc", FP8), ("mxfp8", {}))


def in_low_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy below 2^31, where a process's heap may be: such addresses reach kernels as 32 bits."""
    memory = mmap.mmap(-1, max(1, tensor.nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)  # MAP_32BIT
    low = torch.frombuffer(memory, dtype=torch.uint8)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    assert low.data_ptr() < 1 << 31
    return low.copy_(tensor)


def kernels_alone(place=lambda tensor: tensor) -> dict[str, bool]:
    """reduce, quantize and pull on numbers of every size, zeros, infinities and NaN, against the host's."""
    os.environ["TRITON_INTERPRET"] = "1"
    from mori_gemm_ar.targets.triton import kernels
    from mori_gemm_ar.targets.triton.gemm import launch
    from mori_shmem.device.host import sum_bf16

    torch.manual_seed(1)
    parts = [(torch.randn(1500) * 10.0**i).to(torch.bfloat16) for i in range(3)]
    parts[0][0], parts[1][1] = torch.nan, torch.inf
    for part in parts:
        part[2] = -0.0
    want, got = torch.empty_like(parts[0]), place(torch.empty_like(parts[0]))
    sum_bf16(want, parts)
    table = place(torch.tensor([part.data_ptr() for part in parts]))
    launch(kernels.reduce, (2,), *(table.data_ptr(), 0, got.data_ptr(), 1500), WORLD_SIZE=3, BLOCK=1024)
    right = {"reduce": torch.equal(got.view(torch.int16)[1:], want.view(torch.int16)[1:]) and got[0].isnan()}

    rows = (torch.randn(40, 300, dtype=torch.float64) * torch.logspace(-45, 30, 40)[:, None]).to(
        torch.bfloat16
    )
    rows[3], rows[5, 7], rows[6, 8] = 0, torch.nan, torch.inf
    rows = place(rows)
    wanted_codes, wanted_scales = quantize_blocks(rows, BLOCKS["ptpc", "a"])
    codes, scales = place(torch.empty(40, 300, dtype=torch.uint8)), place(torch.empty(40))
    launch(kernels.quantize, (40,), rows.data_ptr(), codes.data_ptr(), scales.data_ptr(), 300, BLOCK=128)
    right["scales"] = torch.equal(scales.nan_to_num(-1), wanted_scales[:, 0].nan_to_num(-1))
    spoilt = scales.isnan()
    bytes_wanted = wanted_codes.view(torch.uint8)
    right["codes"] = torch.equal(codes[~spoilt], bytes_wanted[~spoilt])
    right["non-finite rows"] = spoilt.nonzero().flatten().tolist() == [5, 6] and bool(
        ((codes[spoilt] & 0x7F) == 0x7F).all()
    )

    out = place(torch.empty(40, 300, dtype=torch.bfloat16))
    launch(
        kernels.pull,
        (40, 3),
        *(codes.data_ptr(), scales.data_ptr(), out.data_ptr(), 300),
        FP8=True,
        BLOCK=128,
    )
    wide = dequantize_blocks(wanted_codes, wanted_scales, BLOCKS["ptpc", "a"]).to(torch.bfloat16)
    right["pull"] = torch.equal(out.nan_to_num(7), wide.nan_to_num(7)) and torch.equal(
        out.isnan(), wide.isnan()
    )
    every = torch.arange(256, dtype=torch.uint8)
    ones, all_codes = torch.ones(1), torch.empty(256, dtype=torch.bfloat16)
    launch(
        kernels.pull,
        (1, 1),
        *(every.data_ptr(), ones.data_ptr(), all_codes.data_ptr(), 256),
        FP8=True,
        BLOCK=256,
    )
    values = every.view(torch.float8_e4m3fn).to(torch.bfloat16)
    right["every code"] = torch.equal(all_codes.nan_to_num(7), values.nan_to_num(7))
    return {name: bool(good) for name, good in right.items()}


@pytest.mark.parametrize(
    "place",
    [
        *([in_low_memory] if platform.machine() == "x86_64" else []),
        lambda tensor: tensor,
    ],
    ids=lambda place: place.__name__,
)
def test_sums_codes_and_widened_rows_are_the_hosts_bytes(place):
    (right,) = mori_shmem.run_ranks(kernels_alone, 1, place, timeout_s=120)
    assert [name for name, good in right.items() if not good] == []


def ops(backend: str) -> tuple[list[object], list[str]]:
    """What differs from the exact sum, for every quantisation, mode and wire; what was logged."""
    if backend == "host":
        os.environ["TRITON_INTERPRET"] = "1"
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("mori_gemm_ar").addHandler(Kept())
    wrong: list[object] = []
    with mori_shmem.init(backend, timeout_s=60) as comm:
        m, n, k = SHAPES[comm.world_size]
        for quant, way in WAYS:
            sizes = {"n": n, "k": k, "m_max": m, "quant": quant}
            with GemmAllReduce(comm, mode="split-lsa", kernels="triton", **sizes, **way) as op:
                for turn in (0, 1):
                    g = gx(m, n, k, comm.rank, quant, turn=turn).to(comm.device)
                    got = op(g.a, g.b, g.a_scale, g.b_scale).cpu()
                    want = gx_want(m, n, k, comm.world_size, quant, way.get("gather_dtype"), turn=turn)
                    if not torch.equal(got, want):
                        wrong.append((quant, way, turn))
        g = gx(m, n, k, comm.rank, "blockscale").to(comm.device)
        with GemmAllReduce(comm, mode="gemm-only", kernels="triton", n=n, k=k, m_max=m) as op:
            if not torch.equal(op(g.a, g.b, g.a_scale, g.b_scale).double(), g.exact()):
                wrong.append("gemm-only")
    return wrong, said


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_GA_1_an_op_on_the_triton_kernels_gives_the_hosts_bytes(num_ranks):
    found = mori_shmem.run_ranks(ops, num_ranks, "host", timeout_s=200)
    assert [wrong for wrong, _ in found] == [[]] * num_ranks
    assert [len(said) for _, said in found] == [1] + [0] * (num_ranks - 1), "said once, on the first rank"
    assert "Triton kernels" in found[0][1][0]


@pytest.mark.gpu(2)
def test_GA_1_on_gpus_too():
    found = mori_shmem.run_ranks(ops, 2, "cuda", timeout_s=200)
    assert [wrong for wrong, _ in found] == [[]] * 2


def refusals() -> list[str]:
    os.environ["MORI_GEMM_AR_KERNELS"] = "triton"  # without the interpreter
    sizes = {"n": 136, "k": 256, "m_max": 4}
    said = []
    with mori_shmem.init("host", timeout_s=20) as comm:
        for mode, more in (
            *(("fused-sdma", {}), ("fused-lsa", {}), ("split-sdma", {})),
            *(
                ("split-lsa", {"gather_transport": "sdma"}),
                ("split-lsa", {"pull_blocks": 4}),
                ("split-lsa", {}),
            ),
            ("split-lsa", {"kernels": "cutlass"}),
        ):
            with pytest.raises(MoriError) as caught:
                GemmAllReduce(comm, **sizes, mode=mode, **more)
            said.append(str(caught.value))
    asked = GemmAllReduce.supports(**sizes, world_size=2, mode="fused-lsa", kernels="triton")
    said.append(asked.reason)
    return said


def test_what_the_triton_kernels_do_not_have_is_refused_by_name():
    (said,) = mori_shmem.run_ranks(refusals, 1, timeout_s=60)
    for mode, text in zip(("fused-sdma", "fused-lsa", "split-sdma", "split-lsa"), said, strict=False):
        assert f"mode='{mode}'" in text
        assert "gemm-only, split-lsa" in text
    assert "pull_blocks=4" in said[4]
    assert "TRITON_INTERPRET" in said[5]
    assert "'cutlass'" in said[6]
    assert "own, triton" in said[6]
    assert "gemm-only, split-lsa" in said[7]
