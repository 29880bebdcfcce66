"""The order of additions is the one that is defined, and a row's bits are its own affair."""

from __future__ import annotations

import math

import pytest
import torch
from mori_megamoe import arithmetic, mx
from mori_megamoe.arithmetic import Matrix
from mori_megamoe.testing import same_bytes

G = torch.Generator()


def rows(m: int, k: int, seed: int = 0) -> mx.rules.Quantized:
    return mx.quantize_input(torch.randn(m, k, generator=G.manual_seed(seed)).bfloat16())


def weights(n: int, k: int, seed: int = 1) -> Matrix:
    packed, scales = mx.quantize_weight(torch.randn(n, k, generator=G.manual_seed(seed)))
    return Matrix(
        mx.decode_e2m1(mx.unpack_e2m1(packed), torch.float64), mx.decode_e8m0(scales, torch.float64)
    )


def test_matmul_is_a_loop_over_exact_blocks() -> None:
    (codes, scales), w = rows(3, 128), weights(5, 128)
    x = mx.decode_e4m3(codes)
    got = arithmetic.matmul(codes, scales, w)
    for m in range(3):
        for n in range(5):
            total = torch.tensor(0.0)
            for block in range(4):
                k = range(32 * block, 32 * block + 32)
                dot = math.fsum(float(x[m, i]) * float(w.values[n, i]) for i in k)
                factor = 2.0 ** (int(scales[m, block]) - 127) * float(w.factors[n, block])
                total = total + torch.tensor(dot) * torch.tensor(factor)
            assert same_bytes(total.reshape(1), got[m, n].reshape(1))


def test_a_rows_bits_do_not_depend_on_its_place_or_its_company() -> None:
    (codes, scales), w = rows(37, 256), weights(512, 256)
    want = arithmetic.hidden_rows(codes, scales, w, 10.0)
    order = torch.randperm(37, generator=G.manual_seed(5))
    shuffled = arithmetic.hidden_rows(codes[order], scales[order], w, 10.0)
    assert same_bytes(shuffled[0], want[0][order])
    assert same_bytes(shuffled[1], want[1][order])
    poisoned = codes.clone()
    poisoned[1::2] = 0x7F  # NaN neighbours
    got = arithmetic.hidden_rows(poisoned, scales, w, 10.0)
    assert same_bytes(got[0][::2], want[0][::2])
    for row in (0, 17, 36):
        alone = arithmetic.hidden_rows(codes[row : row + 1], scales[row : row + 1], w, 10.0)
        assert same_bytes(alone[0], want[0][row : row + 1])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    (codes, scales), w = rows(64, 256), weights(512, 256)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(arithmetic.hidden_rows(codes, scales, w, 0.0))
    finally:
        torch.set_num_threads(before)
    assert all(same_bytes(r[0], results[0][0]) and same_bytes(r[1], results[0][1]) for r in results)


def test_columns_do_not_depend_on_the_width() -> None:
    (codes, scales), w = rows(9, 256), weights(512, 256)
    whole = arithmetic.matmul(codes, scales, w)
    part = arithmetic.matmul(codes, scales, Matrix(w.values[100:133], w.factors[100:133]))
    assert same_bytes(whole[:, 100:133].contiguous(), part)


def test_scales_whose_product_no_fp32_holds() -> None:
    """2^-127 times 2^127 is 1: lost, if the first were multiplied in alone."""
    codes = torch.full((1, 32), 0x38, dtype=torch.uint8)  # ones
    tiny, w = torch.zeros(1, 1, dtype=torch.uint8), weights(1, 32)
    w = Matrix(torch.ones(1, 32, dtype=torch.float64), torch.full((1, 1), 2.0**127, dtype=torch.float64))
    assert arithmetic.matmul(codes, tiny, w).tolist() == [[32.0]]


def test_exp2_is_close_and_exact_at_whole_numbers() -> None:
    x = torch.linspace(-30, 30, 4001)
    got, want = arithmetic.exp2(x).double(), torch.exp2(x.double())
    assert ((got - want).abs() / want).max() < 3e-6
    whole = torch.arange(-126, 128).float()
    assert arithmetic.exp2(whole).tolist() == [2.0**i for i in range(-126, 128)]
    assert arithmetic.exp2(torch.tensor([-1e9, 1e9])).tolist() == [2.0**-126, 2.0**127]
    assert arithmetic.exp2(torch.tensor([math.nan])).isnan().all()


def test_swiglu_and_its_limits() -> None:
    g = torch.tensor([[20.0, -20.0, 3.0, 0.0]])
    u = torch.tensor([[30.0, -30.0, 2.0, 5.0]])
    both = torch.cat([g, u], 1)

    def exact(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(g.double()) * u.double()).float()

    assert torch.allclose(arithmetic.swiglu(both, 0.0), exact(g, u), rtol=1e-5, atol=1e-30)
    limited = exact(g.clamp(max=10), u.clamp(-10, 10))  # g has no lower limit
    assert torch.allclose(arithmetic.swiglu(both, 10.0), limited, rtol=1e-5)


@pytest.mark.parametrize("form", ["bf16", "fp8_blockwise_1x32"])
def test_partials_there_and_back(form: str) -> None:
    y = torch.randn(5, 256, generator=G.manual_seed(7))
    y[2] = 0
    weight = torch.tensor([1.0, 0.5, 1.0, 0.0, -2.0])
    back = arithmetic.read_partials(arithmetic.partial_rows(y, weight, form), 256, form)
    want = y * weight[:, None]
    assert torch.equal(back[2:4], torch.zeros(2, 256))
    assert torch.linalg.norm(back - want) / torch.linalg.norm(want) < (0.004 if form == "bf16" else 0.04)


def test_combine_adds_slots_in_order_and_skips_invalid_ones() -> None:
    parts = torch.tensor([[[1.0], [2.0**25], [-(2.0**25)], [3.0]]])
    every = torch.ones(1, 4, dtype=torch.bool)
    assert arithmetic.combine(parts, every).tolist() == [[3.0]]  # (1 + 2^25) - 2^25 is 0
    without = torch.tensor([[True, False, False, True]])
    parts[0, 1] = math.nan
    assert arithmetic.combine(parts, without).tolist() == [[4.0]]
    assert arithmetic.combine(parts, ~every).tolist() == [[0.0]]
