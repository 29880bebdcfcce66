"""What the op takes at its door, and what it says to everything else."""

import pytest
import torch
from mori_gemm_ar.quant.operands import a_scale_grid, b_scale_grid, check_codes
from mori_gemm_ar.quant.quantize import quantize
from mori_shmem.errors import LayoutError, UnsupportedShape

CPU = torch.device("cpu")
M, K, BLOCKS = 130, 320, 3


def grid():
    return torch.arange(M * BLOCKS, dtype=torch.float32).view(M, BLOCKS)


def test_the_three_layouts_of_a_scale_are_read_alike():
    want = grid()
    contiguous = want.t().contiguous()
    for given in (contiguous, contiguous.t(), contiguous.flatten()):
        got = a_scale_grid(given, "blockscale", M, K, CPU)
        assert torch.equal(got, want)
        assert got.data_ptr() == given.data_ptr()


def test_row_major_a_scale_is_refused_with_both_ways_to_mend_it():
    with pytest.raises(LayoutError, match=r"ambiguous.*a_scale\.t\(\)\.contiguous\(\).*a_scale\.flatten\(\)"):
        a_scale_grid(grid(), "blockscale", M, K, CPU)


def test_other_shapes_and_strides_of_a_scale_are_refused_with_what_is_accepted():
    for wrong in (torch.ones(M, 4), torch.ones(M), torch.ones(2 * BLOCKS, M)[::2], torch.ones(1, BLOCKS, M)):
        with pytest.raises(
            LayoutError,
            match=r"\[3, 130\] contiguous, \[130, 3\] with strides \(1, 130\), and 390 values flat",
        ):
            a_scale_grid(wrong, "blockscale", M, K, CPU)


def spread(x):
    """The same matrix in memory with gaps."""
    return torch.zeros(x.shape[0], 2 * x.shape[1])[:, ::2].copy_(x)


def test_a_scale_of_the_right_shape_but_with_gaps_is_told_how_to_close_them():
    k_major = grid().t().contiguous()
    for wrong, hint in (
        (spread(k_major), r"strides \(260, 2\).*pass a_scale\.contiguous\(\)"),
        (grid().t(), r"strides \(1, 3\).*pass a_scale\.contiguous\(\)"),
        (torch.zeros(2 * M * BLOCKS)[::2], r"strides \(2,\).*pass a_scale\.contiguous\(\)"),
        (spread(grid()), r"strides \(6, 2\).*pass a_scale\.t\(\)\.contiguous\(\)"),
        (torch.zeros(M, BLOCKS + 1)[:, 1:], r"strides \(4, 1\).*pass a_scale\.t\(\)\.contiguous\(\)"),
    ):
        with pytest.raises(LayoutError, match=hint):
            a_scale_grid(wrong, "blockscale", M, K, CPU)
    assert torch.equal(a_scale_grid(spread(k_major).contiguous(), "blockscale", M, K, CPU), grid())
    assert torch.equal(a_scale_grid(spread(grid()).t().contiguous(), "blockscale", M, K, CPU), grid())


@pytest.mark.parametrize("shape", [(1, 16), (16, 1)], ids=str)
def test_one_row_or_one_block_leaves_nothing_to_mistake(shape):
    m, blocks = shape
    scale = torch.arange(16.0).view(shape)
    assert torch.equal(a_scale_grid(scale, "blockscale", m, 128 * blocks, CPU), scale)
    assert torch.equal(a_scale_grid(scale.t(), "blockscale", m, 128 * blocks, CPU), scale)


def test_a_square_grid_is_taken_k_block_major():
    scale = torch.arange(9.0).view(3, 3)
    assert torch.equal(a_scale_grid(scale, "blockscale", 3, 384, CPU), scale.t())


def test_no_rows():
    for quant in ("blockscale", "ptpc", "mxfp8"):
        _, scale = quantize(torch.empty(0, K), quant, "a")
        assert a_scale_grid(scale, quant, 0, K, CPU).shape[0] == 0


def test_GA_4_the_other_e4m3_is_refused_by_name_with_the_way_in():
    codes = torch.zeros(4, 256, dtype=torch.uint8)
    with pytest.raises(UnsupportedShape, match=r"a is float8_e4m3fnuz.*float8_e4m3fn.*twice.*convert_fnuz"):
        check_codes("a", codes.view(torch.float8_e4m3fnuz), 256, CPU)
    with pytest.raises(UnsupportedShape, match=r"float8_e5m2.*allowed is torch.float8_e4m3fn"):
        check_codes("b", codes.view(torch.float8_e5m2), 256, CPU)
    with pytest.raises(UnsupportedShape, match=r"uint8.*\.view\(torch.float8_e4m3fn\)"):
        check_codes("b", codes, 256, CPU)
    with pytest.raises(UnsupportedShape, match=r"bfloat16, allowed"):
        check_codes("b", codes.to(torch.bfloat16), 256, CPU)


def test_codes_of_the_wrong_shape_stride_or_device_are_refused():
    codes = torch.zeros(4, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    check_codes("a", codes, 256, CPU)
    check_codes("b", torch.zeros(4, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :256], 256, CPU, 4)
    with pytest.raises(UnsupportedShape, match=r"\(4, 256\), wanted \[M, 128\]"):
        check_codes("a", codes, 128, CPU)
    with pytest.raises(UnsupportedShape, match=r"\(4, 256\), wanted \[5, 256\]"):
        check_codes("b", codes, 256, CPU, 5)
    with pytest.raises(LayoutError, match=r"strides \(1, 256\).*contiguous"):
        check_codes("a", torch.zeros(256, 256, dtype=torch.uint8).view(torch.float8_e4m3fn).t(), 256, CPU)
    with pytest.raises(UnsupportedShape, match=r"on meta, this op runs on cpu"):
        check_codes("a", torch.empty(4, 256, dtype=torch.float8_e4m3fn, device="meta"), 256, CPU)


def test_scales_of_the_wrong_dtype_or_shape_are_refused():
    with pytest.raises(UnsupportedShape, match=r"a_scale is a list, wanted is a torch.Tensor"):
        a_scale_grid([1.0] * M, "ptpc", M, K, CPU)
    with pytest.raises(UnsupportedShape, match=r"b_scale is a NoneType, wanted is a torch.Tensor"):
        b_scale_grid(None, "mxfp8", 256, K, CPU)
    with pytest.raises(UnsupportedShape, match=r"float64.*float32"):
        a_scale_grid(torch.ones(M, dtype=torch.float64), "ptpc", M, K, CPU)
    with pytest.raises(UnsupportedShape, match=r"\(129,\), wanted \[M\] or \[M, 1\] = \[130\]"):
        a_scale_grid(torch.ones(129), "ptpc", M, K, CPU)
    with pytest.raises(
        UnsupportedShape, match=r"\(3, 2\), wanted \[ceil\(N/128\), ceil\(K/128\)\] = \[2, 3\]"
    ):
        b_scale_grid(torch.ones(3, 2), "blockscale", 256, K, CPU)
    with pytest.raises(UnsupportedShape, match=r"float32, mxfp8 takes ue8m0"):
        a_scale_grid(torch.ones(M, 10), "mxfp8", M, K, CPU)
    with pytest.raises(UnsupportedShape, match=r"\(130, 3\), wanted \[130, 10\]"):
        a_scale_grid(torch.ones(M, 3, dtype=torch.uint8), "mxfp8", M, K, CPU)
