"""The kernels of combine, by themselves (on_cpu/cuda_node.py): sums to the bit, whichever way rows come
home; quantised transports by their definition.
"""

from __future__ import annotations

import functools

import pytest
import torch
from cuda_node import (
    BF16,
    FNUZ,
    FP8,
    FP16,
    FP32,
    Node,
    cases,
    keep,
    make_inputs,
    on_both,
    ragged,
    rounds,
    wire_of,
)
from mori_ep import reference

pytestmark = pytest.mark.timeout(240)


@cases(
    "world, registered",
    cpu=[(2, False), (3, True)],
    cuda=[(world, registered) for world in (1, 2, 3, 8) for registered in (False, True)],
)
def test_EP_4_sums_in_slot_order_whichever_way_rows_come_home(
    device: str, world: int, registered: bool
) -> None:
    """Owners of up to 512 tokens get packets, larger ones pull, in the same call."""
    node = Node(
        device,
        world,
        max_num_inp_token_per_rank=600,
        num_experts_per_token=6,
        use_external_inp_buf=not registered,
    )
    draws = [[600] * world, *(ragged(world, i, (0, 1, 37, 128, 600)) for i in range(1, 6))]
    calls = [make_inputs(node, n, i, drop=0.3 if i % 2 else 0.0) for i, n in enumerate(draws)]
    rounds(node, calls, BF16, 512, registered=registered)
    rounds(node, calls, BF16, 512, registered=registered, weights=True)


@cases(
    "dtype, packets",
    cpu=[(FP16, True), (FNUZ, False)],
    cuda=[(dtype, packets) for dtype in (BF16, FP16, FP32, FP8, FNUZ) for packets in (True, False)],
)
def test_every_dtype_is_added_in_fp32_and_rounded_once(
    device: str, dtype: torch.dtype, packets: bool
) -> None:
    node = Node(device, 3, hidden_dim=7168, max_token_type_size=4, num_experts_per_token=9)
    calls = [make_inputs(node, [20, 3, 1], 1), make_inputs(node, [7, 0, 33], 2, drop=0.2)]
    for hidden in (7168 if device == "cuda" else 896, 144):
        rounds(node, calls, dtype, hidden, weights=True, packets=packets)
        rounds(node, calls, dtype, hidden, registered=True, packets=packets)


@cases(
    "quant_type, block",
    cpu=[("fp8_blockwise", 128)],
    cuda=[("fp8_direct_cast", 128), ("fp8_blockwise", 128), ("fp8_blockwise", 32)],
)
def test_quantised_transports_have_the_bytes_of_their_definition(
    device: str, quant_type: str, block: int
) -> None:
    node = Node(
        device, 3, hidden_dim=7168, quant_type=quant_type, max_num_inp_token_per_rank=400, wire_block=block
    )
    calls = [make_inputs(node, [20, 3, 300], 1), make_inputs(node, [7, 0, 33], 2, drop=0.2)]
    for hidden in (7168 if device == "cuda" else 896, 128):
        rounds(node, calls, BF16, hidden, weights=True, wire=wire_of(quant_type, block))


@on_both
def test_combine_again_with_the_registered_buffer_filled_again_at_once(device: str) -> None:
    """With `guard` a rank ends a combine only when nobody reads its rows any more."""
    node = Node(device, 3, max_num_inp_token_per_rank=600)
    given = make_inputs(node, [600, 37, 590], 1)
    node.sync()
    node.dispatch(given)
    tokens = [g.x.shape[0] for g in given]
    kept: list[dict[str, torch.Tensor]] = []
    shape = (node.config.recv_capacity, 512)
    for i in range(20):
        for rank in node.ranks:
            rank.then(functools.partial(rank.view("y", shape, BF16).fill_, i + 1))
        y = [rank.view("y", shape, BF16) for rank in node.ranks]
        node.combine(y, None, tokens, registered=True, guard=True)
        for rank, n in zip(node.ranks, tokens, strict=True):
            kept.append({})
            rank.then(functools.partial(keep, kept[-1], {"out": rank.view("result", (n, 512), BF16)}))
    node.sync()
    assert node.faults() == []
    for i in range(20):
        for given_here in given:
            to = reference.destinations(given_here.ids, node.config.num_experts_per_rank, 3)
            want = torch.tensor([float(len(d) * (i + 1)) for d in to], dtype=BF16)
            assert torch.equal(kept.pop(0)["out"].cpu().view(BF16)[:, 0], want)
