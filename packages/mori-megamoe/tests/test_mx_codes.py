"""Every code against what its bits say, and every value against the nearest code, ties to even."""

from __future__ import annotations

import itertools
import math

import torch
from mori_megamoe import mx


def nearest_even(values: list[float], codes: list[float]) -> list[int]:
    """For each value the code whose number is nearest; between two, the even one. In float64: exact here."""
    return [min(range(len(codes)), key=lambda c: (abs(codes[c] - v), c % 2)) for v in values]


def all_bf16() -> torch.Tensor:
    """Every finite bf16 value."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


def test_e4m3_is_what_torch_says_for_all_codes() -> None:
    codes = torch.arange(256).to(torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float()
    got = mx.decode_e4m3(codes)
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))
    assert (got[0x7E], got[0x01], torch.isnan(got).sum()) == (448, 2**-9, 2)


def test_e4m3_codes_come_back() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(mx.encode_e4m3(mx.decode_e4m3(codes)), codes)


def test_e4m3_rounds_to_nearest_even_around_every_middle_and_saturates() -> None:
    values = mx.decode_e4m3(torch.arange(127).to(torch.uint8)).tolist()
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    around = torch.cat(
        [middles, torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, torch.tensor(1e9))]
    )
    assert mx.encode_e4m3(around).tolist() == nearest_even(around.tolist(), values)
    assert mx.encode_e4m3(-around).tolist() == [c | 0x80 for c in nearest_even(around.tolist(), values)]
    assert mx.encode_e4m3(torch.tensor([449.0, 1e30, -1e30])).tolist() == [0x7E, 0x7E, 0xFE]
    assert mx.encode_e4m3(torch.tensor([math.nan]))[0] & 0x7F == 0x7F


def test_e4m3_of_all_bf16_values_is_nearest_even() -> None:
    x = all_bf16().float()
    x = x[x.abs() <= 448]
    table = mx.decode_e4m3(torch.arange(127).to(torch.uint8)).double()
    distance = (x.abs().double()[:, None] - table[None, :]).abs()
    nearest = distance.amin(1)
    code = mx.encode_e4m3(x).long()
    picked = distance.gather(1, (code & 0x7F)[:, None])[:, 0]
    assert torch.equal(picked, nearest)
    tied = (distance == nearest[:, None]).sum(1) == 2
    assert tied.any()
    assert (code[tied] % 2 == 0).all()
    assert torch.equal(code >> 7, torch.signbit(x).long())


def test_e2m1_all_codes_and_all_bf16_values() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(16).to(torch.uint8)
    assert mx.decode_e2m1(codes).tolist() == values + [-v for v in values]
    assert torch.equal(mx.encode_e2m1(mx.decode_e2m1(codes)), codes)  # also -0
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for x in (
        middles,
        torch.nextafter(middles, torch.tensor(0.0)),
        torch.nextafter(middles, torch.tensor(9.0)),
    ):
        assert mx.encode_e2m1(x).tolist() == nearest_even(x.tolist(), values)
    x = all_bf16().float()
    table = torch.tensor(values).double()
    distance = (x.abs().clamp_max(6).double()[:, None] - table[None, :]).abs()
    code = mx.encode_e2m1(x).long()
    assert torch.equal(distance.gather(1, (code & 7)[:, None])[:, 0], distance.amin(1))


def test_e2m1_pairs_have_the_even_index_in_the_low_half() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    pairs = torch.stack([codes & 0xF, codes >> 4], -1).reshape(1, 512)
    assert torch.equal(mx.pack_e2m1(pairs)[0], codes)
    assert torch.equal(mx.unpack_e2m1(codes[None]), pairs)
    assert mx.pack_e2m1(torch.tensor([[0x3, 0xA]], dtype=torch.uint8)).tolist() == [[0xA3]]


def test_e8m0_all_codes() -> None:
    value = mx.decode_e8m0(torch.arange(256).to(torch.uint8), torch.float64)
    assert torch.isnan(value[255])
    assert value[:255].tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert mx.decode_e8m0(torch.tensor([0], dtype=torch.uint8)).view(torch.int32).tolist() == [0x00400000]
