"""The maps of one dispatch, as an object of the caller's: to replay it, or to combine it while others are
open.

A map entry is rank * S + row with S = world_size * max_num_inp_token_per_rank, or `null` = world_size * S.
Everything here is a copy; no later call of the op changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class EpDispatchRoutingHandle:
    """Where the rows of one dispatch went, and where those that came are from."""

    disp_dest_tok_id_map: torch.Tensor  # [n, k] int32: (destination rank, row there), or null
    disp_tok_id_to_src_tok_id: (
        torch.Tensor
    )  # [recv capacity] int32: (source rank, token) of the rows received
    recv_count: torch.Tensor  # [1] int32
    recv_per_source: torch.Tensor  # [world_size] int32: rows received from each rank; they lie in this order
    sent_per_rank: torch.Tensor  # [world_size] int32: rows sent to each rank
    first_rows: torch.Tensor  # [world_size] int32: where they start there
    cur_rank_num_token: int
    dispatch: int = 0  # its number in the op, by which ranks see that they replay the same; 0: not told
    op_number: int = 0  # of the op that made it; its maps mean nothing to another
    inter_node_disp_send_map: torch.Tensor | None = None  # [n, nodes] int32, across nodes only
    inter_node_disp_dest_tok_id_map: torch.Tensor | None = None  # [nodes * max tokens, k] int32
