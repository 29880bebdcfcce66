"""The reference against float64 experts, and weights on their way to it."""

from __future__ import annotations

import pytest
import torch
from mori_megamoe import mx, reference
from mori_megamoe.testing import Toy, same_bytes
from mori_megamoe.weights import (
    LogicalWeights,
    StoredWeights,
    dequantized,
    quantize_weights,
    shuffle_weights,
    stored_weights,
    w1_of,
    w2_of,
)
from mori_shmem.errors import LayoutError


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("partials", ["bf16", "fp8_blockwise_1x32"])
@pytest.mark.parametrize("limit", [0.0, 10.0])
def test_the_accuracy_gate(partials: str, limit: float) -> None:
    toy = Toy(num_ranks=2, partials=partials, swiglu_limit=limit)
    inputs = toy.inputs([40, 7], invalid=0.2)
    weights = [toy.weights(r) for r in range(2)]
    for got, want in zip(toy.reference(inputs), reference.dense(inputs, weights, toy.problem), strict=True):
        assert 1e-3 < reference.rel_l2(got.out, want) < reference.ACCURACY_GATE


def test_what_is_not_finite_is_near_nothing() -> None:
    nan, zero, one = torch.tensor([float("nan"), 1.0]), torch.zeros(2), torch.ones(2)
    assert reference.rel_l2(zero, zero) == 0
    assert reference.rel_l2(one, zero) == float("inf")
    for got, want in ((nan, nan), (one, nan), (nan, one)):
        assert not reference.rel_l2(got, want) <= reference.ACCURACY_GATE


def test_each_routed_row_on_its_own_gives_the_same_bytes() -> None:
    """One token at a time, one slot at a time."""
    toy = Toy(num_ranks=2)
    inputs = toy.inputs([5, 3], invalid=0.2)
    whole = toy.reference(inputs)
    for rank in range(2):
        for token in range(len(inputs[rank].x)):
            alone = [reference.RankInput(*(part[:0] for part in given)) for given in inputs]
            alone[rank] = reference.RankInput(*(part[token : token + 1] for part in inputs[rank]))
            result = toy.reference(alone)[rank]
            assert same_bytes(result.out[0], whole[rank].out[token])
            assert same_bytes(result.hidden[0], whole[rank].hidden[token])
            assert same_bytes(result.hidden_scales[0], whole[rank].hidden_scales[token])


def test_a_token_without_experts_gets_zeros_and_a_row_of_zeros_stays_one() -> None:
    toy = Toy(num_ranks=1)
    (given,) = toy.inputs([4])
    given.ids[1] = -1
    given.x[2] = 0
    (result,) = toy.reference([given])
    assert result.out[1].abs().max() == 0
    assert result.out[2].abs().max() == 0
    assert result.out[0].abs().max() > 0


def test_weights_come_back_from_their_stored_form() -> None:
    toy = Toy(num_ranks=1, inter_dim=512)
    w1, w2 = torch.randn(3, 1024, 256), torch.randn(3, 256, 512)
    logical = quantize_weights(w1, w2)
    stored = shuffle_weights(logical)
    for expert in range(3):
        values = mx.decode_e2m1(mx.unpack_e2m1(logical.w1[expert]), torch.float64)
        want = mx.rules.scaled(values, mx.decode_e8m0(logical.w1_scale[expert], torch.float64))
        assert torch.equal(dequantized(w1_of(stored, toy.problem, expert)), want)
        assert torch.linalg.norm(want - w1[expert]) / torch.linalg.norm(w1[expert].double()) < 0.15
        values = mx.decode_e2m1(mx.unpack_e2m1(logical.w2[expert]), torch.float64)
        want = mx.rules.scaled(values, mx.decode_e8m0(logical.w2_scale[expert], torch.float64))
        assert torch.equal(dequantized(w2_of(stored, toy.problem, expert)), want)


def test_weights_are_taken_in_any_shape_of_the_right_number_of_bytes() -> None:
    toy = Toy(num_ranks=1)
    stored = toy.weights(0)
    shaped = StoredWeights(
        stored.w1.view(3, 512, 128),
        stored.w1_scale.view(3 * 512, 8),
        stored.w2.view(3, 256, 128).view(torch.float4_e2m1fn_x2),
        stored.w2_scale.view(torch.float8_e8m0fnu),
    )
    assert all(map(same_bytes, stored_weights(shaped, toy.problem), stored))
    for wrong in (stored.w1[:2], stored.w1.float(), stored.w1.T):
        with pytest.raises(LayoutError, match=r"w1 is .*196608 bytes in one run"):
            stored_weights(stored._replace(w1=wrong), toy.problem)


def test_quantised_weights_are_logical_until_they_are_shuffled() -> None:
    logical = quantize_weights(torch.randn(2, 512, 256), torch.randn(2, 256, 256))
    assert isinstance(logical, LogicalWeights)
    assert [tuple(part.shape) for part in logical] == [(2, 512, 128), (2, 512, 8), (2, 256, 128), (2, 256, 8)]
