"""The kernels of dispatch, by themselves (on_cpu/cuda_node.py): rows, order, maps and counts are the
reference's, for any ranks, sizes, dtypes and places of tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_node import (
    BF16,
    FP8,
    FP16,
    FP32,
    Node,
    cases,
    check_dispatch,
    make_inputs,
    on_both,
    only_gpu,
    ragged,
    run_dispatches,
    snapshot,
)
from mori_ep.reference import RankInput, bytes_of
from mori_ep.targets.cuda.params import RECEIVE, SEND
from mori_shmem.errors import ArgumentError

pytestmark = pytest.mark.timeout(240)


@cases("world", cpu=[1, 3], cuda=[1, 2, 3, 5, 8])
def test_EP_8_any_number_of_ranks_each_sending_in_its_own_way(device: str, world: int) -> None:
    """600 tokens leave as rows, fewer as packets (512 at most); ranks of both kinds meet in one call."""
    node = Node(device, world, max_num_inp_token_per_rank=600, num_experts_per_token=6)
    draws = [[600] * world, *(ragged(world, i, (0, 1, 37, 128, 560, 600)) for i in range(1, 12))]
    calls = [make_inputs(node, n, i, drop=0.3 if i % 3 == 2 else 0.0) for i, n in enumerate(draws)]
    run_dispatches(node, calls)


@on_both
def test_EP_1_empty_ranks_and_one_sided_routing_again_and_again(device: str) -> None:
    node = Node(device, 2, max_num_inp_token_per_rank=600)
    one_side = [
        make_inputs(node, [600, 128], 9, experts=range(8)),
        make_inputs(node, [0, 600], 8, experts=range(8, 16)),
    ]
    calls = [make_inputs(node, n, 3) for n in ([0, 64], [64, 0], [0, 0], [0, 600], [600, 0])] + one_side
    run_dispatches(node, calls * 4)


@cases("top_k", cpu=[3, 31], cuda=[1, 3, 6, 7, 9, 10, 31])
def test_EP_2_any_top_k(device: str, top_k: int) -> None:
    node = Node(
        device,
        2,
        num_experts_per_token=top_k,
        num_experts_per_rank=24,
        scale_dim=8,
        max_num_inp_token_per_rank=600,
    )
    calls = [make_inputs(node, [37, 37], 5), make_inputs(node, [600, 37], 6, drop=0.2)]
    run_dispatches(node, calls * 2)


SHAPES = {
    "fp8 with block scales": (FP8, 7168, (56, FP32)),
    "bf16": (BF16, 7168, None),
    "fp16 with seven one-byte scales": (FP16, 512, (7, torch.uint8)),
    "fp32 with a scale a token": (FP32, 128, (1, FP32)),
    "packed fp4 with e8m0 scales": (torch.uint8, 3584, (224, torch.uint8)),
    "fnuz": (torch.float8_e4m3fnuz, 2048, (16, FP32)),
    "one unit": (FP8, 16, (3, torch.uint8)),
    "a row that no warp divides": (BF16, 3592, (5, torch.int16)),
}
SMALL_SHAPES = {
    "fp8 with block scales": (FP8, 896, (7, FP32)),
    "fp16 with seven one-byte scales": (FP16, 512, (7, torch.uint8)),
    "one unit": (FP8, 16, (3, torch.uint8)),
    "a row that no warp divides": (BF16, 904, (5, torch.int16)),
}


@on_both
def test_EP_7_every_dtype_and_shape_in_turn_on_one_op(device: str) -> None:
    node = Node(
        device,
        3,
        hidden_dim=7168,
        scale_dim=224,
        max_token_type_size=2,
        num_experts_per_token=8,
        max_num_inp_token_per_rank=400,
    )
    calls = []
    for i, (dtype, hidden, scale) in enumerate((SHAPES if device == "cuda" else SMALL_SHAPES).values()):
        for tokens in ([128, 3, 400], [5, 0, 1]):
            shape: dict[str, Any] = {"hidden": hidden, "dtype": dtype, "scale": scale, "weights": i % 3 != 1}
            calls.append(make_inputs(node, tokens, i, drop=0.1, **shape))
    run_dispatches(node, calls * 2)


@on_both
def test_tensors_that_begin_at_odd_places(device: str) -> None:
    """Ids, weights and scales need no alignment of their own; the payload's 16 bytes are asked for."""
    node = Node(device, 2, num_experts_per_token=8, scale_dim=16)
    given = make_inputs(node, [40, 40], 1, scale=(16, FP32))
    for g in given:
        for name in ("ids", "weights", "scales"):
            value = getattr(g, name)
            moved = torch.empty(value.numel() + 1, dtype=value.dtype, device=node.device)[1:].view(
                value.shape
            )
            setattr(g, name, moved.copy_(value))
    run_dispatches(node, [given] * 2)
    x = torch.empty(40 * 512 + 1, dtype=BF16, device=node.device)[1:].view(40, 512)
    with pytest.raises(ArgumentError, match="multiple of 16"):
        node.dispatch([replace(given[0], x=x), given[1]])


@only_gpu
def test_EP_3_tokens_beyond_two_to_the_sixteen(device: str) -> None:
    node = Node(
        device,
        2,
        hidden_dim=128,
        num_experts_per_rank=1,
        num_experts_per_token=1,
        max_num_inp_token_per_rank=65537,
    )
    given = make_inputs(node, [65537, 65537], 1, hidden=128)
    node.dispatch(given)
    (mine, theirs) = snapshot(node, given)
    node.sync()
    assert node.faults() == []
    assert int(mine["count"]) + int(theirs["count"]) == 131074
    for got, here in ((mine, 0), (theirs, 1)):
        sources = torch.cat([(g.ids[:, 0] == here).nonzero()[:, 0] + s * 131074 for s, g in enumerate(given)])
        n = len(sources)
        assert torch.equal(got["sources"][:n].long(), sources)
        rows = torch.cat([bytes_of(g.x)[g.ids[:, 0] == here] for g in given])
        assert torch.equal(got["out"][:n], rows)


@only_gpu
def test_EP_3_elements_beyond_two_to_the_31(device: str) -> None:
    node = Node(
        device,
        1,
        hidden_dim=7168,
        num_experts_per_rank=2,
        num_experts_per_token=1,
        max_num_inp_token_per_rank=300_000,
    )
    x = torch.zeros(300_000, 7168, dtype=BF16, device=node.device)
    x[-1] = torch.arange(7168, device=node.device)
    ids = torch.zeros(300_000, 1, dtype=torch.int32, device=node.device)
    node.dispatch([RankInput(x, ids)])
    node.sync()
    rows = node.ranks[0].view("out", (300_000, 7168), BF16)
    assert torch.equal(rows[-1], x[-1])
    node.ranks[0].view("y", (300_000, 7168), BF16).copy_(rows)
    node.combine([rows], None, [300_000], registered=True)
    node.sync()
    assert torch.equal(node.ranks[0].view("result", (300_000, 7168), BF16)[-1], x[-1])


@on_both
def test_a_dispatch_in_two_halves(device: str) -> None:
    node = Node(device, 3, max_num_inp_token_per_rank=600)
    for i, tokens in enumerate(([5, 0, 128], [600, 3, 600], [128, 128, 128])):
        given = make_inputs(node, tokens, i)
        node.sync()
        node.dispatch(given, phases=SEND)
        node.dispatch(given, phases=RECEIVE)
        got = snapshot(node, given)
        node.sync()
        check_dispatch(node, given, got)
    assert node.faults() == []
