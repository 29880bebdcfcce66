"""Quantisers: errors of known size, block by block, and the rows that have no ordinary answer."""

import pytest
import torch
from mori_gemm_ar.bench.accuracy import granularities, wire_errors
from mori_gemm_ar.quant.quantize import BLOCKS, Blocks, dequantize, quantize, quantize_blocks

QUANTS = ("blockscale", "ptpc", "mxfp8")


def normal(rows, columns, seed=7):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(x, back):
    return ((back.double() - x.double()).norm() / x.double().norm()).item()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("shape", [(64, 256), (1, 128), (130, 320), (33, 1000), (257, 129)], ids=str)
def test_round_trip_at_ragged_shapes(quant, operand, shape):
    x = normal(*shape)
    codes, scales = quantize(x, quant, operand)
    assert codes.shape == shape
    assert codes.dtype == torch.float8_e4m3fn
    assert error(x, dequantize(codes, scales, quant, operand)) < 3.2e-2


def test_scale_layouts_are_those_the_op_takes():
    x = normal(130, 320)
    shapes = {key: quantize(x, *key)[1].shape for key in BLOCKS}
    assert shapes == {
        ("blockscale", "a"): (3, 130),
        ("blockscale", "b"): (2, 3),
        ("ptpc", "a"): (130,),
        ("ptpc", "b"): (130,),
        ("mxfp8", "a"): (130, 10),
        ("mxfp8", "b"): (5, 10),
    }
    assert quantize(x, "blockscale", "a")[1].is_contiguous()


def test_a_scale_is_amax_over_448_and_a_code_the_rounded_quotient():
    x = normal(40, 384)
    codes, scales = quantize(x, "blockscale", "a")
    for row in (0, 17, 39):
        for block in range(3):
            values = x[row, 128 * block : 128 * (block + 1)]
            scale = values.abs().max() / torch.tensor(448.0)
            assert scales[block, row] == scale
            assert torch.equal(
                codes[row, 128 * block : 128 * (block + 1)].float(),
                (values / scale).to(torch.float8_e4m3fn).float(),
            )


def test_mxfp8_scales_are_the_smallest_powers_of_two_that_do_not_saturate():
    x = torch.zeros(4, 32)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 448.0, 448.5, 224.0, 1.0
    codes, scales = quantize(x, "mxfp8", "a")
    assert scales[:, 0].tolist() == [127, 128, 126, 119]
    assert codes.float()[:, 0].tolist() == [448, 224, 448, 256]


@pytest.mark.parametrize("quant", QUANTS)
def test_GA_3_zero_rows_stay_zero_and_non_finite_rows_stay_alone(quant):
    x = normal(64, 256).to(torch.bfloat16)
    x[5], x[6, 128:] = 0, 0
    clean = x.clone()
    x[9, 77], x[10, 200] = torch.nan, torch.inf
    codes, scales = quantize(x, quant, "a")
    back = dequantize(codes, scales, quant, "a")
    assert (back[5] == 0).all()
    assert (back[6, 128:] == 0).all()
    assert not back[9].isfinite().all()
    assert not back[10].isfinite().all()
    others = [row for row in range(64) if row not in (9, 10)]
    assert torch.equal(back[others], dequantize(*quantize(clean, quant, "a"), quant, "a")[others])
    assert (dequantize(*quantize(torch.zeros(3, 256), quant, "a"), quant, "a") == 0).all()
    if quant != "mxfp8":
        assert (scales != 0).all()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("operand", ["a", "b"])
def test_GA_3_empty_input_gives_empty_codes_and_scales(quant, operand):
    codes, scales = quantize(torch.empty(0, 256, dtype=torch.bfloat16), quant, operand)
    assert codes.shape == (0, 256)
    assert scales.numel() == 0
    assert dequantize(codes, scales, quant, operand).shape == (0, 256)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 2e-38, 1e-30, 3e38])
def test_denormal_and_huge_blocks_stay_finite(quant, size):
    x = torch.zeros(2, 256)
    x[0, 3], x[0, 4] = size, -size / 2
    back = dequantize(*quantize(x, quant, "a"), quant, "a")
    assert back.isfinite().all()
    assert (back - x).abs().max() <= max(size * 2**-4, 2.0**-126 * 2**-9)


def test_quantisers_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match=r"blockscale, ptpc, mxfp8"):
        quantize(normal(4, 128), "int8", "a")
    with pytest.raises(ValueError, match=r"float64"):
        quantize(normal(4, 128).double(), "ptpc", "a")
    with pytest.raises(ValueError, match=r"\(128,\)"):
        quantize(normal(4, 128)[0], "ptpc", "a")


def test_GA_4_per_row_error_of_both_variants_and_what_mixing_them_does():
    x = normal(2048, 7168)
    for dtype, most in ((torch.float8_e4m3fn, 448), (torch.float8_e4m3fnuz, 240)):
        scale = x.abs().amax(dim=1, keepdim=True) / most
        codes = (x / scale).to(dtype)
        assert codes.float().isnan().sum() == 0
        assert abs(error(x, codes.float() * scale) - 2.65e-2) < 2e-4
    codes, _ = quantize_blocks(x, Blocks(1, None, "fp32"))
    scale = x.abs().amax(dim=1, keepdim=True) / 448
    misread = codes.view(torch.float8_e4m3fnuz).float().nan_to_num() * scale
    assert abs(error(x, misread) - 0.50) < 0.01


def test_the_published_table_of_granularities():
    lines = granularities()
    assert [line.columns_per_scale for line in lines] == [7168, 512, 256, 128, 32]
    for line, published in zip(lines, (2.646e-2, 2.631e-2, 2.609e-2, 2.572e-2, 2.399e-2), strict=True):
        assert f"{line.rel_l2:.2e}" == f"{published:.2e}"
        assert abs(line.rel_l2 - published) < 2e-5  # what another sample of this size differs by
    assert [f"{line.scale_pct:.2f}" for line in lines] == ["0.06", "0.78", "1.56", "3.12", "12.50"]


def test_wire_errors_at_the_k_of_the_model():
    found = wire_errors("blockscale", 64, 512, 2048, 8)
    assert abs(found["bf16"] - 2.35e-3) < 5e-5
    assert abs(found["fp8"] - 2.5e-2) < 2e-3
