"""Received rows laid out by expert, and back (experts.cu): the layout of grouped GEMMs with a fixed number
of rows an expert. Two small kernels there, one back, on the caller's stream."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_void_p

import torch
from mori_shmem.errors import ArgumentError
from mori_shmem.jit import build, driver

from mori_ep.targets.cuda.place import Place, checked_module
from mori_ep.targets.cuda.variants import experts_variant

_THREADS = 256
_WARPS = _THREADS // 32


class ExpertParams(ctypes.Structure):
    """`ExpertParams` of experts.cu."""

    _fields_ = [
        *[(name, c_void_p) for name in ("ids", "count", "positions")],
        *[(name, c_int) for name in ("top_k", "first_expert", "num_experts", "capacity")],
        *[(name, c_void_p) for name in ("slots", "counts", "packed_positions")],
        *[(name, c_void_p) for name in ("payload", "scales", "packed", "packed_scales")],
        *[(name, c_int) for name in ("payload_units", "scale_bytes")],
        *[(name, c_void_p) for name in ("weights", "into")],
    ]


@functools.cache
def _module(device: int, dtype: torch.dtype) -> driver.Module:
    return checked_module(build(experts_variant(dtype)), "expert_params_bytes", ctypes.sizeof(ExpertParams))


class ExpertRows:
    """The layout of the last dispatch for which it was asked. Memory comes with the first use and stays."""

    def __init__(self, place: Place) -> None:
        config = self._config = place.config
        self._place = place
        rows, experts = config.recv_capacity, config.num_experts_per_rank
        with torch.cuda.device(place.device):
            self._slots = torch.empty(rows, config.num_experts_per_token, dtype=torch.int32, device="cuda")
            self._payload = torch.empty(experts * rows * config.row_bytes, dtype=torch.uint8, device="cuda")
            self._scales = torch.empty(experts * rows * config.scale_bytes, dtype=torch.uint8, device="cuda")
            self._positions = torch.empty(experts, rows, dtype=torch.int32, device="cuda")
            self._count = torch.zeros(experts, dtype=torch.int32, device="cuda")
        self._ids = 0

    def _params(self, hidden_bytes: int) -> ExpertParams:
        config, layout, place = self._config, self._place.layout, self._place
        return ExpertParams(
            ids=self._ids,
            count=place.mine(layout.recv_count),
            positions=place.mine(layout.out_positions),
            top_k=config.num_experts_per_token,
            first_expert=config.rank * config.num_experts_per_rank,
            num_experts=config.num_experts_per_rank,
            capacity=config.recv_capacity,
            slots=self._slots.data_ptr(),
            counts=self._count.data_ptr(),
            packed_positions=self._positions.data_ptr(),
            payload_units=hidden_bytes // 16,
        )

    def _run(self, dtype: torch.dtype, name: str, grid: int, params: ExpertParams, stream: int) -> None:
        function = _module(self._place.device, dtype).function(name)
        driver.PreparedLaunch(function, grid, _THREADS, [params]).launch(stream)

    def spread(
        self, rows: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """(packed rows, packed scales, rows of each expert, source positions)."""
        config = self._config
        experts, capacity = config.num_experts_per_rank, config.recv_capacity
        self._ids = ids.data_ptr()
        params = self._params(rows.shape[1] * rows.dtype.itemsize)
        params.payload, params.packed = rows.data_ptr(), self._payload.data_ptr()
        if scales is not None:
            params.scales, params.packed_scales = scales.data_ptr(), self._scales.data_ptr()
            params.scale_bytes = scales.shape[1] * scales.dtype.itemsize
        self._run(torch.bfloat16, "place_by_expert", -(-experts // _WARPS), params, stream)
        self._run(torch.bfloat16, "spread_rows", self._place.blocks, params, stream)
        packed = _as(self._payload, (experts, capacity, rows.shape[1]), rows.dtype)
        packed_scales = None
        if scales is not None:
            packed_scales = _as(self._scales, (experts, capacity, scales.shape[1]), scales.dtype)
        return packed, packed_scales, self._count, self._positions

    def gather(
        self, packed: torch.Tensor, weights: torch.Tensor | None, into: torch.Tensor, stream: int
    ) -> None:
        """into[row] = sum over the row's experts here of weight * packed row, in slot order."""
        config = self._config
        wanted = (config.num_experts_per_rank, config.recv_capacity, into.shape[1])
        if not self._ids or tuple(packed.shape) != wanted or not packed.is_contiguous():
            raise ArgumentError(
                f"rows by expert are {tuple(packed.shape)}, strides {packed.stride()}: a contiguous "
                f"{wanted} is needed"
            )
        params = self._params(into.shape[1] * into.dtype.itemsize)
        params.packed, params.into = packed.data_ptr(), into.data_ptr()
        params.weights = 0 if weights is None else weights.data_ptr()
        self._run(packed.dtype, "gather_rows", self._place.blocks, params, stream)


def _as(memory: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    nbytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
    return memory[:nbytes].view(dtype).view(shape)
