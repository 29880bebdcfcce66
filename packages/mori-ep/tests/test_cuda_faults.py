"""What goes wrong in the kernels, by themselves (on_cpu/cuda_node.py): it is named, and nothing hangs."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import pytest
import torch
from cuda_node import BF16, FP8, FP16, Node, make_inputs, on_both, snapshot
from mori_ep.reference import bytes_of
from mori_ep.targets import CombineShape, DispatchShape
from mori_ep.targets.cuda.faults import error_of
from mori_ep.targets.cuda.launch import CombineLaunch, DispatchLaunch
from mori_shmem.errors import ArgumentError, CollectiveMismatch, PeerTimeout, UnsupportedShape

pytestmark = pytest.mark.timeout(240)


def error_in(node: Node) -> Exception:
    node.sync()
    (found,) = node.faults()
    return error_of(found, 0.3)


@pytest.mark.parametrize("tokens", [40, 600])
@on_both
def test_a_rank_that_does_not_come_is_named_within_the_deadline(device: str, tokens: int) -> None:
    node = Node(device, 2, timeout_s=0.3, max_num_inp_token_per_rank=600)
    given = make_inputs(node, [tokens, tokens], 1)
    node.sync()
    node.prepared(DispatchLaunch, DispatchShape(512, BF16, 0, None, True))[0].launch(
        node.ranks[0].raw_stream, given[0].x, given[0].weights, None, given[0].ids
    )
    late = error_in(node)
    assert isinstance(late, PeerTimeout)
    assert (late.rank, late.peers, late.wanted) == (0, (1,), 1)
    assert "rank 0 waited more than 0.3 s for rank 1: the header of a dispatch" in str(late)
    rows = node.ranks[1].view("out", (node.config.recv_capacity, 512), BF16)
    assert not rows.any(), "it may still use the rows of the call before"


@pytest.mark.parametrize("packets", [True, False])
@on_both
def test_a_combine_that_a_rank_misses_is_named(device: str, packets: bool) -> None:
    node = Node(device, 2, timeout_s=0.3)
    given = make_inputs(node, [40, 40], 1)
    node.dispatch(given)
    node.sync()
    y = node.ranks[1].view("y", (node.config.recv_capacity, 512), BF16)
    launch = node.prepared(CombineLaunch, CombineShape(512, BF16, False, True))[1]
    maps = node.ranks[1].maps if packets else replace(node.ranks[1].maps, meta=None)
    launch.launch(node.ranks[1].raw_stream, y, None, 40, maps)
    late = error_in(node)
    assert isinstance(late, PeerTimeout)
    assert (late.rank, late.peers) == (1, (0,))


@on_both
def test_more_rows_than_there_is_room_for(device: str) -> None:
    """The rows that fit are right, nothing is written beyond them, and all ranks' errors have the numbers."""
    node = Node(device, 2, max_num_inp_token_per_rank=600, max_total_recv_tokens=200)
    for tokens in (128, 600):
        given = make_inputs(node, [tokens, 7], 2, experts=range(8))
        node.sync()
        node.dispatch(given)
        got = snapshot(node, given)
        node.sync()
        errors = [error_of(found, 1) for found in node.faults()]
        assert [type(error) for error in errors] == [UnsupportedShape] * 2
        room = node.config.recv_per_source
        assert f"rank 0 sends {node.scaled(tokens)} rows to rank 0" in str(errors[1])
        assert f"room for {room} of each rank" in str(errors[1])
        count = min(node.scaled(tokens) + 7, 2 * room)
        assert int(got[0]["count"]) == count
        rows = torch.cat([bytes_of(g.x) for g in given])[:count]
        assert torch.equal(got[0]["out"][:count], rows)
        for rank in node.ranks:
            rank.record.zero_()
            assert not rank.view("y", (1, 512), BF16).any()  # what lies behind


@on_both
def test_a_combine_of_too_few_rows(device: str) -> None:
    node = Node(device, 2)
    given = make_inputs(node, [40, 40], 1)
    node.dispatch(given)
    node.sync()
    y = [
        torch.zeros(256, 512, dtype=BF16, device=node.device),
        torch.zeros(7, 512, dtype=BF16, device=node.device),
    ]
    node.combine(y, None, [40, 40])
    error = error_in(node)
    assert isinstance(error, ArgumentError)
    assert "rank 1 combined an input of 7 rows" in str(error)


@on_both
def test_calls_of_different_kinds_are_told_apart(device: str) -> None:
    node = Node(device, 2, timeout_s=0.5)
    bf16, fp8 = make_inputs(node, [9, 9], 1), make_inputs(node, [9, 9], 1, dtype=FP8)
    shapes = (DispatchShape(512, BF16, 0, None, True), DispatchShape(512, FP8, 0, None, True))
    launches = [node.prepared(DispatchLaunch, shape)[r] for r, shape in enumerate(shapes)]
    node.sync()
    for rank, launch, given in zip(node.ranks, launches, (bf16[0], fp8[1]), strict=True):
        launch.launch(rank.raw_stream, given.x, given.weights, None, given.ids)
    node.sync()
    errors = [error_of(found, 0.5) for found in node.faults()]
    assert [type(error) for error in errors] == [CollectiveMismatch] * 2
    assert "rank 1 made a dispatch of another kind than rank 0" in str(errors[0])


PLAIN = CombineShape(512, BF16, False, False)
DIFFERENT = (  # what ranks 0 and 1 bring: named so
    (PLAIN, PLAIN._replace(hidden=128), "[*, 512] bfloat16 without", "[*, 128] bfloat16 without"),
    (PLAIN, PLAIN._replace(dtype=FP16), "[*, 512] bfloat16 without", "[*, 512] float16 without"),
    (PLAIN._replace(weights=True), PLAIN, "[*, 512] bfloat16 with weights", "[*, 512] bfloat16 without"),
    (
        *(PLAIN, PLAIN._replace(registered=True), "[*, 512] bfloat16 without weights"),
        "[*, 512] bfloat16 without weights in the registered buffer",
    ),
)
OF_BF16 = (DIFFERENT[0], DIFFERENT[2])  # a quantised transport takes no other rows, and none registered


@pytest.mark.parametrize(
    ("way", "shapes"),
    [
        *(("packets", shapes) for shapes in DIFFERENT),
        *(("pull", shapes) for shapes in DIFFERENT),
        *(("fp8_blockwise", shapes) for shapes in OF_BF16),
    ],
)
@on_both
def test_a_combine_of_what_does_not_go_together_is_told_to_all(
    device: str, way: str, shapes: tuple[CombineShape, CombineShape, str, str]
) -> None:
    """Also to rank 2, which has received no rows: one without weights goes with either of the others. Long
    before the deadline."""
    node = Node(device, 3, timeout_s=60, quant_type="fp8_blockwise" if way == "fp8_blockwise" else "none")
    given = make_inputs(node, [20, 9, 30], 1, experts=range(16))
    node.dispatch(given)
    launches = []  # all made before one starts: loading code may wait for the kernels that run
    for rank, source, shape in zip(node.ranks, given, (*shapes[:2], shapes[0]), strict=True):
        size = (node.config.recv_capacity, shape.hidden)
        y = torch.zeros(size, dtype=shape.dtype, device=node.device)
        w = None
        if shape.registered:
            y = rank.view("y", size, shape.dtype)
        if shape.weights and rank is node.ranks[0]:
            w = torch.zeros(size[0], node.config.num_experts_per_token, device=node.device)
        made = CombineLaunch(rank.place, shape._replace(weights=w is not None))
        maps = rank.maps if way == "packets" else replace(rank.maps, meta=None)
        call = functools.partial(made.launch, rank.raw_stream, y, w, len(source.x), maps)
        launches.append(functools.partial(call, guard=shape.registered))
    node.sync()
    began = time.monotonic()
    for launch in launches:
        launch()
    node.sync()
    assert time.monotonic() - began < 30
    errors = [error_of(found, 60) for found in node.faults()]
    assert [type(error) for error in errors] == [CollectiveMismatch] * 3
    for error in errors:
        told = str(error)
        assert all(text in told for text in shapes[2:]), told
        assert f"rank 1 {shapes[3]}" in told or f"rank 1 brings {shapes[3]}" in told
