"""The op on GPUs: every mode against the exact bytes (GA-1), graphs between eager calls (GA-5, GA-8).

Run with `tools/gpu_run pytest -m gpu packages/mori-gemm-ar`.
"""

from __future__ import annotations

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce

SHAPES = (  # slices of 9 and of 8 rows; one row in the last tile; n and k that are no multiples of 128
    (17, 7168, 2048),
    (129, 384, 2048),
    (130, 320, 320),
    (257, 576, 1024),
    (1000, 7168, 2048),
)
BF16_WAYS = (
    {"mode": "fused-lsa"},
    {"mode": "fused-lsa", "gather_transport": "sdma"},
    {"mode": "fused-sdma"},
    {"mode": "fused-sdma", "gather_transport": "lsa"},
    {"mode": "split-lsa"},
    {"mode": "split-sdma"},
)
FP8_WAYS = tuple(
    {"mode": mode, "gather_dtype": "fp8", "gather_transport": transport}
    for mode in ("fused-lsa", "fused-sdma")
    for transport in ("lsa", "sdma")
)


def exact_operands(m: int, n: int, k: int, rank: int, quant: str, shift: int = 0) -> tuple[torch.Tensor, ...]:
    """The fixture GX: every partial sum is a bf16 number, and swapped rows, columns or tiles show."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows, columns, inner = (torch.arange(x, device=device) for x in (m, n, k))
    a = ((inner[None] - rows[:, None] - 3 * (rows[:, None] // 128)) % 128 == 0).float()
    b = (
        ((3 * columns[:, None] + 5 * inner[None] + 11 * rank + shift + columns[:, None] // 896) % 7) - 3
    ).float()
    codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    k_blocks = torch.arange(-(-k // 128), device=device)
    if quant == "ptpc":
        return *codes, 2.0 ** ((rows % 3) - 1).float(), 2.0 ** (columns % 2).float()
    n_blocks = torch.arange(-(-n // 128), device=device)
    a_scale, b_scale = (rows[None] + k_blocks[:, None]) % 2, (n_blocks[:, None] + k_blocks[None]) % 2
    return *codes, 2.0 ** a_scale.float(), 2.0 ** b_scale.float()


def exact_sum(m: int, n: int, k: int, num_ranks: int, quant: str, shift: int = 0) -> torch.Tensor:
    total = torch.zeros(m, n, dtype=torch.float64, device="cuda")
    for rank in range(num_ranks):
        a, b, a_scale, b_scale = (x.double() for x in exact_operands(m, n, k, rank, quant, shift))
        if quant == "ptpc":
            total += (a * a_scale[:, None]) @ (b * b_scale[:, None]).t()
        else:
            a = a * a_scale.t().repeat_interleave(128, 1)[:, :k]
            total += a @ (b * b_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]).t()
    return total.to(torch.bfloat16)


def every_way_at_every_shape(quant: str) -> None:
    with mori_shmem.init(backend="cuda") as comm:
        torch.cuda.set_device(comm.device)
        for m, n, k in SHAPES:
            want = exact_sum(m, n, k, comm.world_size, quant)
            operands = exact_operands(m, n, k, comm.rank, quant)
            for way in (*BF16_WAYS, *FP8_WAYS):
                with GemmAllReduce(comm, n=n, k=k, m_max=m, quant=quant, **way) as op:
                    for _ in range(3):
                        got = op(*operands)
                    if "gather_dtype" in way:
                        error = float((got.double() - want.double()).norm() / want.double().norm())
                        assert error <= 3e-2, (m, n, k, way, error)
                    else:
                        assert torch.equal(got, want), (m, n, k, way)
                    bits = got.view(torch.int16).to(torch.int64)
                    sums = comm.all_gather(
                        (int(bits.sum()), int((bits * torch.arange(n, device=bits.device)).sum()))
                    )
                    assert len(set(sums)) == 1, (m, n, k, way, sums)
            with GemmAllReduce(comm, n=n, k=k, m_max=m, quant=quant, mode="gemm-only") as op:
                a, b, a_scale, b_scale = operands
                assert torch.isfinite(op(a, b, a_scale, b_scale)).all()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("quant", ["blockscale", "ptpc"])
def test_GA_1_every_mode_is_exact_at_ragged_shapes(quant: str) -> None:
    mori_shmem.run_ranks(every_way_at_every_shape, 2, quant, timeout_s=240)


def graphs_of_three_sizes(way: dict[str, str]) -> int:
    n, k, sizes = 7168, 2048, (256, 1024, 4096)
    with mori_shmem.init(backend="cuda") as comm, torch.cuda.stream(torch.cuda.Stream(comm.device)):
        torch.cuda.set_device(comm.device)
        wrong = 0
        with GemmAllReduce(comm, n=n, k=k, m_max=max(sizes), quant="blockscale", **way) as op:
            inputs = {m: exact_operands(m, n, k, comm.rank, "blockscale") for m in sizes}
            wanted = {
                (m, s): exact_sum(m, n, k, comm.world_size, "blockscale", s) for m in sizes for s in range(3)
            }
            graphs = {}
            for m in sizes:
                op(*inputs[m])
                torch.cuda.synchronize()
                comm.barrier()
                graphs[m] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[m], stream=torch.cuda.current_stream()):
                    out = op(*inputs[m])
            for turn in range(50):
                shift = turn % 3
                for m in (4096, 256, 1024, 256, 4096):
                    inputs[m][1].copy_(exact_operands(m, n, k, comm.rank, "blockscale", shift)[1])
                    graphs[m].replay()
                    out = op._runner.output(m)
                    wrong += int(not torch.equal(out, wanted[m, shift]))
                if turn % 10 == 9:
                    wrong += int(not torch.equal(op(*inputs[1024]), wanted[1024, shift]))
        return wrong


@pytest.mark.gpu(2)
@pytest.mark.parametrize("way", BF16_WAYS, ids=str)
def test_GA_5_graphs_of_several_sizes_replay_in_any_order(way: dict[str, str]) -> None:
    assert mori_shmem.run_ranks(graphs_of_three_sizes, 2, way, timeout_s=120) == [0, 0]
