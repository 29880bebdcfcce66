"""Sizes that callers ask for before they make a Buffer. Ours takes its memory when it first sees a shape, so
they are for the caller's own accounting: what such a shape will hold, on each rank."""

from __future__ import annotations

from dataclasses import dataclass

from mori_ep.adapters.deepep.quant import BLOCK
from mori_ep.arguments import check_whole


@dataclass(frozen=True)
class Config:
    """Geometry of the normal mode's kernels, as DeepEP names it. Our plans have their own; kept for callers
    that make, pass and print it."""

    num_sms: int
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_whole(name, value, 1)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Rows received and rows to be combined, for the chunks that this names."""
        return 2 * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Nothing: nodes are joined by the communicator, see mori_ep.internode."""
        return 0


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Two live results of rows by expert, with their scales, and what is under way for one more."""
    for name, value in {
        "num_max_dispatch_tokens_per_rank": max_tokens,
        "hidden": hidden,
        "num_ranks": num_ranks,
        "num_experts": num_experts,
    }.items():
        check_whole(name, value, 1)
    row = 2 * hidden + 4 * -(-hidden // BLOCK)
    by_expert = num_experts // num_ranks * num_ranks * max_tokens * row
    under_way = 6 * num_ranks * max_tokens * row
    return 2 * (by_expert + under_way)
