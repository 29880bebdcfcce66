"""Received rows laid out by expert, and back: the layout of grouped GEMMs with a fixed number of rows per
expert.

    packed [experts of this rank, recv capacity, hidden]: expert e's rows lie at packed[e, :count[e]], in the
    order of the rows received. A row that several experts of this rank want is there for each of them.
"""

from __future__ import annotations

import torch
from mori_shmem.device.rows import RowCode, SlotMap, group_slots, scatter_rows, sum_rows
from mori_shmem.errors import ArgumentError

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.targets.host.limits import KINDS


class ExpertRows:
    """The layout of the last dispatch for which it was asked. Memory comes with the first use and stays."""

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self._config = config
        rows, experts = config.recv_capacity, config.num_experts_per_rank
        self._slots = torch.empty(rows, config.num_experts_per_token, dtype=torch.int32)
        self._payload = torch.empty(experts * rows * config.row_bytes, dtype=torch.uint8)
        self._scales = torch.empty(experts * rows * config.scale_bytes, dtype=torch.uint8)
        self._positions = torch.empty(experts, rows, dtype=torch.int32)
        self._count = torch.zeros(experts, dtype=torch.int32)
        self._ids: torch.Tensor | None = None
        self._num_rows = 0

    def _map(self) -> SlotMap:
        return SlotMap(
            self._slots.data_ptr(),
            self._num_rows,
            self._config.num_experts_per_token,
            self._config.recv_capacity,
            -1,
        )

    def spread(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        scales: torch.Tensor | None,
        positions: torch.Tensor,
        num_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """(packed rows, packed scales, rows of each expert, source positions)."""
        config = self._config
        experts, capacity = config.num_experts_per_rank, config.recv_capacity
        self._num_rows, self._ids = num_rows, ids
        counts = group_slots(ids.data_ptr(), self._map(), config.rank * experts, 1, experts)
        parts = [(rows, self._payload), (positions, self._positions)]
        if scales is not None:
            parts.append((scales, self._scales))
        fields = [(source.data_ptr(), source.stride(0) * source.dtype.itemsize) for source, _ in parts]
        targets = [
            [
                to.data_ptr() + e * capacity * row_bytes
                for (_, to), (_, row_bytes) in zip(parts, fields, strict=True)
            ]
            for e in range(experts)
        ]
        scatter_rows(self._map(), fields, targets)
        self._count.copy_(torch.tensor(counts, dtype=torch.int32))
        packed = _as(self._payload, (experts, capacity, rows.shape[1]), rows.dtype)
        packed_scales = (
            None if scales is None else _as(self._scales, (experts, capacity, scales.shape[1]), scales.dtype)
        )
        return packed, packed_scales, self._count, self._positions

    def gather(self, packed: torch.Tensor, weights: torch.Tensor | None, into: torch.Tensor) -> None:
        """into[row] = sum over the row's experts here of weight * packed row, in slot order."""
        config, ids = self._config, self._ids
        experts, capacity = config.num_experts_per_rank, config.recv_capacity
        hidden = into.shape[1]
        if ids is None or tuple(packed.shape) != (experts, capacity, hidden) or not packed.is_contiguous():
            raise ArgumentError(
                f"rows by expert are {tuple(packed.shape)}, strides {packed.stride()}: a contiguous "
                f"{(experts, capacity, hidden)} is needed"
            )
        pitch = hidden * packed.dtype.itemsize
        kind = KINDS[packed.dtype]
        tables = [packed.data_ptr() + e * capacity * pitch for e in range(experts)]
        factors = (0, 0) if weights is None else (weights.data_ptr(), ids.data_ptr())
        sum_rows(into.data_ptr(), kind, self._map(), tables, pitch, RowCode(kind, hidden), *factors)


def _as(memory: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    nbytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
    return memory[:nbytes].view(dtype).view(shape)
