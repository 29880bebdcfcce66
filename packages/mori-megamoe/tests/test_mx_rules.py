"""The rules that choose a block's power of two: what they promise for every bf16 amax, and odd blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from mori_megamoe import mx

RULES = {"input": mx.quantize_input, "hidden": mx.quantize_hidden, "partial": mx.quantize_partial}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def blocks_of(amax: torch.Tensor) -> torch.Tensor:
    """One block for each magnitude, the rest of it smaller."""
    x = torch.zeros(len(amax), 32)
    x[:, 5], x[:, 6], x[:, 20] = -amax, amax / 2, amax / 3
    return x


def positive_bf16() -> torch.Tensor:
    return torch.arange(1, 0x7F80).to(torch.int16).view(torch.bfloat16).float()


def least_power(amax: float, largest: int) -> int:
    """The exact least e with amax / 2^e <= largest."""
    e = math.frexp(amax)[1] - 12
    while Fraction(amax) > largest * Fraction(2) ** e:
        e += 1
    return e


def test_input_rule_for_every_bf16_amax() -> None:
    amax = positive_bf16()
    codes, scales = mx.quantize_input(blocks_of(amax).bfloat16())
    floored = amax.clamp_min(1e-10)
    want = [least_power(a, 448) + 127 for a in floored.tolist()]
    assert scales[:, 0].tolist() == want
    assert (min(want), max(want)) == (85, 247)
    scaled = floored.double() * 2.0 ** (127 - scales[:, 0].double())
    assert scaled.min() > 224
    assert scaled.max() <= 448
    assert (codes & 0x7F).max() <= 0x7E
    whole = amax >= 1e-10
    assert (codes[whole, 5] == (mx.encode_e4m3(scaled[whole].float()) | 0x80)).all()


def test_input_rule_keeps_448_times_powers_of_two_exact() -> None:
    amax = torch.tensor([448.0 * 2.0**k for k in range(-20, 20)])
    codes, scales = mx.quantize_input(blocks_of(amax).bfloat16())
    assert scales[:, 0].tolist() == [127 + k for k in range(-20, 20)]
    assert (codes[:, 5] == 0xFE).all()


def test_a_block_of_zeros() -> None:
    x = torch.zeros(2, 64)
    x[1] = -0.0
    for rule, scale in ((mx.quantize_input, 85), (mx.quantize_hidden, 0), (mx.quantize_partial, 0)):
        codes, scales = rule(x)
        assert scales.tolist() == [[scale] * 2] * 2
        assert codes[0].tolist() == [0] * 64
        assert codes[1].tolist() == [0x80] * 64
    assert torch.equal(mx.dequantize_partial(*mx.quantize_partial(x)), torch.zeros(2, 64))


def test_hidden_rule_rounds_up_from_mantissa_one_and_a_half() -> None:
    amax = positive_bf16()
    amax = amax[amax >= 2.0**-110]  # below, the code stays 0 or 1
    codes, scales = mx.quantize_hidden(blocks_of(amax))
    mantissa, exponent = torch.frexp(amax)
    want = exponent - 1 + (mantissa >= 0.75).to(torch.int32) + 127 - 8
    assert scales[:, 0].tolist() == want.tolist()
    scaled = amax.double() * 2.0 ** (127 - scales[:, 0].double())
    assert scaled.min() >= 192
    assert scaled.max() < 384
    assert (codes & 0x7F).max() < 0x7E
    just_below = torch.nextafter(torch.tensor([1.5]), torch.tensor([0.0]))
    assert mx.quantize_hidden(blocks_of(just_below))[1][0, 0] == 119
    assert mx.quantize_hidden(blocks_of(torch.tensor([1.5])))[1][0, 0] == 120


def test_the_rules_differ_where_they_are_said_to() -> None:
    x = blocks_of(torch.tensor([1.2, 448.0]))
    assert mx.quantize_input(x)[1][:, 0].tolist() == [119, 127]
    assert mx.quantize_hidden(x)[1][:, 0].tolist() == [119, 128]
    tiny = blocks_of(torch.tensor([1e-20]))
    assert mx.quantize_input(tiny)[1][0, 0] == 85
    assert mx.quantize_partial(tiny)[1][0, 0] < 85


def test_partial_rule_is_the_least_power_for_fp32_magnitudes() -> None:
    g = torch.Generator().manual_seed(3)
    amax = torch.rand(2000, generator=g) * 2.0 ** torch.randint(-100, 120, (2000,), generator=g)
    scales = mx.quantize_partial(blocks_of(amax))[1][:, 0].tolist()
    exact = [least_power(a, 448) + 127 for a in amax.tolist()]
    # The factor is a little above 1/448: within an ulp above 448 * 2^k both powers are right.
    assert all(s in (e, e + 1) for s, e in zip(scales, exact, strict=True))
    assert sum(s != e for s, e in zip(scales, exact, strict=True)) <= 2


def test_weight_rule_by_product_is_the_rule_by_division_for_every_bf16_amax() -> None:
    amax = positive_bf16()
    packed, scales = mx.quantize_weight(blocks_of(amax))
    quotient = (amax / 6).view(torch.int32)
    want = (quotient >> 23) + (quotient & 0x7FFFFF != 0)
    assert torch.equal(scales[:, 0].int(), want.int())
    magnitude = mx.decode_e2m1(mx.unpack_e2m1(packed))[:, 5]
    normal = want > 1
    assert (magnitude[normal] <= -3).all()  # the largest of a block uses the upper half of the codes
    assert (mx.decode_e2m1(mx.unpack_e2m1(packed)).abs() <= 6).all()


@every_rule
def test_blocks_are_independent_and_dequantise_closely(
    rule: Callable[[torch.Tensor], mx.rules.Quantized],
) -> None:
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    codes, scales = rule(x)
    for block in range(3):
        part = slice(32 * block, 32 * block + 32)
        alone = rule(x[3:4, part])
        assert torch.equal(alone[0], codes[3:4, part])
        assert torch.equal(alone[1], scales[3:4, block : block + 1])
    error = torch.linalg.norm(mx.dequantize(codes, scales) - x) / torch.linalg.norm(x)
    assert error < 0.04


@every_rule
def test_a_block_with_an_infinity_or_a_nan_is_nan_and_its_neighbour_is_not(
    rule: Callable[[torch.Tensor], mx.rules.Quantized],
) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(1, 64)
        x[0, 3] = bad
        back = mx.dequantize(*rule(x))
        assert back[0, 3].isnan()
        assert torch.equal(back[0, 32:], torch.ones(32))


def test_no_rows_are_no_trouble() -> None:
    for rule in RULES.values():
        codes, scales = rule(torch.zeros(0, 64))
        assert (tuple(codes.shape), tuple(scales.shape)) == ((0, 64), (0, 2))


def test_partials_with_scale_0_and_nan() -> None:
    codes = torch.full((1, 96), 0x7E, dtype=torch.uint8)
    scales = torch.tensor([[0, 127, 255]], dtype=torch.uint8)
    back = mx.dequantize_partial(codes, scales)[0]
    assert back[:32].tolist() == [0.0] * 32
    assert back[32:64].tolist() == [448.0] * 32
    assert back[64:].isnan().all()


def test_round_up_is_a_product_with_the_number_just_above_1_448() -> None:
    """One step above 448 the next power begins; with the fp32 just below 1/448 it would not."""
    amax = torch.nextafter(torch.tensor([448.0]), torch.tensor([500.0]))
    assert mx.quantize_partial(blocks_of(amax))[1][0, 0] == 128
    assert mx.quantize_partial(blocks_of(torch.tensor([448.0])))[1][0, 0] == 127
