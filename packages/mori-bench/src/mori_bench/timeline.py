"""Spans as a picture for the terminal: one line per rank and lane, time to the right.

    rank 0 compute │█ gemm ██████████████████░░░░░░░░    │  89 %
           queue 0 │    ▒▒▒▒        ▒▒▒▒▒                │  22 %
                   └┴───────┴───────┴───────┴───────┴────┘
                    0       2       4       6       8 ms
    █ gemm 6 ms   ▒ put 2 ms   ░ reduce 2 ms
    (per rank, mean of the ranks)

A cell shows the phase that fills most of it; where spans of a lane nest, the inner one. A span too short for
a cell of its own still gets one if the cell is otherwise idle. Names that differ only by a number at the end
("put 3") are one phase. The percentage is the part of the whole in which the lane was busy. Colours only add
to the picture: without them the same characters are printed.
"""

from __future__ import annotations

import heapq
import math
import os
import sys
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from mori_bench.tables import text_width

if TYPE_CHECKING:
    from mori_bench.trace import Span

FILLS = "█▒░⣿▚⠶▞⠒▓=+*"
COLORS = (
    75,
    215,
    114,
    205,
    178,
    80,
    141,
    209,
    250,
    107,
    181,
    110,
)  # of the 256, readable on black and on white
MIN_WIDTH = 40


class Piece(NamedTuple):
    """A stretch of a lane in which one span is the innermost."""

    start_ns: int
    end_ns: int
    span: Span


def draw(spans: Sequence[Span], width: int = 100, *, color: bool | None = None) -> str:
    """The picture, no line wider than `width` columns (at least 40). color=None: as the terminal allows."""
    if not spans:
        return "(nothing was traced)"
    if color is None:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    zero_ns, end_ns = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    total_ns = max(1, end_ns - zero_ns)
    phases = list(dict.fromkeys(phase_of(s.name) for s in sorted(spans, key=lambda s: (s.start_ns, s.rank))))
    by_lane = {key: list(of_lane) for key, of_lane in groupby(sorted(spans), key=lambda s: (s.rank, s.lane))}
    labels = _labels(list(by_lane), max(MIN_WIDTH, width) // 3)
    label_width = max(text_width(label) for label in labels)
    room = max(MIN_WIDTH, width) - label_width - len(" ││ 100 %")

    lines = []
    for label, of_lane in zip(labels, by_lane.values(), strict=True):
        pieces = flatten(of_lane)
        cells = _cells(pieces, of_lane, zero_ns, total_ns / room, room)
        busy_pct = 100 * sum(piece.end_ns - piece.start_ns for piece in pieces) / total_ns
        padding = " " * (label_width - text_width(label))
        lines.append(f"{label}{padding} │{_painted(cells, phases, color)}│ {busy_pct:3.0f} %")
    lines += [" " * (label_width + 1) + line for line in _axis(total_ns, room)]
    return "\n".join(lines + _legend(spans, phases, max(MIN_WIDTH, width), color))


def phase_of(name: str) -> str:
    """The name without a number at its end: "put 3", "put[3]" and "put #3" are all "put"."""
    return name.rstrip("0123456789[]()#:._- ") or name


def flatten(spans: Sequence[Span]) -> list[Piece]:
    """One lane's spans cut at every start and end, the shortest of those that overlap on top."""
    edges = sorted({edge for span in spans for edge in (span.start_ns, span.end_ns)})
    waiting = sorted(spans, key=lambda s: s.start_ns, reverse=True)
    active: list[tuple[int, int, Span]] = []  # a heap: the shortest span on top
    pieces: list[Piece] = []
    for start_ns, end_ns in pairwise(edges):
        while waiting and waiting[-1].start_ns <= start_ns:
            span = waiting.pop()
            heapq.heappush(active, (span.end_ns - span.start_ns, len(waiting), span))
        while active and active[0][2].end_ns <= start_ns:
            heapq.heappop(active)
        if active:
            pieces.append(Piece(start_ns, end_ns, active[0][2]))
    return pieces


def _labels(lanes: list[tuple[int, str]], room: int) -> list[str]:
    """ "rank 0 compute", the rank only on the first of its lines, cut to `room`."""
    digits = max(len(str(rank)) for rank, _ in lanes)
    labels, previous = [], None
    for rank, lane in lanes:
        head = f"rank {rank:>{digits}} " if rank != previous else " " * (digits + 6)
        label = head + _shown(lane)
        labels.append(_cut(label, room))
        previous = rank
    return labels


def _cells(
    pieces: list[Piece], spans: Sequence[Span], zero_ns: int, cell_ns: float, room: int
) -> list[str | None]:
    """For each column the name of the span that fills most of it, None where idle."""
    filled: list[dict[str, float]] = [{} for _ in range(room)]
    for piece in pieces:
        first, last = _columns(piece.start_ns, piece.end_ns, zero_ns, cell_ns, room)
        for column in range(first, last + 1):
            begin_ns, end_ns = zero_ns + column * cell_ns, zero_ns + (column + 1) * cell_ns
            inside = min(piece.end_ns, end_ns) - max(piece.start_ns, begin_ns)
            filled[column][piece.span.name] = filled[column].get(piece.span.name, 0.0) + max(0.0, inside)
    cells: list[str | None] = [None] * room
    for column, names in enumerate(filled):
        if names and 2 * sum(names.values()) >= cell_ns:
            cells[column] = max(names, key=lambda name: names[name])
    for span in spans:  # what would be too short to see
        first, last = _columns(span.start_ns, span.end_ns, zero_ns, cell_ns, room)
        if all(cells[column] is None for column in range(first, last + 1)):
            cells[(first + last) // 2] = span.name
    return cells


def _columns(start_ns: int, end_ns: int, zero_ns: int, cell_ns: float, room: int) -> tuple[int, int]:
    """The first and the last column that a stretch of time touches."""
    first = min(room - 1, int((start_ns - zero_ns) / cell_ns))
    last = min(room - 1, max(first, math.ceil((end_ns - zero_ns) / cell_ns) - 1))
    return first, last


def _painted(cells: list[str | None], phases: list[str], color: bool) -> str:
    """The cells as characters, the name written into every stretch that has room for it."""
    out = []
    for phase, stretch in groupby(cells, key=lambda name: None if name is None else phase_of(name)):
        names = list(stretch)
        if phase is None:
            out.append(" " * len(names))
            continue
        index = phases.index(phase)
        fill = FILLS[index % len(FILLS)]
        name = names[0] if len(set(names)) == 1 and names[0] else phase
        fitting = (
            f" {_shown(text)} " for text in (name, phase) if text_width(_shown(text)) + 3 <= len(names)
        )
        label = next(fitting, "")
        filling = fill * (len(names) - 1 - text_width(label))
        out.append(_colored(fill + label + filling, index, color))
    return "".join(out)


def _shown(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _colored(text: str, index: int, color: bool) -> str:
    return f"\x1b[38;5;{COLORS[index % len(COLORS)]}m{text}\x1b[0m" if color and text else text


def _axis(total_ns: int, room: int) -> list[str]:
    """A ruler with round numbers, as many as fit, and the unit after the last."""
    unit, unit_ns = unit_for(total_ns)
    step = _round_step(total_ns / unit_ns / max(1, room // 7))
    ruler, text = ["─"] * room, [" "] * (room + 9)
    for tick in range(int(total_ns / unit_ns / step + 1e-9) + 1):
        column = int(tick * step * unit_ns * room / total_ns)
        label = f"{tick * step:g}"
        if column + len(label) >= room:
            break
        ruler[column] = "┴"
        text[column : column + len(label)] = label
    line = "".join(text).rstrip()
    return ["└" + "".join(ruler) + "┘", " " + line + " " + unit]


def unit_for(ns: float) -> tuple[str, float]:
    """The unit in which a duration is a number between 1 and 1000, and its nanoseconds."""
    for unit, unit_ns in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= unit_ns:
            return unit, unit_ns
    return "ns", 1.0


def _round_step(at_least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that is not below."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9))


def _cut(text: str, room: int) -> str:
    """At most `room` columns of a text."""
    while text_width(text) > room:
        text = text[:-2] + "…"
    return text


def _legend(spans: Sequence[Span], phases: list[str], width: int, color: bool) -> list[str]:
    """Each phase with its sign and its time summed over one rank, mean of the ranks that have it."""
    lines, used = [""], 0
    for index, phase in enumerate(phases):
        of_phase = [s for s in spans if phase_of(s.name) == phase]
        mean_ns = sum(s.end_ns - s.start_ns for s in of_phase) / len({s.rank for s in of_phase})
        unit, unit_ns = unit_for(mean_ns)
        text = f"{_cut(_shown(phase), width // 2)} {mean_ns / unit_ns:.3g} {unit}"
        if used and used + 5 + text_width(text) > width:
            lines.append("")
            used = 0
        lines[-1] += ("   " if used else "") + _colored(FILLS[index % len(FILLS)], index, color) + " " + text
        used += (3 if used else 0) + 2 + text_width(text)
    return [*lines, "(per rank, mean of the ranks)"]
