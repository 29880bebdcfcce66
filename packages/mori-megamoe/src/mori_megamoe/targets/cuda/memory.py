"""One rank's memory for Stage1, and the kernels' arguments that point into it. Nothing here touches a driver:
the same structs serve the kernels' emulation on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass

import torch

from mori_megamoe.targets.cuda.gemm1 import Buffers
from mori_megamoe.targets.cuda.layout import Shape, offsets_of
from mori_megamoe.targets.cuda.limits import MAX_RANKS
from mori_megamoe.targets.cuda.params import UNIT_BYTES, Arrivals, Landing, PlanParams, SendParams
from mori_megamoe.targets.cuda.tiles import TileArrays


@dataclass(frozen=True)
class Local:
    """What only this rank reads and writes."""

    tiles: TileArrays
    due: torch.Tensor  # int32 [experts, world]
    order: torch.Tensor  # int32 [max_tokens * topk]
    units: torch.Tensor  # uint8 [max_units * UNIT_BYTES]
    ready: torch.Tensor  # int64 [max_tiles]
    rows: torch.Tensor  # [max_tokens, D] operand rows of my tokens: uint8 or bf16
    row_scale: torch.Tensor  # uint8 [max_tokens]; body R

    @classmethod
    def empty(cls, shape: Shape, device: torch.device | str) -> Local:
        """Zeros."""

        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        kind = torch.uint8 if shape.body == "R" else torch.bfloat16
        return cls(
            TileArrays.empty(shape.max_tiles, shape.pairs, device),
            zeros(shape.experts, shape.world_size),
            zeros(shape.max_routes),
            zeros(shape.max_units * UNIT_BYTES, dtype=torch.uint8),
            zeros(shape.max_tiles, dtype=torch.int64),
            zeros(shape.max_tokens, shape.model_dim, dtype=kind),
            zeros(shape.max_tokens, dtype=torch.uint8),
        )


@dataclass(frozen=True)
class Landed:
    """Views of my part of the window."""

    rows: torch.Tensor  # [rows, D] uint8 or bf16
    row_scale: torch.Tensor  # [rows] uint8
    source: torch.Tensor  # [rows] int32
    weight: torch.Tensor  # [rows] fp32
    arrived: torch.Tensor  # [experts, world] int32
    counts: torch.Tensor  # [2, world, experts of all + 1] int32: of each source, by parity of the epoch
    partials: torch.Tensor  # [max_tokens * topk, partial_bytes] uint8; of Stage1 alone no rows

    @classmethod
    def of(cls, shape: Shape, part: torch.Tensor) -> Landed:
        """part  [bytes of offsets_of(shape)] uint8"""
        offsets, _ = offsets_of(shape)

        def view(name: str, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            nbytes = torch.Size(sizes).numel() * dtype.itemsize
            return part[offsets[name] : offsets[name] + nbytes].view(dtype).view(sizes)

        kind = torch.uint8 if shape.body == "R" else torch.bfloat16
        return cls(
            view("rows", kind, shape.rows, shape.model_dim),
            view("row_scale", torch.uint8, shape.rows),
            view("source", torch.int32, shape.rows),
            view("weight", torch.float32, shape.rows),
            view("arrived", torch.int32, shape.experts, shape.world_size),
            view("counts", torch.int32, 2, shape.world_size, shape.num_experts + 1),
            view("partials", torch.uint8, shape.max_routes if shape.partials else 0, shape.partial_bytes),
        )


@dataclass(frozen=True)
class Place:
    """One rank's Stage1, for kernels."""

    shape: Shape
    rank: int
    bases: Sequence[int]  # of each rank's part of the window, as mapped here
    local: Local
    landed: Landed
    fault: int  # address of the fault record
    timeout_s: float

    @property
    def timeout_ns(self) -> int:
        """At most what the kernels can count (publish_ready_tiles)."""
        return int(min(self.timeout_s, 4000.0) * 1e9)

    def landing(self) -> Landing:
        """All ranks' landing memory."""
        offsets, _ = offsets_of(self.shape)
        window = (c_void_p * MAX_RANKS)(*self.bases)
        return Landing(window=window, **{f"at_{name}": offset for name, offset in offsets.items()})

    def plan(self) -> PlanParams:
        """All but `ids` and `tokens`, which are a call's."""
        shape, local = self.shape, self.local
        return PlanParams(
            nbytes=ctypes.sizeof(PlanParams),
            world=shape.world_size,
            rank=self.rank,
            experts=shape.experts,
            max_tokens=shape.max_tokens,
            top_k=shape.topk,
            tile_rows=shape.tile_rows,
            pairs=shape.pairs,
            capacity=shape.rows,
            tiles=local.tiles.struct(),
            due=local.due.data_ptr(),
            order=local.order.data_ptr(),
            units=local.units.data_ptr(),
            landing=self.landing(),
            fault=self.fault,
            timeout_ns=self.timeout_ns,
        )

    def send(self, blocks: int, threads: int) -> SendParams:
        """All but `weights`, which are a call's. So many blocks send, with so many threads each."""
        shape, local = self.shape, self.local
        return SendParams(
            nbytes=ctypes.sizeof(SendParams),
            blocks=blocks,
            threads=threads,
            world=shape.world_size,
            rank=self.rank,
            experts=shape.experts,
            max_tokens=shape.max_tokens,
            top_k=shape.topk,
            row_units=shape.row_bytes // 16,
            has_scales=int(shape.body == "R"),
            rows=local.rows.data_ptr(),
            row_scale=local.row_scale.data_ptr(),
            order=local.order.data_ptr(),
            units=local.units.data_ptr(),
            counts=local.tiles.counts.data_ptr(),
            landing=self.landing(),
            due=local.due.data_ptr(),
            fault=self.fault,
            timeout_ns=self.timeout_ns,
        )

    def arrivals(self) -> Arrivals:
        """What a GEMM that waits looks at."""
        return Arrivals(
            arrived=self.landed.arrived.data_ptr(),
            due=self.local.due.data_ptr(),
            ready=self.local.ready.data_ptr(),
            timeout_ns=self.timeout_ns,
            fault=self.fault,
            world=self.shape.world_size,
            rank=self.rank,
            experts=self.shape.experts,
        )

    def buffers(self, *, sums: torch.Tensor | None = None) -> Buffers:
        """GEMM1's, with outputs of their own."""
        shape, device = self.shape, self.landed.rows.device

        def codes(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.uint8, device=device)

        columns = shape.inter_dim // 32
        return Buffers(
            self.landed.rows,
            self.landed.row_scale if shape.body == "R" else None,
            codes(shape.rows, shape.inter_dim),
            codes(shape.rows, columns),
            codes(shape.rows * columns),
            sums,
        )
