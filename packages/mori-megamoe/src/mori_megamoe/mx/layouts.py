"""Where the bytes of weights and scales lie: five closed forms, there and back.

Weights and their scales come preshuffled, the way the tiles of a 16 x 16 x 128 matrix instruction read them.
Each class below is one such form over one logical tensor of bytes:

    form              logical shape            blocks
    W1Bytes           [2I, D / 2], gate first  16 rows of gate, the same 16 of up, and so on; 1024-byte pieces
    W1Scales          [2I, D / 32]             256-byte pieces: 8 columns of 16 rows of gate and up
    W2Bytes           [D, I / 2]               16 rows; 1024-byte pieces
    W2Scales          [D, I / 32]              256-byte pieces: 8 columns of 32 rows
    ActivationScales  [rows, columns]          as W2Scales, rows of a tile

`offset(row, column)` is the closed form, for ints and for tensors of them; `shuffle` and `unshuffle` move a
logical tensor to its form and back, any number of experts in front. Columns of scales are padded to a
multiple of 8 with 0x7F (the factor 1).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import torch
from mori_shmem.errors import LayoutError

N = TypeVar("N", int, torch.Tensor)

PAD_SCALE = 0x7F


def padded_columns(columns: int) -> int:
    """Columns of a matrix of scales with its padding."""
    return -(-columns // 8) * 8


@dataclass(frozen=True)
class Layout(ABC):
    """One expert's logical matrix of bytes [rows, columns] and where each byte is stored."""

    rows: int
    columns: int

    @abstractmethod
    def offset(self, row: N, column: N) -> N:
        """Where the byte of this row and (maybe padded) column is."""

    @property
    def stored_columns(self) -> int:
        return self.columns

    @property
    def stored_rows(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        return self.stored_rows * self.stored_columns

    def shuffle(self, logical: torch.Tensor) -> torch.Tensor:
        """uint8 [..., rows, columns] -> [..., nbytes]."""
        if tuple(logical.shape[-2:]) != (self.rows, self.columns) or logical.dtype != torch.uint8:
            raise LayoutError(
                f"{logical.dtype} {tuple(logical.shape)} to be shuffled: uint8 [..., {self.rows}, "
                f"{self.columns}] is needed"
            )
        whole = torch.full(
            (*logical.shape[:-2], self.stored_rows, self.stored_columns),
            PAD_SCALE,
            dtype=torch.uint8,
            device=logical.device,
        )
        whole[..., : self.rows, : self.columns] = logical
        stored = torch.empty_like(whole).flatten(-2)
        stored[..., _offsets(self, logical.device)] = whole.flatten(-2)
        return stored

    def unshuffle(self, stored: torch.Tensor) -> torch.Tensor:
        """uint8 [..., nbytes] -> [..., rows, columns]."""
        if tuple(stored.shape[-1:]) != (self.nbytes,) or stored.dtype != torch.uint8:
            raise LayoutError(
                f"{stored.dtype} {tuple(stored.shape)} to be unshuffled: uint8 [..., {self.nbytes}] is needed"
            )
        whole = stored[..., _offsets(self, stored.device)]
        whole = whole.view(*stored.shape[:-1], self.stored_rows, self.stored_columns)
        return whole[..., : self.rows, : self.columns]


@functools.lru_cache(
    maxsize=8
)  # one layer's forms; those of w1 are the largest, 8 bytes per byte of an expert
def _offsets(layout: Layout, device: torch.device) -> torch.Tensor:
    """[stored rows * stored columns]: where each byte of the padded matrix goes, row by row."""
    row = torch.arange(layout.stored_rows, device=device)[:, None]
    column = torch.arange(layout.stored_columns, device=device)[None, :]
    return layout.offset(row, column).flatten()


def _piece_of_bytes(row: N, byte: N) -> N:
    """Inside 1024 bytes: 16 rows of 64 bytes, in columns of 16 bytes."""
    return byte % 64 // 16 * 256 + row % 16 * 16 + byte % 16


def _piece_of_scales(row: N, column: N, half: N) -> N:
    """Inside 256 bytes: two halves of 16 rows, 8 columns."""
    return column % 4 * 64 + row % 16 * 4 + column // 4 % 2 * 2 + half


@dataclass(frozen=True)
class W1Bytes(Layout):
    """Rows 0 .. I-1 are gate, I .. 2I-1 up; columns are bytes of two codes."""

    def offset(self, row: N, column: N) -> N:
        inter = self.rows // 2
        g, j = row // inter, row % inter
        piece = (j // 16 * 2 + g) * (self.columns // 64) + column // 64
        return piece * 1024 + _piece_of_bytes(j, column)


class _Scales(Layout):
    @property
    def stored_columns(self) -> int:
        return padded_columns(self.columns)


@dataclass(frozen=True)
class W1Scales(_Scales):
    """Rows as W1Bytes."""

    def offset(self, row: N, column: N) -> N:
        inter = self.rows // 2
        g, j = row // inter, row % inter
        piece = j // 16 * (self.stored_columns // 8) + column // 8
        return piece * 256 + _piece_of_scales(j, column, g)


@dataclass(frozen=True)
class W2Bytes(Layout):
    """Columns are bytes of two codes."""

    def offset(self, row: N, column: N) -> N:
        piece = row // 16 * (self.columns // 64) + column // 64
        return piece * 1024 + _piece_of_bytes(row, column)


@dataclass(frozen=True)
class W2Scales(_Scales):
    """Rows are padded to a multiple of 32."""

    @property
    def stored_rows(self) -> int:
        return -(-self.rows // 32) * 32

    def offset(self, row: N, column: N) -> N:
        piece = row // 32 * (self.stored_columns // 8) + column // 8
        return piece * 256 + _piece_of_scales(row, column, row // 16 % 2)


@dataclass(frozen=True)
class ActivationScales(W2Scales):
    """The scales of rows of activations, as Stage2 reads them."""
