"""The part of an op that lays rows out by expert, for expert kernels that want each expert's rows together.

    packed, num_rows, positions, _ = op.dispatch_standard_moe(x, weights, None, expert_ids)
    ...                                        # packed[e, :num_rows[e]]: apply my e-th expert
    out, _ = op.combine_standard_moe(packed, None, expert_ids)

or step by step, with calls of the op's own: dispatch, `convert_dispatch_output`, experts,
`convert_combine_input`, combine. A row that goes to two experts of this rank stands twice in `packed`; on the
way back its expert's rows are multiplied by their weights and added up.

The layout is that of one dispatch: what the next one brings is laid out anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError

from mori_ep import checks
from mori_ep.arguments import check_geometry_options
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.prepared import Combined
from mori_ep.targets import Runner
from mori_ep.turns import Turn

Packed = tuple[
    torch.Tensor,  # rows by expert [experts of this rank, recv capacity, hidden]
    torch.Tensor,  # rows of each expert [experts of this rank] int32
    torch.Tensor,  # their source positions [experts of this rank, recv capacity] int32
    torch.Tensor,  # empty int64, in the place of ranges that this layout does not need
]


class StandardMoe(ABC):
    """What EpDispatchCombineOp, its only child, can do besides dispatch and combine."""

    config: EpDispatchCombineConfig
    comm: mori_shmem.Communicator
    packed_recv_scales: torch.Tensor | None  # [experts of this rank, recv capacity, scale_dim], of the layout
    _runner: Runner
    _turns: Mapping[str, Turn]
    _half: str | None  # the second half that is due

    @abstractmethod
    def dispatch(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def combine(self, *args: Any, **kwargs: Any) -> Combined: ...

    @abstractmethod
    def get_registered_combine_input_buffer(
        self, dtype: torch.dtype, hidden_dim: int = -1
    ) -> torch.Tensor: ...

    @abstractmethod
    def _check_usable(self) -> None: ...

    def _construct_standard_moe(self) -> None:
        self.packed_recv_scales = None
        self._num_dispatches = 0
        self._came_with: torch.Tensor | None = None  # the weights of the last dispatch_standard_moe
        self._spread_of = -1  # the dispatch whose rows were laid out by expert last
        self._spread_rows = 0  # that it needed
        self._spread_ids: torch.Tensor | None = None  # kept: the way back reads them
        self._no_ranges = torch.empty(0, dtype=torch.int64, device=self.comm.device)

    def _count_dispatch(self) -> None:
        """The layout is not that of the last dispatch any more."""
        self._num_dispatches += 1
        self._came_with = None

    # ---- both ways at once ----

    def dispatch_standard_moe(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Packed:
        """`dispatch`, and its rows laid out by expert. Collective. The weights that came along are kept for
        `combine_standard_moe`, the scales are in `packed_recv_scales`."""
        rows, came, scale, ids, _ = self.dispatch(
            input, weights, scales, indices, block_num, rdma_block_num, warp_per_block
        )
        self._came_with = came if weights is not None else None
        return self._packed(rows, ids, scale)

    def combine_standard_moe(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Combined:
        """The way back of `dispatch_standard_moe`: every expert's row times its weight, added up here, then
        `combine`. Collective.

        input    # [experts of this rank, recv capacity, hidden]
        weights  # as for `combine`: sums of weights that are wanted besides; usually None
        """
        self._turns["combine"].check()
        self._check_spread_is_last()
        rows = self.convert_combine_input(input, weights=self._came_with)
        return self.combine(
            rows, weights, indices, block_num, rdma_block_num, warp_per_block, use_external_inp_buf=0
        )

    # ---- step by step ----

    def convert_dispatch_output(
        self,
        dispatch_out_x: torch.Tensor,
        dispatch_out_topk_idx: torch.Tensor,
        *,
        dispatch_out_scales: torch.Tensor | None = None,
        **geometry: int,
    ) -> Packed:
        """The rows of the last dispatch, laid out by expert: the tensors are those that it returned. With its
        scales, theirs are in `packed_recv_scales`. Between the halves of a dispatch: what will be filled."""
        check_geometry_options(geometry)
        return self._packed(dispatch_out_x, dispatch_out_topk_idx, dispatch_out_scales)

    def convert_combine_input(
        self,
        packed_recv_x: torch.Tensor,
        packed_recv_src_info: torch.Tensor | None = None,
        packed_recv_layout_range: torch.Tensor | None = None,
        *,
        weights: torch.Tensor | None = None,
        **geometry: int,
    ) -> torch.Tensor:
        """The way back: [recv capacity, hidden] in the registered buffer, for `combine` with
        use_external_inp_buf=0. Every expert's row is multiplied by its slot in `weights`, those that dispatch
        returned; without them rows are added as they are."""
        self._check_usable()
        check_geometry_options(geometry)
        if self._half == "combine_recv":
            raise ArgumentError(
                "convert_combine_input between the halves of a combine: it fills the buffer whose rows are "
                "on their way. Call combine_recv first"
            )
        checks.check_packed(self.config, self.comm.device, packed_recv_x)
        if weights is not None:
            checks.check_factors(self.config, self.comm.device, weights, self._spread_rows)
        into = self.get_registered_combine_input_buffer(packed_recv_x.dtype, packed_recv_x.shape[2])
        self._runner.from_experts(packed_recv_x, weights, into)
        return into

    def _packed(self, rows: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None) -> Packed:
        self._check_usable()
        needed = self._rows_needed()
        checks.check_spread(self.config, self.comm.device, rows, ids, scales, needed)
        packed, packed_scales, count, positions = self._runner.to_experts(rows, ids, scales)
        self._spread_of, self._spread_rows, self._spread_ids = self._num_dispatches, needed, ids
        self.packed_recv_scales = packed_scales
        return packed, count, positions, self._no_ranges

    def _rows_needed(self) -> int:
        """Rows that whoever reads the last dispatch's may look at. A device is not waited for: all."""
        on_host = self.comm.device.type == "cpu"
        return self._runner.received_rows() if on_host else self.config.recv_capacity

    def _check_spread_is_last(self) -> None:
        if self._spread_of not in (-1, self._num_dispatches):
            raise ArgumentError(
                f"combine_standard_moe after dispatch {self._num_dispatches} of this op, but the rows by "
                f"expert are of dispatch {self._spread_of}: combine them before the next dispatch, or lay "
                "out the rows of that one (dispatch_standard_moe, convert_dispatch_output)"
            )
