"""Ranks that are left out (targets/cuda/masks.py): the kernels neither send to them nor wait for them,
whichever way rows go (on_cpu/cuda_node.py), and those who go on after one has gone are in step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_node import BF16, Node, make_inputs, on_both, rounds, run_dispatches, wire_of
from mori_ep.targets import CombineShape, DispatchShape
from mori_ep.targets.cuda import masks
from mori_ep.targets.cuda.faults import error_of
from mori_ep.targets.cuda.launch import CombineLaunch, DispatchLaunch
from mori_ep.targets.cuda.params import EPOCH, GAVE_UP
from mori_shmem.errors import PeerDied, PeerTimeout, UnsupportedShape

pytestmark = pytest.mark.timeout(240)
SIZES = (
    [30, 40, 7],
    [600, 9, 600],
    [37, 600, 600],
    [600, 3, 0],
    [0, 5, 1],
)  # packets, rows, both, a rank of none


@pytest.mark.parametrize("masked", [0, 1, 2])
@on_both
def test_rows_go_to_and_come_from_the_living_only(device: str, masked: int) -> None:
    """Dispatches by packets and by rows; what is stored at the masked rank would be a row too many there."""
    node = Node(device, 3, timeout_s=5, max_num_inp_token_per_rank=600, num_experts_per_token=6)
    calls = [make_inputs(node, tokens, i, drop=0.2 if i % 2 else 0.0) for i, tokens in enumerate(SIZES)]
    run_dispatches(node, calls)
    gone = node.ranks[masked]
    node.masked = [masked]
    before = gone.window.clone()
    run_dispatches(node, calls)
    assert torch.equal(gone.window, before)


@pytest.mark.parametrize("way", ["packets", "pull", "registered", "fp8_blockwise"])
@on_both
def test_sums_are_of_the_living_only(device: str, way: str) -> None:
    registered, quant_type = way == "registered", way if way == "fp8_blockwise" else "none"
    node = Node(
        device,
        *(3,),
        timeout_s=5,
        max_num_inp_token_per_rank=600,
        quant_type=quant_type,
        use_external_inp_buf=not registered,
    )
    node.masked = [1]
    wire = wire_of(quant_type, 128) if quant_type != "none" else None
    calls = [make_inputs(node, tokens, i) for i, tokens in enumerate(SIZES)]
    how = {"registered": registered, "guard": registered, "wire": wire, "packets": way != "pull"}
    rounds(node, calls, BF16, 512, **how)
    rounds(node, calls, BF16, 512, weights=True, **how)


@pytest.mark.parametrize("tokens", [30, 600])
@pytest.mark.parametrize("moment", ["dispatch", "combine"])
@on_both
def test_those_who_go_on_are_in_step_wherever_a_rank_was_lost(device: str, tokens: int, moment: str) -> None:
    """Rank 1 does not come to a call any more. Rank 0 has launched a pair more than rank 2 when it looks;
    both name the rank and mask it, and what they call next is right."""
    node = Node(device, 3, timeout_s=0.3, max_num_inp_token_per_rank=600)
    sizes = [tokens, 20, tokens]
    rounds(node, [make_inputs(node, sizes, 1)], BF16, 512)
    given = make_inputs(node, sizes, 2)
    node.sync()
    dispatch = node.prepared(DispatchLaunch, DispatchShape(512, BF16, 0, None, True))
    combine = node.prepared(CombineLaunch, CombineShape(512, BF16, False, False))
    y = torch.zeros(node.config.recv_capacity, 512, dtype=BF16, device=node.device)

    def call(what: str, r: int) -> None:
        rank, mine = node.ranks[r], given[r]
        if what == "dispatch":
            dispatch[r].launch(rank.raw_stream, mine.x, mine.weights, None, mine.ids)
        else:
            combine[r].launch(rank.raw_stream, y, None, len(mine.x), rank.maps)

    if moment == "combine":
        for r in range(3):
            call("dispatch", r)
    for what in (
        ("dispatch", "combine", "dispatch") if moment == "dispatch" else ("combine", "dispatch", "combine")
    ):
        call(what, 0)
    call(moment, 2)
    node.sync()
    found = node.faults()
    late = [error_of(record, 0.3) for record in found]
    assert [(type(error), error.peers) for error in late] == [(PeerTimeout, (1,))] * 2
    for r in (0, 2):
        node.ranks[r].record.zero_()
        node.ranks[r].then(lambda r=r: masks.move_on(node.states(node.ranks[r]), 1))
    node.sync()
    assert [state[EPOCH] for state in node.states(node.ranks[0])] == [
        state[EPOCH] for state in node.states(node.ranks[2])
    ]
    node.masked = [1]
    calls = [make_inputs(node, [n, 20, n], i) for i, n in enumerate((tokens, 7, 600, 40))]
    run_dispatches(node, calls)
    rounds(node, calls, BF16, 512)
    rounds(node, calls, BF16, 512, weights=True, packets=False)


@on_both
def test_a_rank_that_was_left_out_is_taken_in_again(device: str) -> None:
    """Rows that were stored without it do not count as rows that it waits for."""
    node = Node(device, 3, timeout_s=5, max_num_inp_token_per_rank=600)
    calls = [make_inputs(node, tokens, i) for i, tokens in enumerate(SIZES)]
    rounds(node, calls, BF16, 512)
    node.masked = [1]
    rounds(node, calls, BF16, 512)
    node.masked = []
    counts = [[int(words[EPOCH]) for words in node.states(rank)] for rank in node.ranks]
    for rank in node.ranks:
        for words, reached in zip(node.states(rank), zip(*counts, strict=True), strict=True):
            words[EPOCH] = max(reached)  # as when they meet
    run_dispatches(node, calls)
    rounds(node, calls, BF16, 512)


# ---- whom to mask, and the way back ----


def masks_of(rank: int = 0, states: str = "", counts: Any = None) -> masks.Masks:
    """Of a rank of 3 whose peers are a(live) or d(ead)."""
    words = [torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)]
    alive = {"a": "alive", "d": "dead"}
    core = SimpleNamespace(peer_states=lambda: [alive[s] for s in states])
    comm: Any = SimpleNamespace(
        rank=rank, world_size=3, core=core, all_gather=lambda mine: [mine, *(counts or [])]
    )
    return masks.Masks(comm, words)


def test_who_has_died_is_masked_whoever_was_awaited() -> None:
    late = PeerTimeout("waited for rank 2", rank=0, peers=[2])
    assert masks_of(states="aaa").missing(late) == [2]
    of = masks_of(states="ada")
    assert of.missing(late) == [1]
    told = masks.named(late, [1])
    assert isinstance(told, PeerDied)
    assert (told.peers, str(told)) == ((1,), "rank 1 died: waited for rank 2")
    of.leave_out([1])
    assert of.masked() == [False, True, False]
    assert masks.named(late, [2]) is late
    assert not of.is_settled(late)
    assert of.is_settled(PeerTimeout("", peers=[1]))
    assert of.missing(PeerTimeout("its own blocks", rank=0, peers=[0])) == []


def test_counts_move_on_by_ranks_masked_not_by_occasions() -> None:
    one, two = masks_of(), masks_of()
    for words, calls in zip((*one._states, *two._states), (7, 8, 9, 7), strict=True):
        words[EPOCH], words[GAVE_UP] = calls, 1
    one.leave_out([1])
    one.leave_out([1])
    one.leave_out([2])
    two.leave_out([1, 2])
    for words in (*one._states, *two._states):
        assert (int(words[EPOCH]), int(words[GAVE_UP])) == (2 << masks.CALLS_A_MASK_BITS, 0)


def test_all_come_back_together_at_the_largest_count() -> None:
    of = masks_of(counts=[[5, 2], [(3 << 30) + 1, 6]])
    of.leave_out([1, 2])
    with pytest.raises(UnsupportedShape, match="rank 1 cannot be taken in with rank 2 masked"):
        of.take_in(1)
    of.take_in(0)  # is not masked
    of.take_all_in()
    assert of.masked() == [False] * 3
    counts = [int(words[EPOCH]) & 0xFFFFFFFF for words in of._states]
    assert counts == [(3 << 30) + 1, 2 << masks.CALLS_A_MASK_BITS]
