"""Where one dispatch's rows went and came from, as this rank keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from mori_shmem.device.rows import SlotMap

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.routing import EpDispatchRoutingHandle


@dataclass
class Routes:
    """`slots` is the dispatch map, [>= num_tokens, k] int32. With `elastic` its rows are counted from 0 for
    each rank; else they are the rows at the receiver."""

    slots: torch.Tensor
    num_tokens: int = 0
    sent: list[int] = field(default_factory=list)  # rows to each rank
    first: list[int] = field(default_factory=list)  # where they start there
    received: list[int] = field(default_factory=list)  # rows from each rank; they lie in this order
    dispatch: int = 0  # the number of the call

    @property
    def num_received(self) -> int:
        return sum(self.received)

    def slot_map(self, config: EpDispatchCombineConfig) -> SlotMap:
        return SlotMap(
            self.slots.data_ptr(),
            self.num_tokens,
            config.num_experts_per_token,
            config.position_stride,
            config.null_position,
        )

    def handle(self, positions: torch.Tensor) -> EpDispatchRoutingHandle:
        """A copy for the caller; `positions` are the sources of the rows received."""

        def whole(numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32)

        return EpDispatchRoutingHandle(
            disp_dest_tok_id_map=self.slots[: self.num_tokens].clone(),
            disp_tok_id_to_src_tok_id=positions.clone(),
            recv_count=whole([self.num_received]),
            recv_per_source=whole(self.received),
            sent_per_rank=whole(self.sent),
            first_rows=whole(self.first),
            cur_rank_num_token=self.num_tokens,
            dispatch=self.dispatch,
        )


def routes_of(handle: EpDispatchRoutingHandle) -> Routes:
    """The other way round. The map is the handle's own tensor."""
    return Routes(
        handle.disp_dest_tok_id_map,
        handle.cur_rank_num_token,
        handle.sent_per_rank.tolist(),
        handle.first_rows.tolist(),
        handle.recv_per_source.tolist(),
    )
