"""Where the cuda target's buffers and flags lie in the window, in bytes. Pure integers.

    arrived, gathered       u32 [source][band]: "source's partial tiles (finished rows) of this band are
                            here", an epoch
    arrived_t, gathered_t   the same, 0 or 1: set by copy engines, cleared by who used it
    ready, finished         u32 [owner][band], [band]: my tiles are staged, a copy may start; 0 or 1
    count, step, exits, tickets   the kernel's own counters
    inbox     [source] partial tiles of my slice, bf16, as images of the kernel's staging: a band is one run
              of bytes
    staging   [owner]  the same, waiting for a copy engine
    q_inbox   [source] finished tiles as e4m3 codes, 64 x 128 of them and then 64 scales
    q_staging the same of my slice, waiting for a copy engine
    c_ready, slice_ready      u32 [source] of the split modes, epochs, see split.cu; slice_here the same, 0 or
                              1, written behind copies; split_step, split_exits: counters of its kernels
    codes, scales [m_max, n], [m_max, groups] of a split mode's fp8 gather; c: everybody's partial sums, bf16
    out       [m_max, n] bf16

Every offset follows from m_max, never from the m of a call. Tiles are padded to whole tiles, columns to 256.
"""

from __future__ import annotations

from dataclasses import dataclass

from mori_gemm_ar.targets.cuda.params import MAX_BANDS

HALF_ROWS, TILE_COLUMNS = 64, 128
HALF_BYTES = HALF_ROWS * TILE_COLUMNS * 2
Q_BYTES = HALF_ROWS * TILE_COLUMNS + HALF_ROWS * 4
_ALIGNMENT = 1024


@dataclass(frozen=True)
class Regions:
    """Offsets of one rank's part; the same on every rank."""

    num_ranks: int
    n: int
    slot_halves: int  # half tiles (64 x 128) of one slice
    offsets: dict[str, int]
    nbytes: int

    def flag(self, name: str, index: int = 0) -> int:
        """Offset of the flags of `index` (a source or an owner); one u32 a band follows."""
        if name == "finished":
            name, index = "ready", self.num_ranks
        return self.offsets[name] + index * MAX_BANDS * 4

    def slot(self, name: str, index: int = 0) -> int:
        """Offset of the slot of `index` in a buffer of tiles."""
        return self.offsets[name] + index * self.slot_halves * (
            Q_BYTES if name.startswith("q_") else HALF_BYTES
        )


def regions_for(
    m_max: int,
    n: int,
    num_ranks: int,
    tile_rows: int,
    *,
    copies: bool,
    fp8: bool,
    split: bool = False,
    communicates: bool = True,
    scale_groups: int = 0,
    one_stage_rows: int = 0,
) -> Regions:
    """`copies`: copy engines carry tiles; `fp8`: finished rows travel as fp8; `split`: the sums are made
    after the GEMM, `scale_groups` fp8 scales a row; `one_stage_rows`: calls of so many rows may be, too."""
    slice_rows = -(-m_max // num_ranks)
    halves = -(-slice_rows // tile_rows) * (tile_rows // HALF_ROWS) * (-(-n // (2 * TILE_COLUMNS)) * 2)
    flags, tiles, codes = num_ranks * MAX_BANDS * 4, halves * HALF_BYTES, halves * Q_BYTES
    alone = num_ranks == 1 or split or not communicates
    sizes = {
        **dict.fromkeys(("arrived", "gathered", "arrived_t", "gathered_t", "count"), flags),
        "ready": flags + MAX_BANDS * 4,  # and `finished` as one more owner: cleared together
        "step": 4,
        "exits": 4,
        "tickets": 4,
        "inbox": 0 if alone else num_ranks * tiles,
        "staging": num_ranks * tiles if copies and not alone else 0,
        "q_inbox": num_ranks * codes if fp8 and not alone else 0,
        "q_staging": codes if fp8 and copies and not alone else 0,
        **dict.fromkeys(("c_ready", "slice_ready", "slice_here"), num_ranks * 4),
        **dict.fromkeys(("split_step", "split_exits"), 4),
        "codes": m_max * n if split and fp8 and num_ranks > 1 else 0,
        "scales": m_max * scale_groups * 4 if split and fp8 and num_ranks > 1 else 0,
        "c": 0 if num_ranks == 1 else (m_max if split else one_stage_rows) * n * 2,
        "out": m_max * n * 2,
    }
    offset, offsets = 0, {}
    for name, nbytes in sizes.items():
        offsets[name] = offset
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return Regions(num_ranks, n, halves, offsets, offset)
