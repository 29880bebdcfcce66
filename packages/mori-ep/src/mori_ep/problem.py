"""What a row consists of, and the bytes that a call moves.

A row goes once from a token to each *rank* that holds one of its experts, however many of them that rank
holds. It is the payload, the scales, the token's expert ids and weights (all of them, global ids), and where
it is from.
"""

from __future__ import annotations

from dataclasses import dataclass

ID_BYTES = 4  # int32
WEIGHT_BYTES = 4  # fp32
POSITION_BYTES = 4  # int32


@dataclass(frozen=True)
class RowFormat:
    """The row of one call. Its fields in this order, where rows are packed field by field into a block."""

    payload_bytes: int
    scale_bytes: int
    topk: int
    weights: bool

    @property
    def field_bytes(self) -> tuple[int, int, int, int, int]:
        """Payload, scales, weights, expert ids, source position."""
        weight_bytes = self.topk * WEIGHT_BYTES if self.weights else 0
        return self.payload_bytes, self.scale_bytes, weight_bytes, self.topk * ID_BYTES, POSITION_BYTES

    @property
    def nbytes(self) -> int:
        return sum(self.field_bytes)


@dataclass(frozen=True)
class Traffic:
    """What one call moved to one rank, and the bandwidths as this field of work quotes them.

    recv_rows     rows received, those of the rank itself included
    remote_rows   of them, rows that came from other ranks
    node_rows     sum over this rank's tokens of the distinct nodes that they went to, its own included
    tokens, topk  of this rank
    nodes         in the job
    """

    recv_rows: int
    remote_rows: int
    node_rows: int
    tokens: int
    topk: int
    nodes: int
    payload_bytes: int

    @property
    def recv_bytes(self) -> int:
        """Payload of all rows received. Over the time: the bandwidth of the links inside a node ("xgmi")."""
        return self.recv_rows * self.payload_bytes

    @property
    def remote_bytes(self) -> int:
        """Of that, what crossed a link: our "remote" bandwidth."""
        return self.remote_rows * self.payload_bytes

    @property
    def node_bytes(self) -> int:
        """One row per (token, node): the "rdma algo" bandwidth; (nodes - 1) / nodes of it is physical."""
        return self.node_rows * self.payload_bytes

    @property
    def assignment_bytes(self) -> int:
        """One row per (token, expert), the "ll" bandwidth: what would move without our sharing of rows."""
        return self.tokens * self.topk * self.payload_bytes
