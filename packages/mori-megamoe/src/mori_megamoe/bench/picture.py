"""One launch of Stage1 on one rank as an SVG: when each segment landed, and when its expert was worked on.

Drawn from a trace: spans "segment N, R rows" in the lanes "landing from rank S", "expert E" wherever they
are, and what the rank did to its own rows before (PACKING). One line for each expert, in the order of work;
on it the segments that it waited for, in the colours of the ranks that sent them, above its tiles.
"""

from __future__ import annotations

from html import escape

from mori_bench import Span, Trace
from mori_bench.timeline import unit_for

from mori_megamoe.bench.phases import PACKING
from mori_megamoe.plan import PAIR_NUMBER

WIDTH, LABEL, LINE, TOP, RIGHT = 900, 96, 30, 62, 16
SENDERS = ("#c2570c", "#15803d", "#a21caf", "#b45309", "#0e7490", "#be123c", "#4d7c0f", "#6d28d9")
TILE, PACK, MARK = "#1d4ed8", "#6b7280", "#111827"


class Landing:
    """A segment that came."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.source = int(span.lane.split()[-1])
        self.number = int(span.name.split(",")[0].split()[1])


def svg(trace: Trace, *, rank: int, experts_per_rank: int, title: str) -> str:
    """The picture. Segments and experts of others are left out."""
    spans = [span for span in trace.spans if span.rank == rank]
    landings = [Landing(span) for span in spans if span.lane.startswith("landing from rank ")]
    tiles = [span for span in spans if span.name.split()[0] == "expert"]
    packing = [span for span in spans if span.name.split()[0] in PACKING]
    shown = [*(landing.span for landing in landings), *tiles, *packing]
    if not shown:
        raise ValueError(f"nothing of rank {rank} is in this trace")
    page = _Page(min(s.start_ns for s in shown), max(s.end_ns for s in shown))
    if packing:
        page.line("packing", [(span, PACK) for span in packing], [])
    pairs = [landing for landing in landings if landing.number == PAIR_NUMBER]
    if pairs:
        page.line("pair", [], pairs)
    for local in range(experts_per_rank):
        expert = rank * experts_per_rank + local
        mine = [(span, TILE) for span in tiles if int(span.name.split()[1]) == expert]
        came = [landing for landing in landings if landing.number == 1 + local]
        if mine or came:
            page.line(f"expert {expert}", mine, came)
    if tiles:
        page.mark(min(span.start_ns for span in tiles), "first expert starts", above=True)
    if landings:
        page.mark(max(landing.span.end_ns for landing in landings), "last segment is here", above=False)
    return page.finished(title, sorted({landing.source for landing in landings}))


class _Page:
    """Lines under one another, time to the right."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self._zero_ns, self._total_ns = start_ns, max(1, end_ns - start_ns)
        self._parts: list[str] = []
        self._lines = 0
        self._marks: list[tuple[float, str, bool]] = []

    def _x(self, at_ns: int) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * (at_ns - self._zero_ns) / self._total_ns

    def line(self, label: str, work: list[tuple[Span, str]], landings: list[Landing]) -> None:
        """A label, what was done, and above it what came."""
        y = TOP + LINE * self._lines
        self._lines += 1
        self._parts.append(_text(LABEL - 8, y + 19, label, anchor="end"))
        self._parts.append(f'<path d="M{LABEL} {y + LINE - 1}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        for span, colour in work:
            self._bar(span, y + 14, 12, colour, span.name)
        for landing in landings:
            colour = SENDERS[landing.source % len(SENDERS)]
            self._bar(landing.span, y + 4, 8, colour, f"{landing.span.name}, from rank {landing.source}")

    def _bar(self, span: Span, y: float, height: float, colour: str, name: str) -> None:
        x = self._x(span.start_ns)
        width = max(1.5, self._x(span.end_ns) - x)
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" fill="{colour}" '
            f'stroke="#fff" stroke-width="0.4"><title>{escape(name)}</title></rect>'
        )

    def mark(self, at_ns: int, text: str, *, above: bool) -> None:
        """A moment."""
        self._marks.append((self._x(at_ns), text, above))

    def finished(self, title: str, sources: list[int]) -> str:
        bottom = TOP + LINE * self._lines
        height = bottom + 46
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            _text(LABEL, 18, title, size=14),
        ]
        unit, unit_ns = unit_for(self._total_ns)
        axis = [
            f'<path d="M{LABEL} {bottom}H{WIDTH - RIGHT}" stroke="{MARK}"/>',
            _text(LABEL, bottom + 15, "0"),
            _text(WIDTH - RIGHT, bottom + 15, f"{self._total_ns / unit_ns:.3g} {unit}", anchor="end"),
        ]
        return "\n".join(
            [*head, *self._parts, *self._drawn_marks(bottom), *axis, *_legend(sources, height), "</svg>", ""]
        )

    def _drawn_marks(self, bottom: float) -> list[str]:
        parts = []
        for x, text, above in self._marks:
            y = 36 if above else 52
            anchor = "start" if x < WIDTH * 0.75 else "end"
            parts.append(f'<path d="M{x:.1f} {y}V{bottom}" stroke="{MARK}" stroke-dasharray="3 3"/>')
            parts.append(_text(x + (4 if anchor == "start" else -4), y + 4, text, anchor=anchor))
        return parts


def _legend(sources: list[int], height: float) -> list[str]:
    entries = [(SENDERS[source % len(SENDERS)], f"landing from rank {source}") for source in sources]
    entries.append((TILE, "a tile: GEMM1, SwiGLU, requantised"))
    parts, x = [], float(LABEL)
    for colour, text in entries:
        parts.append(f'<rect x="{x:.0f}" y="{height - 18}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, height - 9, text))
        x += 28 + 6.4 * len(text)
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{MARK}">'
        f"{escape(text)}</text>"
    )
