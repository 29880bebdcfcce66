# mypy: disable-error-code="import-untyped, no-untyped-call"
"""One operand's way from memory through LDS into registers, 128 k at a time.

LDS holds two stages of a panel: rows of 128 bytes, the next stage filled by DMA while the last one is read.
A DMA instruction of a wave fills 8 rows, lane l the 16 bytes at 16 * l. Where they come from is each lane's
own choice, so the permutation that keeps LDS banks apart happens there: the 16-byte piece p of a row lies at
place p ^ key. Lane l = 16 * g + r of a fragment reads pieces g and g + 4 of "its" row, whose key is r % 8:
eight rows that are read together have their pieces in eight different places.

Which row is lane r's? For A, row 16 * i + r of the wave's rows in fragment i. For B, fragment j,
    column(j, r) = 32 * (j // 2) + 8 * (r // 4) + 4 * (j % 2) + r % 4
so that the results of fragments j and j + 1 together are 8 neighbouring columns in each lane, and four lanes
hold 32 columns: a row of C is stored in pieces of 64 bytes without another exchange between lanes.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from mori_shmem.device.flydsl.bounded import bounded

from mori_gemm_ar.targets.rocm.gemm_device import BLOCK, load_into_lds, shared_pointer
from mori_gemm_ar.targets.rocm.tiles import larger, smaller

DMA_ROWS = 8  # that one DMA instruction of a wave fills
PIECE = 16  # bytes of a row that one lane moves


class Panel:
    """The rows of A, or of B, that a workgroup multiplies."""

    def __init__(self, lds_address: Any, tile_rows: int, num_waves: int, *, columns_of_c: bool) -> None:
        self._at, self._rows, self._is_b = lds_address, tile_rows, columns_of_c
        self._dma_per_wave = tile_rows // (DMA_ROWS * num_waves)
        self.stage_bytes = tile_rows * BLOCK

    def open(self, address: Any, pitch: Any, row0: Any, rows: Any, k: Any, wave: Any, lane: Any) -> None:
        """Prepare the DMA of rows row0 .. of a matrix with `rows` rows of k, `pitch` bytes apart.

        Each DMA instruction has a descriptor of its own eight rows: scalar registers are plenty, and all of a
        wave's instructions then share their lanes' offsets.
        """
        self._wave_row = wave * (self._dma_per_wave * DMA_ROWS)
        self._sources = []
        for i in range(self._dma_per_wave):
            first = row0 + self._wave_row + i * DMA_ROWS
            here = larger(smaller(rows - first, DMA_ROWS), 0)
            nbytes = smaller(here, 1) * k + larger(here - 1, 0) * pitch
            self._sources.append(bounded(address + fx.Int64(first) * fx.Int64(pitch), nbytes))
        row = lane // 8
        self._offsets = [row * pitch + (lane % 8 ^ key) * PIECE for key in self._keys(row)]

    def _keys(self, row: Any) -> list[Any]:
        """Of row `row` of a group of eight: what a fragment's lane knows as r % 8. For B groups alternate."""
        if not self._is_b:
            return [row]
        if self._dma_per_wave == 1:
            return [row % 4 | (self._wave_row // DMA_ROWS) % 2 * 4]
        return [row % 4, row % 4 | 4]

    def fetch(self, column: Any, stage: Any) -> None:
        """Start this wave's share of the DMA of 128 k from k = column on."""
        start = self._at + stage * self.stage_bytes + self._wave_row * BLOCK
        moved = [offset + column for offset in self._offsets]
        for i, source in enumerate(self._sources):
            load_into_lds(source, moved[i % len(moved)], start + i * DMA_ROWS * BLOCK, PIECE)

    def face(self, first_row: Any, lane: Any) -> None:
        """Prepare reading fragments of the wave's rows, from first_row (of the tile) on."""
        r, g = lane % 16, lane // 16
        row = first_row + (r // 4 * 8 + r % 4 if self._is_b else r)
        self._piece = [self._at + row * BLOCK + ((g + 4 * half) ^ (r % 8)) * PIECE for half in (0, 1)]

    def fragment(self, index: int, stage: Any) -> Any:
        """32 codes of this lane's row: eight words."""
        first = 32 * (index // 2) + 4 * (index % 2) if self._is_b else 16 * index
        halves = [
            fx.generic_load(
                shared_pointer(fx.Int32, piece + stage * self.stage_bytes + first * BLOCK, 16), count=4
            )
            for piece in self._piece
        ]
        return halves[0].shuffle(halves[1], list(range(8)))
