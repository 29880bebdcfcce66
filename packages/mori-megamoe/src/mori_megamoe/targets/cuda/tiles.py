"""The plan of a call on its receiving side as the GEMM reads it: a few arrays on the device.

The device makes it itself (plan.cuh). `of_plan` makes the same out of tiles that a host planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from mori_megamoe.targets.cuda.params import COUNT_WORDS, NUM_ITEMS, NUM_ROWS, NUM_TILES, PAIR_BIT, Tiles


class HostTile(NamedTuple):
    """Rows of one expert."""

    expert: int  # local
    row_base: int
    input_base: int
    sources: int = 0  # bit s: rows of source s are in it


@dataclass(frozen=True)
class TileArrays:
    """int32 each; see params.cuh."""

    counts: torch.Tensor  # [COUNT_WORDS]
    items: torch.Tensor  # [tiles * pairs]
    expert: torch.Tensor  # [tiles]
    row_base: torch.Tensor
    input_base: torch.Tensor
    sources: torch.Tensor

    @classmethod
    def empty(cls, max_tiles: int, pairs: int, device: torch.device | str) -> TileArrays:
        """Zeros, for the device to fill."""

        def words(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(words(COUNT_WORDS), words(max_tiles * pairs), *[words(max_tiles) for _ in range(4)])

    @classmethod
    def of_plan(
        cls, tiles: Sequence[HostTile], pairs: int, tile_rows: int, device: torch.device | str
    ) -> TileArrays:
        """Of tiles in the order of experts."""
        counts = [0] * COUNT_WORDS
        counts[NUM_ITEMS], counts[NUM_TILES] = len(tiles) * pairs, len(tiles)
        counts[NUM_ROWS] = len(tiles) * tile_rows
        columns = [[tile[i] for tile in tiles] for i in range(4)]
        return cls(
            *[
                torch.tensor(values, dtype=torch.int32, device=device)
                for values in (counts, list(items_of(tiles, pairs)), *columns)
            ]
        )

    def struct(self) -> Tiles:
        """Their addresses."""
        arrays = (self.counts, self.items, self.expert, self.row_base, self.input_base, self.sources)
        return Tiles(*[array.data_ptr() for array in arrays])


def items_of(tiles: Sequence[HostTile], pairs: int) -> Iterator[int]:
    """Experts in order, and in an expert the tile fastest: its weights are then read from memory about
    once."""
    for _, group in groupby(enumerate(tiles), key=lambda numbered: numbered[1].expert):
        numbers = [number for number, _ in group]
        for pair in range(pairs):
            yield from (number | pair << PAIR_BIT for number in numbers)
