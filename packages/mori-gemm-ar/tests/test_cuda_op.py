"""The op on GPUs: every mode against the exact bytes (GA-1), graphs between eager calls (GA-5, GA-8).

Run with `tools/gpu_run pytest -m gpu packages/mori-gemm-ar`.
"""

from __future__ import annotations

import os

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.reference import fp8_wire
from mori_shmem.errors import UnsupportedShape

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
    {"mode": "split-lsa", "pull_blocks": 3},
    {"mode": "split-sdma"},
    {"mode": "fused-lsa", "small_m": "one-stage"},
    {"mode": "fused-lsa", "small_m": "two-stage"},
)
FP8_WAYS = (
    *({"mode": m, "gather_dtype": "fp8"} for m in ("fused-lsa", "fused-sdma", "split-lsa")),
    *({"mode": m, "gather_dtype": "fp8", "gather_transport": "sdma"} for m in ("fused-lsa", "fused-sdma")),
    *(
        {"mode": m, "gather_dtype": "fp8", "gather_scale": s, "gather_transport": t, "fuse_quantize": f}
        for m, t in (("split-lsa", "lsa"), ("split-sdma", "sdma"))
        for s, f in (("row", True), ("row", False), ("1x128", False))
    ),
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
        total += exact_product(exact_operands(m, n, k, rank, quant, shift), quant)  # whole and half numbers
    return total.to(torch.bfloat16)


def exact_product(operands: tuple[torch.Tensor, ...], quant: str) -> torch.Tensor:
    """This rank's own partial sums."""
    a, b, a_scale, b_scale = (x.double() for x in operands)
    (_, k), (n, _) = a.shape, b.shape
    if quant == "ptpc":
        return ((a * a_scale[:, None]) @ (b * b_scale[:, None]).t()).to(torch.bfloat16)
    a = a * a_scale.t().repeat_interleave(128, 1)[:, :k]
    b = b * b_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (a @ b.t()).to(torch.bfloat16)


def every_way_at_every_shape(quant: str, shapes: tuple[tuple[int, int, int], ...]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    with mori_shmem.init(backend="cuda", timeout_s=60) as comm:
        for m, n, k in shapes:
            exact = exact_sum(m, n, k, comm.world_size, quant)
            operands = exact_operands(m, n, k, comm.rank, quant)
            wanted = {scale: fp8_wire(exact.cpu(), scale).cuda() for scale in ("row", "1x128")}
            for way in (*BF16_WAYS, *FP8_WAYS):
                with GemmAllReduce(comm, n=n, k=k, m_max=m, quant=quant, **way) as op:
                    want = wanted.get(op.options.gather_scale or "", exact)
                    want = exact if op.ran(m).endswith("stage") else want
                    for turn in range(3):
                        got = op(*operands)
                        assert torch.equal(got, want), (m, n, k, way, turn)
            with GemmAllReduce(comm, n=n, k=k, m_max=m, quant=quant, mode="gemm-only") as op:
                assert torch.equal(op(*operands), exact_product(operands, quant)), (m, n, k)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("quant", ["blockscale", "ptpc"])
def test_GA_1_every_mode_is_exact_at_ragged_shapes(quant: str) -> None:
    mori_shmem.run_ranks(every_way_at_every_shape, 2, quant, SHAPES, timeout_s=240)


@pytest.mark.gpu(2)
def test_GA_1_eight_ranks_share_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 3 rows, of which the last two ranks have none; of 17; of 125: contexts take turns on a GPU,
    so this is about what is right, not about how fast."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    shapes = ((17, 7168, 2048), (130, 320, 320), (1000, 384, 1024))
    mori_shmem.run_ranks(every_way_at_every_shape, 8, "blockscale", shapes, timeout_s=280)


def operands_that_change(way: dict[str, str]) -> int:
    """Calls whose operands move, change their strides, and are freed right after the call."""
    with mori_shmem.init(backend="cuda") as comm:
        torch.cuda.set_device(comm.device)
        n, k, wrong = 384, 1024, 0
        sizes = (700, 129, 256)
        with GemmAllReduce(comm, n=n, k=k, m_max=max(sizes), quant="blockscale", **way) as op:
            for turn in range(60):
                m, shift = sizes[turn % 3], turn % 5
                a, b, a_scale, b_scale = exact_operands(m, n, k, comm.rank, "blockscale", shift)
                if turn % 4 == 1:  # rows with a gap
                    wide = torch.zeros(m, k + 128, dtype=torch.uint8, device=a.device)
                    wide[:, :k] = a.view(torch.uint8)
                    a = wide.view(a.dtype)[:, :k]
                if turn % 4 == 2:  # an address that no tensor map can have
                    odd = torch.zeros(m * k + 8, dtype=torch.uint8, device=a.device)[8:].view(m, k)
                    a = odd.copy_(a.view(torch.uint8)).view(a.dtype)
                got = op(a, b, a_scale if turn % 3 else a_scale.t(), b_scale)
                del a, b, a_scale, b_scale
                torch.empty(1 << 20, device=got.device).fill_(-1)  # takes the freed memory
                wrong += int(not torch.equal(got, exact_sum(m, n, k, comm.world_size, "blockscale", shift)))
            with pytest.raises(UnsupportedShape, match="float8_e4m3fn"):
                op(*(x.float() for x in exact_operands(256, n, k, comm.rank, "blockscale")))
            with pytest.raises(UnsupportedShape, match="wanted"):
                op(*exact_operands(256, n, k + 128, comm.rank, "blockscale"))
        return wrong


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["fused-lsa", "fused-sdma", "split-lsa"])
def test_GA_8_operands_may_move_and_go_between_calls(mode: str) -> None:
    assert mori_shmem.run_ranks(operands_that_change, 2, {"mode": mode}, timeout_s=100) == [0, 0]


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
