"""Spans as a picture in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mori_bench.trace import Span

FILLS = "█▒▚░▞▓#=+o"


def draw(spans: Sequence[Span], width: int = 100, *, color: bool | None = None) -> str:
    """One line per rank and lane."""
    if not spans:
        return "(no spans)"
    zero, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    names = list(dict.fromkeys(s.name for s in sorted(spans, key=lambda s: s.start_ns)))
    lanes = sorted({(s.rank, s.lane) for s in spans})
    labels = [f"rank {rank} {lane} " for rank, lane in lanes]
    room = max(10, width - max(map(len, labels)))
    per_cell = max(1, end - zero) / room
    lines = []
    for (rank, lane), label in zip(lanes, labels, strict=True):
        cells = [" "] * room
        for s in spans:
            if (s.rank, s.lane) == (rank, lane):
                first = min(room - 1, int((s.start_ns - zero) / per_cell))
                last = min(room, max(first + 1, int((s.end_ns - zero) / per_cell)))
                cells[first:last] = FILLS[names.index(s.name) % len(FILLS)] * (last - first)
        lines.append(label.ljust(width - room) + "".join(cells))
    lines.append("  ".join(f"{FILLS[i % len(FILLS)]} {name}" for i, name in enumerate(names)))
    return "\n".join(lines)
