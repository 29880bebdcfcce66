"""The window of an op across nodes: that of a node (mori_ep/layout.py), then what goes between nodes.

Others are numbered without one's own node: "other o" is node o, or o + 1 from one's own on.

    words         64-bit, one writer each, only growing: the number of the call
      header_in     [other]          its counterpart's header of this dispatch is here
      rows_in       [other][chunk]   a chunk of its rows is here
      partials_in   [other][chunk]   a chunk of what its node made of my tokens is here
      combined_in   [other]          it has sent all of this combine. As in flags: the call in the high half,
                                     in the low half what its partials are
    header_out    [other]            int64: header as in a node, then 1 if compact, then rows of each chunk
    headers_from  [2][other]         the same as received, by parity of the call
    rows_out      [other][chunk]     rows packed field by field (FIELDS), before they go
    rows_from     [2][other][chunk]
    partials_out  [other][chunk]     one row per token of the chunk that this node has made something of, in
                                     the dtype of combine; then their weights
    partials_from [2][other][chunk]
    own_partial   [max tokens]       what this node has made of my tokens, by token; own_weights likewise

A chunk is 64 consecutive tokens of the source. Its place follows from capacities; in it lie as many rows as
there are, so that it goes in one put.
"""

from __future__ import annotations

from dataclasses import dataclass

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import FLAG_BYTES, Layout, Region, aligned
from mori_ep.layout import layout_for as node_layout
from mori_ep.plan import Plan
from mori_ep.problem import WEIGHT_BYTES, RowFormat

CHUNK_TOKENS = 64
# Of RowFormat: ids, position, weights, scales, payload. What is read in place comes first.
FIELDS = (3, 4, 2, 1, 0)


@dataclass(frozen=True)
class InterLayout:
    """The regions of one rank's part. What is not here is in `here`."""

    here: Layout
    num_nodes: int
    num_chunks: int
    chunk_bytes: int
    partial_bytes: int
    extra: dict[str, Region]

    # ---- what the parts of the package that know one node ask for ----

    @property
    def num_queues(self) -> int:
        return self.here.num_queues

    @property
    def nbytes(self) -> int:
        return max(region.end_bytes for region in self.extra.values())

    def regions(self) -> dict[str, Region]:
        return {**self.here.regions(), **self.extra}

    def flag(self, purpose: Region, source: int) -> int:
        return self.here.flag(purpose, source)

    def queue_flag(self, purpose: Region, source: int, queue: int) -> int:
        return self.here.queue_flag(purpose, source, queue)

    # ---- between nodes ----

    @property
    def num_others(self) -> int:
        return self.num_nodes - 1

    @property
    def header_words(self) -> int:
        return self.here.header_words + 1 + self.num_chunks

    def word(self, name: str, other: int, chunk: int = 0) -> int:
        """Offset of a word in the part of the rank that reads it."""
        per_other = self.num_chunks if name in ("rows_in", "partials_in") else 1
        return self.extra[name].offset_bytes + (other * per_other + chunk) * FLAG_BYTES

    def header_out(self, other: int) -> int:
        return self.extra["header_out"].offset_bytes + other * self.header_words * 8

    def header_from(self, call: int, other: int) -> int:
        at = (call & 1) * self.num_others + other
        return self.extra["headers_from"].offset_bytes + at * self.header_words * 8

    def chunk(self, name: str, other: int, chunk: int, call: int = 0) -> int:
        """Offset of a chunk; `call` counts for the regions that exist by parity."""
        size = self.partial_bytes if name.startswith("partials") else self.chunk_bytes
        parity = call & 1 if name.endswith("_from") else 0
        at = (parity * self.num_others + other) * self.num_chunks + chunk
        return self.extra[name].offset_bytes + at * size


def layout_for(config: EpDispatchCombineConfig, plan: Plan) -> InterLayout:
    """For every shape up to the configuration's capacities."""
    here, topk = node_layout(config, plan), config.num_experts_per_token
    nodes = config.world_size // config.gpu_per_node
    others, chunks = nodes - 1, num_chunks(config.max_num_inp_token_per_rank)
    row = RowFormat(config.row_bytes, config.scale_bytes, topk, weights=True)
    chunk = aligned(CHUNK_TOKENS * row.nbytes)
    partial = aligned(CHUNK_TOKENS * (config.row_bytes + topk * WEIGHT_BYTES))
    header = (here.header_words + 1 + chunks) * 8
    sizes = {
        "header_in": others * FLAG_BYTES,
        "rows_in": others * chunks * FLAG_BYTES,
        "partials_in": others * chunks * FLAG_BYTES,
        "combined_in": others * FLAG_BYTES,
        "header_out": others * header,
        "headers_from": 2 * others * header,
        "rows_out": others * chunks * chunk,
        "rows_from": 2 * others * chunks * chunk,
        "partials_out": others * chunks * partial,
        "partials_from": 2 * others * chunks * partial,
        "own_partial": config.max_num_inp_token_per_rank * config.row_bytes,
        "own_weights": config.max_num_inp_token_per_rank * topk * WEIGHT_BYTES,
    }
    offset, extra = aligned(here.nbytes), {}
    for name, nbytes in sizes.items():
        extra[name] = Region(offset, nbytes)
        offset += aligned(nbytes)
    return InterLayout(here, nodes, chunks, chunk, partial, extra)


def num_chunks(tokens: int) -> int:
    return -(-tokens // CHUNK_TOKENS)


def field_starts(chunk: int, row: RowFormat, rows: int, first: int = 0) -> list[int]:
    """Where row 0 of each field, in RowFormat's order, lies in a chunk of `rows` rows that begins with row
    `first`."""
    sizes = row.field_bytes
    starts, at = [0] * len(sizes), chunk
    for field in FIELDS:
        starts[field] = at - first * sizes[field]
        at += rows * sizes[field]
    return starts
