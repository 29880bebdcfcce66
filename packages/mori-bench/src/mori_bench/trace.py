"""Where the time went: named spans on one clock, per rank and lane; as a file for Perfetto and as text.

A lane is whatever works on its own in a rank: the host thread, a copy queue, a stream. Ranks record apart,
exchange their traces (they pickle), and one of them merges and writes:
    trace = Trace(rank)
    with trace.span("gemm", lane="compute"): ...
    everything = Trace.merge(comm.all_gather(trace))
    everything.write_chrome("trace.json"); print(everything.draw())
Times are `time.monotonic_ns`, which all processes of one machine share.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """One stretch of work."""

    rank: int
    lane: str
    start_ns: int
    end_ns: int
    name: str


class Trace:
    """Spans in the order they were added."""

    def __init__(self, rank: int = 0, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self._clock = clock

    def add(self, name: str, lane: str, start_ns: int, end_ns: int, *, rank: int | None = None) -> None:
        """Record a span that was timed elsewhere, for instance by a copy queue's timestamps."""
        if end_ns < start_ns:
            raise ValueError(f"span {name!r} ends at {end_ns} ns, before its start at {start_ns} ns")
        self.spans.append(Span(self.rank if rank is None else rank, lane, int(start_ns), int(end_ns), name))

    @contextmanager
    def span(self, name: str, lane: str = "host") -> Iterator[None]:
        """Record what happens inside the `with`, also when it raises."""
        start_ns = self._clock()
        try:
            yield
        finally:
            self.add(name, lane, start_ns, self._clock())

    @staticmethod
    def merge(traces: Iterable[Trace]) -> Trace:
        """All spans of all traces in one, ordered by rank, lane and time."""
        merged = Trace()
        merged.spans = sorted(span for trace in traces for span in trace.spans)
        return merged

    def chrome(self) -> dict[str, object]:
        """The trace in Chrome's format: a process per rank, a thread per lane, microseconds."""
        zero_ns = min((span.start_ns for span in self.spans), default=0)
        lanes = sorted({(span.rank, span.lane) for span in self.spans})
        tid = {key: index for index, key in enumerate(lanes)}
        events: list[dict[str, object]] = []
        for rank in sorted({rank for rank, _ in lanes}):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            events.append(
                {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
            )
        for rank, lane in lanes:
            where = {"pid": rank, "tid": tid[rank, lane]}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": lane}})
        for span in sorted(self.spans):
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "pid": span.rank,
                    "tid": tid[span.rank, span.lane],
                    "ts": (span.start_ns - zero_ns) / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def write_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the file that ui.perfetto.dev and chrome://tracing open."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.chrome(), file, allow_nan=False)

    def draw(self, width: int | None = None, *, color: bool | None = None) -> str:
        """A picture of at most `width` columns, by default the terminal's; in colour only on a terminal."""
        from mori_bench.timeline import draw

        return draw(self.spans, width or shutil.get_terminal_size((100, 24)).columns, color=color)
