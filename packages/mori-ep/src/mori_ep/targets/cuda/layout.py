"""Where the cuda target's buffers and flags lie in the window, in bytes. Pure integers; the same on every
rank.

    headers         [2][source] packets: what the source brings to this dispatch (routing.cuh)
    dispatch_slots  [2][source] packets: rows of sources with few tokens
    combine_slots   [2][source] packets: rows that the source has made of my tokens
    done            u32 [source]  tokens of the source whose rows are stored here, so far
    entered, ready, finished      u64 [source], of combine (combine.cu)
    dispatch_state, combine_state my own words: epoch, tickets, barrier (protocol.cuh)
    block_counts    my own scratch;  meta  numbers of the last dispatch;  table  [max tokens][k] its places
    recv_count, out*        what dispatch returns, at fixed addresses
    y, y_weights            what peers read in combine; y is the registered input buffer
    y_wire, y_scales        what they read instead with a quantised transport
    result, result_weights  what combine returns

Everything that a peer writes exists twice by parity of the call, or is written only after this rank has said
that it has begun the call (dispatch.cu), so results need not move. Offsets follow from capacities alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import Region, aligned
from mori_ep.plan import Plan
from mori_ep.targets.cuda import limits
from mori_ep.targets.cuda.params import (
    HEADER_PACKETS,
    MAX_RANKS,
    META_WORDS,
    STATE_WORDS,
    row_shape,
    slot_bytes,
    units,
)

MOST_BLOCKS = 1024


@dataclass(frozen=True)
class Layout:
    """The regions of one rank's part of the window."""

    num_ranks: int
    dispatch_slots_bytes: int  # of one source
    combine_slots_bytes: int
    headers: Region
    dispatch_slots: Region
    combine_slots: Region
    done: Region
    entered: Region
    ready: Region
    finished: Region
    dispatch_state: Region
    combine_state: Region
    block_counts: Region
    meta: Region
    table: Region
    recv_count: Region
    out: Region
    out_scales: Region
    out_weights: Region
    out_indices: Region
    out_positions: Region
    y: Region
    y_wire: Region
    y_scales: Region
    y_weights: Region
    result: Region
    result_weights: Region

    @property
    def nbytes(self) -> int:
        """The size of the window."""
        return self.result_weights.end_bytes

    def regions(self) -> dict[str, Region]:
        """All regions by name, in the order in which they lie."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: region for name, region in named if isinstance(region, Region)}


def layout_for(config: EpDispatchCombineConfig, plan: Plan) -> Layout:
    """The layout for every shape up to the configuration's capacities."""
    ranks, rows, top_k = config.world_size, config.recv_capacity, config.num_experts_per_token
    tokens = config.max_num_inp_token_per_rank
    dispatch_slots, combine_slots = slots_a_source(config, plan)
    words = ranks * 4
    sizes = {
        "headers": 2 * ranks * HEADER_PACKETS * 16,
        "dispatch_slots": 2 * ranks * dispatch_slots,
        "combine_slots": 2 * ranks * combine_slots,
        "done": words,
        **dict.fromkeys(("entered", "ready", "finished"), 2 * words),
        **dict.fromkeys(("dispatch_state", "combine_state"), STATE_WORDS * 4),
        "block_counts": MOST_BLOCKS * MAX_RANKS * 4,
        "meta": META_WORDS * 4,
        "table": tokens * top_k * 4,
        "recv_count": 4,
        "out": rows * config.row_bytes,
        "out_scales": rows * config.scale_bytes,
        "out_weights": rows * top_k * 4,
        "out_indices": rows * top_k * 4,
        "out_positions": rows * 4,
        "y": rows * config.row_bytes,
        "y_wire": rows * config.hidden_dim if config.quant_type != "none" else 0,
        "y_scales": rows * -(-config.hidden_dim // 16) * 4 if config.quant_type == "fp8_blockwise" else 0,
        "y_weights": rows * top_k * 4,
        "result": tokens * config.row_bytes,
        "result_weights": tokens * top_k * 4,
    }
    offset, regions = 0, {}
    for name, nbytes in sizes.items():
        regions[name] = Region(offset, nbytes)
        offset += aligned(nbytes)
    return Layout(
        num_ranks=ranks, dispatch_slots_bytes=dispatch_slots, combine_slots_bytes=combine_slots, **regions
    )


def slots_a_source(config: EpDispatchCombineConfig, plan: Plan) -> tuple[int, int]:
    """Bytes of packets that one source can bring to a dispatch, and to a combine: of as many tokens as the
    target sends so by itself, or of more if rules say so."""
    if config.world_size == 1:
        return 0, 0
    top_k = config.num_experts_per_token
    shape = row_shape(config.row_bytes, config.scale_bytes, top_k, weights=True)
    dispatched = slot_bytes(shape.payload_units + 1 + shape.tail_units)
    combined = slot_bytes(units(config.row_bytes) + units(4 * top_k))
    planned = limits.most_dispatch_packets(config, config.row_bytes)
    return (
        max(planned, limits.within(config, plan.few.dispatch)) * dispatched,
        limits.room_for_combine_packets(config, plan.few) * combined,
    )
