"""What copy engines carry around a fused kernel: which runs of bytes, in which order, behind which flags.

A transfer is queued before the kernel: wait until the band's trigger is 1, copy, set the peers' flags.
Nothing in it depends on the call, so the same list serves every call of a shape, eagerly and in captured
graphs. The triggers are cleared at the end of the call, all at once: one by one, behind each copy, they cost
2.5 us a band.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mori_gemm_ar.targets.cuda.regions import HALF_BYTES, Q_BYTES, Regions


class Transfer(NamedTuple):
    """One band on its way to one peer, or a finished one to all."""

    trigger: int  # address of the word that the kernel sets
    copies: tuple[tuple[int, int, int], ...]  # (dst, src, nbytes)
    flags: tuple[int, ...]  # addresses of words at the peers, set behind the copies


class Bands(NamedTuple):
    """How a call's rows are cut; see params.cuh."""

    start: Sequence[int]  # first row of each owner's slice, and the end
    tile_rows: int
    band: int  # row blocks of a band
    bands: int  # of the longest slice
    lag: int

    def rows(self, owner: int, band: int) -> tuple[int, int]:
        """(first row within the slice, rows), none past the end."""
        height, first = self.start[owner + 1] - self.start[owner], band * self.band * self.tile_rows
        return first, max(0, min(height - first, self.band * self.tile_rows))


class Copies:
    """All transfers of one shape on one rank."""

    def __init__(
        self,
        bands: Bands,
        rank: int,
        bases: Sequence[int],
        regions: Regions,
        *,
        scatters: bool,
        gathers: bool,
        fp8: bool,
    ) -> None:
        self._bands, self._rank, self._bases, self._regions = bands, rank, bases, regions
        self._scatters, self._gathers, self._fp8 = scatters, gathers, fp8
        self._others = [(rank + d) % len(bases) for d in range(1, len(bases))]

    def in_order(self) -> Iterator[Transfer]:
        """As the kernel finishes bands: remote band i, then the local one that is `lag` behind."""
        bands = self._bands
        for i in range(bands.bands + bands.lag):
            if i < bands.bands and self._scatters:
                for owner in self._others:
                    yield from self._scatter_of(owner, i)
            if i >= bands.lag and self._gathers:
                yield from self._gather_of(i - bands.lag)

    def _scatter_of(self, owner: int, band: int) -> Iterator[Transfer]:
        first, rows = self._bands.rows(owner, band)
        if rows:
            at, mine, theirs = self._regions, self._bases[self._rank], self._bases[owner]
            offset, nbytes = self._tile_bytes(first, rows, HALF_BYTES)
            copy = (
                theirs + at.slot("inbox", self._rank) + offset,
                mine + at.slot("staging", owner) + offset,
                nbytes,
            )
            trigger, flag = at.flag("ready", owner), at.flag("arrived_t", self._rank)
            yield Transfer(mine + trigger + 4 * band, (copy,), (theirs + flag + 4 * band,))

    def _gather_of(self, band: int) -> Iterator[Transfer]:
        first, rows = self._bands.rows(self._rank, band)
        if not rows:
            return
        at, mine = self._regions, self._bases[self._rank]
        if self._fp8:
            offset, nbytes = self._tile_bytes(first, rows, Q_BYTES)
            source, landing = at.slot("q_staging") + offset, at.slot("q_inbox", self._rank) + offset
        else:
            source = at.offsets["out"] + (self._bands.start[self._rank] + first) * at.n * 2
            landing, nbytes = source, rows * at.n * 2
        peers = [self._bases[peer] for peer in self._others]
        flag = at.flag("gathered_t", self._rank) + 4 * band
        yield Transfer(
            mine + at.flag("finished") + 4 * band,
            tuple((theirs + landing, mine + source, nbytes) for theirs in peers),
            tuple(theirs + flag for theirs in peers),
        )

    def _tile_bytes(self, first: int, rows: int, half_bytes: int) -> tuple[int, int]:
        """(offset, bytes) in a slot of tiles."""
        tile_rows = self._bands.tile_rows
        row_of_tiles = tile_rows // 64 * (-(-self._regions.n // 256) * 2) * half_bytes
        return first // tile_rows * row_of_tiles, -(-rows // tile_rows) * row_of_tiles
