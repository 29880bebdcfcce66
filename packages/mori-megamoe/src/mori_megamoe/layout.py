"""Where each buffer and each flag lies in a rank's part of the window, in bytes. Pure; the same on all ranks.

flags            64-bit words, one writer each, only growing
  counted        [source]  = epoch: its counts of this launch are here
  ready          [owner]   = epoch: the owner's landing rows may be written
  arrived        [source]  how far its rows have come (plan.value_after)
  returned       [expert rank] = epoch: its partials for my tokens are here
counts           [2][source] int32 [segments + 1], by parity of the epoch: rows that the source sends to each
                 segment, and the size of its own tiles
rows             [capacity, model_dim] e4m3, landed inputs
row_scales       [capacity, model_dim / 32] e8m0, row-major
sources          [capacity] int32: rank * max_tokens + token, slot above bit 24
row_weights      [capacity] fp32: the router's weight of the row
partials         [max_tokens * topk, partial_bytes]: weighted rows that came back
output           [max_tokens, model_dim] bf16
"""

from __future__ import annotations

from dataclasses import dataclass

from mori_megamoe.problem import Problem

WORD_BYTES = 8
ALIGNMENT = 256
FLAGS = ("counted", "ready", "arrived", "returned")


@dataclass(frozen=True)
class Region:
    """A run of bytes of the window."""

    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The regions of one rank's part."""

    problem: Problem
    regions: dict[str, Region]
    nbytes: int

    def __getitem__(self, name: str) -> Region:
        return self.regions[name]

    def flag(self, name: str, writer: int) -> int:
        """Offset of a flag, in the part of the rank that reads it."""
        return self.regions[name].offset_bytes + writer * WORD_BYTES

    def count_row(self, parity: int, source: int) -> int:
        """Offset of a source's row of counts."""
        row = parity * self.problem.num_ranks + source
        return self.regions["counts"].offset_bytes + row * 4 * (self.problem.num_segments + 1)


def layout_for(problem: Problem) -> Layout:
    """Of a layer of these sizes."""
    capacity, ranks = problem.capacity_rows, problem.num_ranks
    sizes = dict.fromkeys(FLAGS, ranks * WORD_BYTES)
    sizes |= {
        "counts": 2 * ranks * 4 * (problem.num_segments + 1),
        "rows": capacity * problem.model_dim,
        "row_scales": capacity * problem.model_scales,
        "sources": capacity * 4,
        "row_weights": capacity * 4,
        "partials": problem.max_tokens * problem.topk * problem.partial_bytes,
        "output": problem.max_tokens * problem.model_dim * 2,
    }
    offset, regions = 0, {}
    for name, nbytes in sizes.items():
        regions[name] = Region(offset, nbytes)
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(problem, regions, offset)
