"""The GX fixture is the one its published anchors describe."""

import pytest
import torch
from mori_gemm_ar.reference import reduced
from mori_gemm_ar.testing import ANCHORS, gx, gx_sum


@pytest.mark.parametrize("shape", ANCHORS, ids=str)
@pytest.mark.parametrize("quant", ["blockscale", "ptpc"])
def test_anchors(shape, quant):
    m, n, k, num_ranks = shape
    out = gx_sum(m, n, k, num_ranks, quant).to(torch.bfloat16)
    first, last, total = ANCHORS[shape][quant == "ptpc"]
    assert out[0, 0].item() == first
    assert out[-1, -1].item() == last
    assert out.double().abs().sum().item() == total


@pytest.mark.parametrize("quant", ["blockscale", "ptpc", "mxfp8"])
def test_partial_sums_are_exact_in_bf16(quant):
    for rank in range(3):
        exact = gx(130, 320, 2048, rank, quant).exact()
        assert torch.equal(exact.to(torch.bfloat16).double(), exact)


def test_operands_are_what_the_formulas_say():
    operands = gx(300, 1000, 256, 3, "ptpc", turn=2)
    m, n, k = torch.arange(300)[:, None], torch.arange(1000)[:, None], torch.arange(256)
    assert torch.equal(operands.a.float(), ((k - m - 3 * (m // 128)) % 128 == 0).float())
    assert torch.equal(operands.b.float(), ((3 * n + 5 * k + 33 + 2 + n // 896) % 7 - 3).float())


@pytest.mark.parametrize("quant", ["blockscale", "ptpc", "mxfp8"])
def test_the_sum_is_that_of_the_exact_partial_sums(quant):
    want = sum(gx(130, 320, 320, rank, quant, turn=4).exact() for rank in range(3))
    assert torch.equal(gx_sum(130, 320, 320, 3, quant, turn=4), want)


@pytest.mark.parametrize("quant", ["blockscale", "ptpc", "mxfp8"])
def test_any_exchange_shows(quant):
    want = gx_sum(257, 576, 1024, 2, quant)
    exchanged = want.clone()
    exchanged[[3, 4]] = want[[4, 3]]
    assert not torch.equal(exchanged, want)
    assert (exchanged - want).norm() / want.norm() > 0.05
    exchanged = want.clone()
    exchanged[:128], exchanged[128:256] = want[128:256], want[:128]
    assert (exchanged - want).norm() / want.norm() > 0.05
    assert not torch.equal(gx_sum(257, 576, 1024, 2, quant, turn=1), want)


def test_the_sum_of_rounded_partials_is_the_rounded_sum():
    partials = [gx(129, 384, 2048, rank, "blockscale").exact() for rank in range(8)]
    assert torch.equal(reduced(partials), gx_sum(129, 384, 2048, 8, "blockscale").to(torch.bfloat16))
