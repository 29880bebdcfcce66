"""Where one dispatch's rows went and came from, across nodes; and the caller's copy of that."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from mori_shmem.device.rows import SlotMap

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.internode.layout import CHUNK_TOKENS, num_chunks
from mori_ep.routing import EpDispatchRoutingHandle


@dataclass
class InterRoutes:
    """Of this rank. Slots are maps as mori_shmem.device.rows has them, [.., k]; what has no place is null.

    here      [n, k]                     own tokens: (local rank of this node, row there)
    nodes     [n, k]                     own tokens: (node, number among the rows that go there); not compact,
                                         and for the own node: (node, token)
    forward   [others][chunks * 64][k]   others' tokens that came to me: (local rank, row there)
    """

    here: torch.Tensor
    nodes: torch.Tensor
    forward: torch.Tensor
    num_tokens: int = 0
    dispatch: int = 0
    compact: bool = True
    sent: list[int] = field(default_factory=list)  # rows to each rank of all nodes
    first: list[int] = field(default_factory=list)  # where they start there
    received: list[int] = field(default_factory=list)  # rows from each rank
    node_received: list[int] = field(default_factory=list)  # rows that each rank of this node has received
    sent_chunks: list[list[int]] = field(default_factory=list)  # [other][chunk] rows that I sent
    came_chunks: list[list[int]] = field(default_factory=list)  # [other][chunk] rows that came to me

    @property
    def num_received(self) -> int:
        return sum(self.received)

    def here_map(self, config: EpDispatchCombineConfig) -> SlotMap:
        return slot_map(config, self.here, 0, self.num_tokens)

    def nodes_map(self, config: EpDispatchCombineConfig, chunk: int) -> SlotMap:
        begin = chunk * CHUNK_TOKENS
        rows = min(CHUNK_TOKENS, self.num_tokens - begin)
        tokens = config.max_num_inp_token_per_rank
        return SlotMap(
            self.nodes.data_ptr() + begin * self.nodes.shape[1] * 4,
            rows,
            self.nodes.shape[1],
            tokens,
            node_null(config),
        )

    def forward_map(self, config: EpDispatchCombineConfig, other: int, chunk: int) -> SlotMap:
        return slot_map(config, self.forward[other], chunk * CHUNK_TOKENS, self.came_chunks[other][chunk])

    def chunk_begin(self, other: int, chunk: int) -> int:
        """The number, in `nodes`, of the first row of a chunk that I sent."""
        return sum(self.sent_chunks[other][:chunk]) if self.compact else chunk * CHUNK_TOKENS


def slot_map(config: EpDispatchCombineConfig, slots: torch.Tensor, begin: int, rows: int) -> SlotMap:
    """Rows begin.. of a map of (local rank, row)."""
    return SlotMap(
        slots.data_ptr() + begin * slots.shape[-1] * 4,
        rows,
        config.num_experts_per_token,
        config.position_stride,
        config.null_position,
    )


def node_null(config: EpDispatchCombineConfig) -> int:
    """What `nodes` holds where there is no place."""
    return config.world_size // config.gpu_per_node * config.max_num_inp_token_per_rank


def new_routes(config: EpDispatchCombineConfig) -> InterRoutes:
    """The op's own memory for maps."""
    tokens, topk = config.max_num_inp_token_per_rank, config.num_experts_per_token
    others = config.world_size // config.gpu_per_node - 1
    rows = num_chunks(tokens) * CHUNK_TOKENS

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32)

    return InterRoutes(empty(tokens, topk), empty(tokens, topk), empty(others, rows, topk))


@dataclass(eq=False)
class InterNodeRoutingHandle(EpDispatchRoutingHandle):
    """A copy of the maps of one dispatch; no later call changes it."""

    routes: InterRoutes | None = None


def handle_of(
    config: EpDispatchCombineConfig, routes: InterRoutes, positions: torch.Tensor
) -> InterNodeRoutingHandle:
    """`positions`: the sources of the rows received."""
    n, null = routes.num_tokens, config.null_position
    copy = InterRoutes(
        **{
            **vars(routes),
            "here": routes.here[:n].clone(),
            "nodes": routes.nodes[:n].clone(),
            "forward": routes.forward.clone(),
        }
    )
    first = config.rank // config.gpu_per_node * config.gpu_per_node * config.position_stride

    def whole(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    def in_all_ranks(slots: torch.Tensor) -> torch.Tensor:
        return torch.where(slots == null, null, slots + first)

    return InterNodeRoutingHandle(
        disp_dest_tok_id_map=in_all_ranks(copy.here),
        disp_tok_id_to_src_tok_id=positions.clone(),
        recv_count=whole([routes.num_received]),
        recv_per_source=whole(routes.received),
        sent_per_rank=whole(routes.sent),
        first_rows=whole(routes.first),
        cur_rank_num_token=n,
        dispatch=routes.dispatch,
        inter_node_disp_send_map=_send_map(config, copy.nodes),
        inter_node_disp_dest_tok_id_map=_forwarded(config, copy),
        routes=copy,
    )


def _send_map(config: EpDispatchCombineConfig, nodes: torch.Tensor) -> torch.Tensor:
    """[n, nodes]: the number of a token's row at each node, -1 where it does not go."""
    num_nodes, stride = config.world_size // config.gpu_per_node, config.max_num_inp_token_per_rank
    numbers = torch.full((len(nodes), num_nodes + 1), -1, dtype=torch.int32)
    went = nodes != node_null(config)
    columns = torch.where(went, nodes // stride, num_nodes).long()
    return numbers.scatter_(1, columns, torch.where(went, nodes % stride, -1))[:, :num_nodes].contiguous()


def _forwarded(config: EpDispatchCombineConfig, routes: InterRoutes) -> torch.Tensor:
    """[rows that came to me from other nodes, k], by (node, chunk): where they were stored in this node."""
    parts = [
        routes.forward[other, chunk * CHUNK_TOKENS : chunk * CHUNK_TOKENS + rows]
        for other, chunks in enumerate(routes.came_chunks)
        for chunk, rows in enumerate(chunks)
    ]
    slots = torch.cat(parts) if parts else torch.empty(0, config.num_experts_per_token, dtype=torch.int32)
    first = config.rank // config.gpu_per_node * config.gpu_per_node * config.position_stride
    return torch.where(slots == config.null_position, slots, slots + first)
