"""The five closed forms against permutations of blocks, written here without them, and back again."""

from __future__ import annotations

import pytest
import torch
from mori_megamoe import mx

WIDTHS = [(256, 256), (512, 256), (256, 512)]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(5), dtype=torch.uint8)


def rows_of_16(w: torch.Tensor) -> torch.Tensor:
    """[rows, bytes] -> 16 rows x 64 bytes a piece, in it columns of 16 bytes."""
    rows, nbytes = w.shape
    return w.view(rows // 16, 16, nbytes // 64, 4, 16).permute(0, 2, 3, 1, 4).reshape(rows // 16, -1)


def scales_of_32(s: torch.Tensor) -> torch.Tensor:
    """[rows, columns]: 32 rows x 8 columns a piece; 4 columns, 16 rows, 2 columns (4 apart), 2 halves of "
    "rows."""
    rows, columns = s.shape
    pieces = s.view(rows // 32, 2, 16, columns // 8, 2, 4)
    return pieces.permute(0, 3, 5, 2, 4, 1).reshape(-1)


def interleaved(w: torch.Tensor) -> torch.Tensor:
    """Gate over up -> 16 rows of gate, 16 of up, and so on."""
    rows, columns = w.shape
    return w.view(2, rows // 32, 16, columns).transpose(0, 1).reshape(rows, columns)


@pytest.mark.parametrize(("d", "i"), WIDTHS)
def test_w1_bytes(d: int, i: int) -> None:
    w = random_bytes(2 * i, d // 2)
    layout = mx.W1Bytes(2 * i, d // 2)
    assert torch.equal(layout.shuffle(w), rows_of_16(interleaved(w)).flatten())
    g, j, b = 1, 37, 70
    assert (
        layout.offset(g * i + j, b) == ((j // 16 * 2 + g) * (d // 128) + b // 64) * 1024 + 16 * (j % 16) + 6
    )


@pytest.mark.parametrize(("d", "i"), WIDTHS)
def test_w1_scales(d: int, i: int) -> None:
    s = random_bytes(2 * i, d // 32)
    assert torch.equal(mx.W1Scales(2 * i, d // 32).shuffle(s), scales_of_32(interleaved(s)))


@pytest.mark.parametrize(("d", "i"), WIDTHS)
def test_w2_bytes_and_scales(d: int, i: int) -> None:
    w, s = random_bytes(d, i // 2), random_bytes(d, i // 32)
    assert torch.equal(mx.W2Bytes(d, i // 2).shuffle(w), rows_of_16(w).flatten())
    assert torch.equal(mx.W2Scales(d, i // 32).shuffle(s), scales_of_32(s))


@pytest.mark.parametrize("columns", [8, 5, 9, 24])
@pytest.mark.parametrize("rows", [32, 64, 20])
def test_activation_scales_with_padding(rows: int, columns: int) -> None:
    s = random_bytes(rows, columns)
    layout = mx.ActivationScales(rows, columns)
    whole = torch.full((-(-rows // 32) * 32, mx.padded_columns(columns)), 0x7F, dtype=torch.uint8)
    whole[:rows, :columns] = s
    stored = layout.shuffle(s)
    assert torch.equal(stored, scales_of_32(whole))
    assert torch.equal(layout.unshuffle(stored), s)


def test_w1_scales_with_padded_columns() -> None:
    s = random_bytes(64, 3)
    whole = torch.full((64, 8), 0x7F, dtype=torch.uint8)
    whole[:, :3] = s
    layout = mx.W1Scales(64, 3)
    assert torch.equal(layout.shuffle(s), scales_of_32(interleaved(whole)))
    assert torch.equal(layout.unshuffle(layout.shuffle(s)), s)


@pytest.mark.parametrize(
    "layout",
    [
        mx.W1Bytes(512, 128),
        mx.W1Scales(512, 8),
        mx.W2Bytes(256, 128),
        mx.W2Scales(256, 16),
        mx.ActivationScales(96, 8),
    ],
    ids=lambda layout: type(layout).__name__,
)
def test_each_form_is_one_to_one_and_goes_there_and_back_for_many_experts(layout: mx.Layout) -> None:
    row, column = torch.arange(layout.rows)[:, None], torch.arange(layout.columns)[None]
    offsets = layout.offset(row, column).flatten().tolist()
    assert sorted(offsets) == list(range(layout.nbytes))
    logical = random_bytes(3, layout.rows, layout.columns)
    stored = layout.shuffle(logical)
    assert torch.equal(layout.unshuffle(stored), logical)
    r, c = layout.rows - 3, layout.columns - 2
    assert stored[2, layout.offset(r, c)] == logical[2, r, c]
