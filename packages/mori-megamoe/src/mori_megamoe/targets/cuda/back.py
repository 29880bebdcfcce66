"""From a rank's hidden rows to its tokens' output: memory and arguments of the three kernels behind Stage1
(hidden.cu, gemm2.cu, combine.cu). Nothing here touches a driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from mori_megamoe.targets.cuda.gemm1 import Buffers, params_of
from mori_megamoe.targets.cuda.layout import Shape
from mori_megamoe.targets.cuda.memory import Place
from mori_megamoe.targets.cuda.params import (
    COUNT_WORDS,
    BackParams,
    CombineParams,
    Gemm1Params,
    HiddenParams,
    RowsParams,
)
from mori_megamoe.targets.cuda.tiles import TileArrays
from mori_megamoe.targets.cuda.weights import PreparedWeights


@dataclass(frozen=True)
class Back:
    """One rank's way back, for kernels."""

    place: Place
    tiles: TileArrays  # GEMM2's: GEMM1's tiles, whose inputs are its outputs, with items of its own
    hidden: Buffers  # GEMM1's
    rows: torch.Tensor  # [rows, I] uint8 e4m3 (R) or bf16 (A): hidden rows as GEMM2 reads them
    row_scale: torch.Tensor | None  # R: [rows] uint8
    output: torch.Tensor  # [max_tokens, D] bf16

    @classmethod
    def empty(cls, place: Place, hidden: Buffers) -> Back:
        """Zeros."""
        shape, device, planned = place.shape, hidden.out.device, place.local.tiles

        def zeros(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        is_r = shape.body == "R"
        return cls(
            place,
            TileArrays(
                zeros(COUNT_WORDS, dtype=torch.int32),
                zeros(shape.max_tiles * shape.back_pairs, dtype=torch.int32),
                *(planned.expert, planned.row_base, planned.row_base, planned.sources),
            ),
            hidden,
            zeros(shape.rows, shape.inter_dim, dtype=torch.uint8 if is_r else torch.bfloat16),
            zeros(shape.rows, dtype=torch.uint8) if is_r else None,
            zeros(shape.max_tokens, shape.model_dim, dtype=torch.bfloat16),
        )

    @property
    def shape(self) -> Shape:
        return self.place.shape

    @property
    def buffers(self) -> Buffers:
        """What GEMM2 reads. It has no output here."""
        return Buffers(self.rows, self.row_scale, self.hidden.out)

    def hidden_params(self) -> tuple[HiddenParams, RowsParams]:
        """Of `hidden`, which finds the number of rows on the device."""
        assert self.hidden.scales is not None
        return (
            HiddenParams(
                nbytes=ctypes.sizeof(HiddenParams),
                pairs=self.shape.back_pairs,
                tiles=self.place.local.tiles.struct(),
                counts=self.tiles.counts.data_ptr(),
                items=self.tiles.items.data_ptr(),
            ),
            RowsParams(
                nbytes=ctypes.sizeof(RowsParams),
                hidden=self.shape.inter_dim,
                input=self.hidden.out.data_ptr(),
                scales=self.hidden.scales.data_ptr(),
                rows=self.rows.data_ptr(),
                row_scale=None if self.row_scale is None else self.row_scale.data_ptr(),
            ),
        )

    def gemm2_params(self, weights: PreparedWeights) -> tuple[Gemm1Params, BackParams]:
        """Of `gemm2`, but for its tensor maps."""
        shape = self.shape
        back = BackParams(
            nbytes=ctypes.sizeof(BackParams),
            world=shape.world_size,
            rank=self.place.rank,
            max_tokens=shape.max_tokens,
            top_k=shape.topk,
            model_dim=shape.model_dim,
            pitch=shape.partial_bytes,
            landing=self.place.landing(),
        )
        return params_of(weights, self.buffers, self.tiles, limit=0.0), back

    def combine_params(self) -> CombineParams:
        """All but `ids` and `tokens`, which are a call's."""
        shape, place = self.shape, self.place
        return CombineParams(
            nbytes=ctypes.sizeof(CombineParams),
            world=shape.world_size,
            rank=place.rank,
            num_experts=shape.num_experts,
            top_k=shape.topk,
            model_dim=shape.model_dim,
            pitch=shape.partial_bytes,
            out=self.output.data_ptr(),
            counts=place.local.tiles.counts.data_ptr(),
            landing=place.landing(),
            fault=place.fault,
            timeout_ns=place.timeout_ns,
        )
