"""The window: regions apart from each other, sized for the worst case, and nothing that follows from a
call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.layout import ALIGNMENT, HEADER, layout_for
from mori_ep.plan import Way, plan_for
from mori_ep.problem import RowFormat


def config(kind: str = "IntraNode", **changes: Any) -> EpDispatchCombineConfig:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "rank": 0,
        "world_size": 4,
        "hidden_dim": 7168,
        "scale_dim": 56,
        "scale_type_size": 4,
        "max_token_type_size": 2,
        "max_num_inp_token_per_rank": 128,
        "num_experts_per_rank": 8,
        "num_experts_per_token": 8,
        "kernel_type": EpDispatchCombineKernelType[kind],
    }
    return EpDispatchCombineConfig(**{**given, **changes})


KINDS = ("IntraNode", "IntraNodeLL", "AsyncLL")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 3, 8, 12])
def test_P8_P19_regions_lie_apart_and_hold_the_worst_case(kind: str, world_size: int) -> None:
    """Everybody sends all of its tokens to one rank; what dispatch sends from is not what combine sends
    from."""
    made = config(kind, world_size=world_size)
    layout = layout_for(made, plan_for(made))
    regions = list(layout.regions().values())
    for before, after in itertools.pairwise(regions):
        assert before.end_bytes <= after.offset_bytes
        assert after.offset_bytes % ALIGNMENT == 0
    row = RowFormat(7168 * 2, 56 * 4, 8, weights=True)
    rows = world_size * 128
    for region, nbytes in zip(layout.out_fields, row.field_bytes, strict=True):
        assert region.nbytes >= rows * nbytes
    assert layout.y.nbytes >= rows * row.payload_bytes
    assert layout.result.nbytes >= 128 * row.payload_bytes
    if plan_for(made).uses_blocks:
        assert layout.block_bytes >= 128 * row.nbytes
        assert layout.block(1, world_size - 1) + layout.block_bytes <= layout.blocks.end_bytes
        assert layout.block(1, 0) >= layout.block(0, world_size - 1) + layout.block_bytes  # parities apart
    if kind == "AsyncLL":
        assert layout.sending_block(world_size - 1) + layout.block_bytes <= layout.sending.end_bytes
        last = layout.returned_block(1, world_size - 1) + layout.returned_bytes
        assert last <= layout.returned_rows.end_bytes


def test_regions_that_a_plan_does_not_use_have_no_bytes() -> None:
    counts = layout_for(config(), plan_for(config()))
    assert counts.blocks.nbytes == counts.sending.nbytes == counts.returned_rows.nbytes == 0


def test_every_flag_has_a_word_of_its_own() -> None:
    made = config("AsyncLL", num_qp_per_pe=3)
    layout = layout_for(made, plan_for(made))
    words = [
        layout.queue_flag(region, source, queue)
        for region in (layout.entered, layout.returned)
        for source in range(4)
        for queue in range(3)
    ]
    words += [
        layout.flag(region, source)
        for region in (layout.arrived, layout.staged, layout.finished)
        for source in range(4)
    ]
    assert len(set(words)) == len(words) == 2 * 12 + 3 * 4
    assert all(word % 8 == 0 and word < layout.headers.offset_bytes for word in words)


def test_headers_alternate_with_the_call_and_hold_all_counts() -> None:
    layout = layout_for(config(), plan_for(config()))
    places = [layout.header(call, source) for call in (6, 7) for source in range(4)]
    assert len(set(places)) == 8
    assert layout.header(6, 2) == layout.header(8, 2)
    assert layout.header_words == len(HEADER) + 4
    assert max(places) + layout.header_words * 8 <= layout.headers.end_bytes


def test_EP_3_offsets_pass_four_gigabytes() -> None:
    made = config(world_size=8, max_num_inp_token_per_rank=1 << 16)
    layout = layout_for(made, plan_for(made))
    assert layout.y.offset_bytes > 1 << 32
    assert layout.nbytes > 2 * 8 * (1 << 16) * 14336


def test_P23_a_row_without_weights_has_no_bytes_for_them() -> None:
    with_weights, without = RowFormat(64, 4, 6, weights=True), RowFormat(64, 4, 6, weights=False)
    assert with_weights.nbytes - without.nbytes == 24
    assert without.field_bytes == (64, 4, 0, 24, 4)


def test_elastic_rows_go_where_the_receiver_alone_decides() -> None:
    assert plan_for(config()).dispatch is Way.COUNTS
    assert plan_for(config(elastic=True)).dispatch is Way.SLOTS
    assert plan_for(config("IntraNodeLL")).dispatch is Way.SLOTS
    assert plan_for(config("AsyncLL", num_qp_per_pe=2)).num_queues == 2
