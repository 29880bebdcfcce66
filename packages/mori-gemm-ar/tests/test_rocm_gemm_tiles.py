"""Which tile which workgroup computes. Pure integers: no GPU, no FlyDSL."""

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(importlib.util.find_spec("mori_gemm_ar").origin).parent / "targets" / "rocm" / "tiles.py"
_SPEC = importlib.util.spec_from_file_location("rocm_tiles", _PATH)  # the target's package imports flydsl
tiles = sys.modules["rocm_tiles"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiles)

SHAPE = tiles.TileShape(256, 256, 2)


def test_a_chunk_is_spread_so_that_an_xcd_has_neighbours():
    for count in range(1, 60):
        for start in range(20):
            places = [tiles.spread(i, start, count) for i in range(count)]
            assert sorted(places) == list(range(count))
            xcd_of = dict(zip(places, ((start + i) % 8 for i in range(count)), strict=True))
            assert [xcd_of[place] for place in range(count)] == sorted(xcd_of.values())


@pytest.mark.parametrize("m", [1, 255, 1000, 2048])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 2])
def test_every_element_is_computed_once(m, num_ranks, chunks):
    n, slice_rows = 520, -(-m // num_ranks)  # 520: a third column of tiles with 8 columns in it
    bands = chunks * -(-slice_rows // (chunks * 256))
    cut = tiles.Slices(
        m, num_ranks // 2, num_ranks, slice_rows, bands, -(-slice_rows // bands), bands // chunks
    )
    seen = set()
    for index in range(cut.num_tiles(3)):
        tile = tiles.tile_at(index, cut, SHAPE, n)
        assert tile.rows <= SHAPE.rows
        assert tile.col0 in (0, 256, 512)
        rows = range(tile.row0, tile.row0 + tile.rows)
        assert all(row // slice_rows == tile.owner for row in rows)
        new = {(row, tile.col0) for row in rows}
        assert not seen & new
        seen |= new
    assert len(seen) == 3 * m


def test_remote_slices_come_first_chunk_by_chunk_and_the_own_one_last():
    cut = tiles.Slices(2048, 2, 4, 512, 2, 256, 1)
    order = [tiles.tile_at(index, cut, SHAPE, 256) for index in range(cut.num_tiles(1))]
    assert [(t.owner, t.chunk) for t in order] == [
        (3, 0),
        (0, 0),
        (1, 0),
        (3, 1),
        (0, 1),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
