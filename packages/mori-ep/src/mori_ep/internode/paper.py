"""What a dispatch and a combine cost across nodes, on paper: messages, bytes and memory of one rank.

Routing is taken as uniform: every token goes to `topk` different experts of all, each set equally likely.
Then every rank sends and receives the same on average, and a node is wanted by a token with

    p_node = 1 - C(experts - experts of a node, topk) / C(experts, topk)

`count` does the same for a routing that is given, exactly; it is what the kernel types do, without the bytes.
docs/internode.md has the figures for 64 nodes of 8 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.internode.layout import CHUNK_TOKENS, layout_for, num_chunks
from mori_ep.layout import FLAG_BYTES, HEADER
from mori_ep.plan import Plan, Way
from mori_ep.problem import WEIGHT_BYTES, RowFormat


@dataclass(frozen=True)
class Sent:
    """What one rank puts to other nodes in a call (it gets as much, on average)."""

    messages: float  # puts and words: each is one message
    bytes: float
    rows: float


@dataclass(frozen=True)
class OnPaper:
    """A job, and a call of it in which every rank brings as many tokens."""

    num_nodes: int
    ranks_per_node: int
    num_experts: int
    topk: int
    tokens: int
    row: RowFormat  # of dispatch
    partial_bytes: int  # a row of combine
    compact: bool  # InterNodeV1; else InterNodeV1LL

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def _wanted(self, num_experts: int) -> float:
        """The chance that a token wants any of so many experts."""
        return 1 - comb(self.num_experts - num_experts, self.topk) / comb(self.num_experts, self.topk)

    @property
    def p_node(self) -> float:
        return self._wanted(self.num_experts // self.num_nodes)

    @property
    def p_rank(self) -> float:
        return self._wanted(self.num_experts // self.num_ranks)

    @property
    def remote_nodes(self) -> float:
        """Rows of a token that cross, each to another node."""
        return (self.num_nodes - 1) * self.p_node

    @property
    def remote_ranks(self) -> float:
        """Rows of a token that would cross if each rank were sent its own."""
        return (self.num_ranks - self.ranks_per_node) * self.p_rank

    # ---- one call ----

    def _chunks(self) -> list[int]:
        """Tokens of each chunk."""
        return [
            min(CHUNK_TOKENS, self.tokens - begin * CHUNK_TOKENS) for begin in range(num_chunks(self.tokens))
        ]

    def _sent(self, row_bytes: int, fixed_messages: int, fixed_bytes: int) -> Sent:
        others = self.num_nodes - 1
        goes = [1 - (1 - self.p_node) ** size for size in self._chunks()]
        if self.compact:
            rows = self.tokens * self.remote_nodes
        else:
            rows = others * sum(chance * size for chance, size in zip(goes, self._chunks(), strict=True))
        return Sent(others * (fixed_messages + sum(goes)), others * fixed_bytes + rows * row_bytes, rows)

    def header_bytes(self, max_tokens: int) -> int:
        """Counts for all ranks, and the rows of each chunk."""
        return 8 * (len(HEADER) + self.num_ranks + 1 + num_chunks(max_tokens))

    def dispatch(self, max_tokens: int) -> Sent:
        return self._sent(self.row.nbytes, 1, self.header_bytes(max_tokens))

    def combine(self) -> Sent:
        return self._sent(self.partial_bytes, 1, 0)

    @property
    def forwarded_rows(self) -> float:
        """Rows that a rank stores at ranks of its node for other nodes' tokens."""
        return self.tokens * (self.num_nodes - 1) * self.ranks_per_node * self.p_rank


def window_bytes(config: EpDispatchCombineConfig) -> dict[str, int]:
    """The memory of one rank, by what it is for, as formulas; their sum is the window but for alignment."""
    nodes = config.world_size // config.gpu_per_node
    others, topk = nodes - 1, config.num_experts_per_token
    row = RowFormat(config.row_bytes, config.scale_bytes, topk, weights=True).nbytes
    partial = config.row_bytes + topk * WEIGHT_BYTES
    chunk_tokens = num_chunks(config.max_num_inp_token_per_rank) * CHUNK_TOKENS
    words = 2 + 2 * num_chunks(config.max_num_inp_token_per_rank)
    return {
        "rows received": config.recv_capacity * row,
        "rows for combine": config.recv_capacity * partial,
        "result, own partial sums": 2 * config.max_num_inp_token_per_rank * partial,
        "rows between nodes": 3 * others * chunk_tokens * row,
        "partial sums between nodes": 3 * others * chunk_tokens * partial,
        "words": others * words * FLAG_BYTES,
    }


def window_size(config: EpDispatchCombineConfig) -> int:
    """What an op of this configuration allocates."""
    return layout_for(config, Plan(Way.COUNTS, Way.PULL)).nbytes


def count(job: OnPaper, ids: torch.Tensor, max_tokens: int) -> list[tuple[Sent, Sent]]:
    """By rank, what it sends in dispatch and in combine, for a routing ids [ranks, tokens, topk] of global
    experts."""
    puts, rows = _chunks_that_go(job, ids)
    others, header = job.num_nodes - 1, job.header_bytes(max_tokens)
    found = []
    for rank in range(job.num_ranks):
        node, local = divmod(rank, job.ranks_per_node)
        sent_puts, sent_rows = int(puts[rank].sum()), int(rows[rank].sum())
        back_puts = int(
            puts[local :: job.ranks_per_node, node].sum()
        )  # what its counterparts sent to its node
        back_rows = int(rows[local :: job.ranks_per_node, node].sum())
        dispatch = Sent(others + sent_puts, others * header + sent_rows * job.row.nbytes, sent_rows)
        found.append((dispatch, Sent(others + back_puts, back_rows * job.partial_bytes, back_rows)))
    return found


def _chunks_that_go(job: OnPaper, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([ranks, nodes] chunks that a rank puts to a node, the rows in them); none to its own."""
    per_node = job.num_experts // job.num_nodes
    puts = torch.zeros(job.num_ranks, job.num_nodes, dtype=torch.int64)
    rows = torch.zeros_like(puts)
    for rank, routes in enumerate(ids):
        wants = torch.zeros(job.tokens, job.num_nodes + 1, dtype=torch.bool)
        wants.scatter_(1, torch.where(routes >= 0, routes // per_node, job.num_nodes).long(), True)
        wants[:, rank // job.ranks_per_node] = False
        for chunk in torch.split(wants[:, : job.num_nodes], CHUNK_TOKENS):
            going = chunk.sum(0)
            puts[rank] += going > 0
            rows[rank] += going if job.compact else (going > 0) * len(chunk)
    return puts, rows
