"""Where each buffer and each flag lies in the window, in bytes. Pure integers; the same on every rank.

    flags         all 64-bit, one writer each, only growing. High half: the call, dispatches and combines
                  counted from 1 each. Low half: 0 unless said otherwise
      entered     [source][queue]  its header of this dispatch is here; with SLOTS and QUEUES its rows, too
      arrived     [source]         COUNTS: its rows of this dispatch are here. Elastic, low half: where my
                                   rows start at the source (targets/host/launch.py)
      staged      [source]         its rows for combine may be read. Low half: what they are
      finished    [source]         it has read what it needs of this combine
      returned    [source][queue]  QUEUES: its rows for my tokens are back
    headers       [2][source]      int64: what the source brings to this dispatch (HEADER) and how many rows
                                   it sends to each rank; by parity of the call
    recv_count    int32
    out*          [recv capacity]  the rows received: payload, scales, weights, ids, source positions
    blocks        [2][source]      a source's rows packed field by field, by parity (SLOTS, QUEUES)
    sending       [destination]    the same before the copy queue takes them (QUEUES)
    y, y_weights  [recv capacity]  the rows that combine adds up; y is the registered input buffer
    returned_rows [2][source]      rows that came back, then their weights, by parity (QUEUES)
    result*       [max tokens]     what combine returns

Offsets follow from capacities, never from the shape of a call: with two shapes in turn on one op, one call's
data would otherwise lie where the other expects its own. Within a region rows are packed at the call's own
pitch, so that what a caller gets is a contiguous tensor. Regions that a plan does not use have no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.plan import Plan, Way
from mori_ep.problem import ID_BYTES, POSITION_BYTES, WEIGHT_BYTES, RowFormat

FLAG_BYTES = 8
ALIGNMENT = 256
CALL_SHIFT = 32  # a flag's high half is the call's number; what the low half says is the flag's own business
HEADER = ("tokens", "hidden bytes", "dtype", "scale bytes", "weights", "replay")


@dataclass(frozen=True)
class Region:
    """A run of bytes of the window."""

    offset_bytes: int
    nbytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True)
class Layout:
    """The regions of one rank's part of the window."""

    num_ranks: int
    num_queues: int
    block_bytes: int  # of one source in `blocks`, of one destination in `sending`
    returned_bytes: int  # of one source in `returned_rows`
    entered: Region
    arrived: Region
    staged: Region
    finished: Region
    returned: Region
    headers: Region
    recv_count: Region
    out: Region
    out_scales: Region
    out_weights: Region
    out_indices: Region
    out_positions: Region
    blocks: Region
    sending: Region
    y: Region
    y_weights: Region
    returned_rows: Region
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

    @property
    def header_words(self) -> int:
        """Words of one source's header: the fields of HEADER, then the rows it sends to each rank."""
        return len(HEADER) + self.num_ranks

    def flag(self, purpose: Region, source: int) -> int:
        """Offset of arrived, staged or finished in the part of the rank that reads it."""
        return purpose.offset_bytes + source * FLAG_BYTES

    def queue_flag(self, purpose: Region, source: int, queue: int) -> int:
        """Offset of entered or returned."""
        return purpose.offset_bytes + (source * self.num_queues + queue) * FLAG_BYTES

    def header(self, call: int, source: int) -> int:
        """Offset in the receiver's part."""
        return self.headers.offset_bytes + ((call & 1) * self.num_ranks + source) * self.header_words * 8

    def block(self, call: int, source: int) -> int:
        """Offset in the receiver's part."""
        return self.blocks.offset_bytes + ((call & 1) * self.num_ranks + source) * self.block_bytes

    def sending_block(self, destination: int) -> int:
        """Offset in the sender's part."""
        return self.sending.offset_bytes + destination * self.block_bytes

    def returned_block(self, call: int, source: int) -> int:
        """Offset in the part of the rank whose tokens the rows are."""
        return self.returned_rows.offset_bytes + ((call & 1) * self.num_ranks + source) * self.returned_bytes

    @property
    def out_fields(self) -> tuple[Region, Region, Region, Region, Region]:
        """The regions of a received row's fields, in the order of RowFormat."""
        return self.out, self.out_scales, self.out_weights, self.out_indices, self.out_positions


def layout_for(config: EpDispatchCombineConfig, plan: Plan) -> Layout:
    """The layout for every shape up to the configuration's capacities."""
    num_ranks, rows, topk = config.world_size, config.recv_capacity, config.num_experts_per_token
    tokens, queues = config.max_num_inp_token_per_rank, max(1, plan.num_queues)
    row = RowFormat(config.row_bytes, config.scale_bytes, topk, weights=True)
    block = aligned(config.recv_per_source * row.nbytes)
    returned = aligned(config.recv_per_source * (config.row_bytes + topk * WEIGHT_BYTES))
    by_queues = plan.dispatch is Way.QUEUES
    flags, queue_flags = num_ranks * FLAG_BYTES, num_ranks * queues * FLAG_BYTES
    sizes = {
        "entered": queue_flags,
        "arrived": flags,
        "staged": flags,
        "finished": flags,
        "returned": queue_flags,
        "headers": 2 * num_ranks * (len(HEADER) + num_ranks) * 8,
        "recv_count": 4,
        "out": rows * config.row_bytes,
        "out_scales": rows * config.scale_bytes,
        "out_weights": rows * topk * WEIGHT_BYTES,
        "out_indices": rows * topk * ID_BYTES,
        "out_positions": rows * POSITION_BYTES,
        "blocks": 2 * num_ranks * block if plan.uses_blocks else 0,
        "sending": num_ranks * block if by_queues else 0,
        "y": rows * config.row_bytes,
        "y_weights": rows * topk * WEIGHT_BYTES,
        "returned_rows": 2 * num_ranks * returned if plan.combine is Way.QUEUES else 0,
        "result": tokens * config.row_bytes,
        "result_weights": tokens * topk * WEIGHT_BYTES,
    }
    offset, regions = 0, {}
    for name, nbytes in sizes.items():
        regions[name] = Region(offset, nbytes)
        offset += aligned(nbytes)
    return Layout(
        num_ranks=num_ranks, num_queues=queues, block_bytes=block, returned_bytes=returned, **regions
    )


def aligned(nbytes: int) -> int:
    """Rounded up to where the next region may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
