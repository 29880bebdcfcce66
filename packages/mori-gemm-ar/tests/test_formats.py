"""Decode tables against torch and against the definitions; the fast decoder against the tables."""

import math
from itertools import pairwise

import pytest
import torch
from mori_gemm_ar.quant.formats import E4m3Decoder, convert_fnuz, decode_table, decode_ue8m0

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def same(got, want):
    return all(
        math.isnan(g) if math.isnan(w) else g == w and math.copysign(1, g) == math.copysign(1, w)
        for g, w in zip(got, want, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e4m3fn", torch.float8_e4m3fn), ("e4m3fnuz", torch.float8_e4m3fnuz), ("ue8m0", torch.float8_e8m0fnu)],
)
def test_tables_are_what_torch_decodes(name, dtype):
    assert same(decode_table(name), ALL_BYTES.view(dtype).to(torch.float64).tolist())


def test_GA_4_the_bytes_that_tell_the_two_variants_apart():
    fn, fnuz = decode_table("e4m3fn"), decode_table("e4m3fnuz")
    assert (fn[0x38], fnuz[0x38]) == (1.0, 0.5)
    assert fn[0x80] == 0
    assert math.copysign(1, fn[0x80]) == -1
    assert math.isnan(fnuz[0x80])
    assert (fn[0x7E], fnuz[0x7E]) == (448.0, 224.0)
    assert math.isnan(fn[0x7F])
    assert fnuz[0x7F] == 240.0
    assert (fn[1], fnuz[1]) == (2.0**-9, 2.0**-10)


def test_the_fast_decoder_is_exact_for_every_code_and_by_row_stride():
    decoder = E4m3Decoder(2, 256)
    padded = torch.full((2, 300), 0x7F, dtype=torch.uint8)
    padded[0, :256], padded[1, :256] = ALL_BYTES, ALL_BYTES.flip(0)
    halves, nan = decoder.halves(padded.view(torch.float8_e4m3fn)[:, :256])
    values = (halves.to(torch.float32) * E4m3Decoder.UNIT).masked_fill_(nan, torch.nan)
    assert same(values[0].tolist(), decode_table("e4m3fn"))
    assert same(values[1].flip(0).tolist(), decode_table("e4m3fn"))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_the_fast_decoder_finds_a_single_nan_of_either_sign(code):
    codes = torch.full((4, 256), 0x7E, dtype=torch.uint8)
    assert E4m3Decoder(4, 256).halves(codes.view(torch.float8_e4m3fn))[1] is None
    codes[3, 255] = code
    _, nan = E4m3Decoder(4, 256).halves(codes.view(torch.float8_e4m3fn))
    assert nan.nonzero().tolist() == [[3, 255]]


def test_torch_rounds_to_the_nearest_code_ties_to_even():
    table = decode_table("e4m3fn")[:0x7F]
    between = torch.tensor([(a + b) / 2 for a, b in pairwise(table)])
    ties = between.to(torch.float8_e4m3fn).view(torch.uint8)
    assert ties.tolist() == [low + (low & 1) for low in range(0x7E)]
    above = torch.nextafter(between, torch.tensor(math.inf)).to(torch.float8_e4m3fn).view(torch.uint8)
    assert above.tolist() == list(range(1, 0x7F))


def test_convert_fnuz_keeps_values():
    fnuz = ALL_BYTES.view(torch.float8_e4m3fnuz)
    got, want = convert_fnuz(fnuz).to(torch.float32), fnuz.to(torch.float32)
    assert got.isnan().tolist() == want.isnan().tolist()
    large = want.abs() >= 2.0**-6
    assert torch.equal(got[large], want[large])
    assert ((got - want)[~want.isnan()].abs() <= 2.0**-10).all()
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        convert_fnuz(ALL_BYTES.view(torch.float8_e4m3fn))


def test_ue8m0_bytes():
    assert same(decode_ue8m0(ALL_BYTES).tolist(), decode_table("ue8m0"))
