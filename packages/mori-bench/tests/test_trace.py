"""Traces: one clock, a file that Perfetto reads, a picture that fits."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from pathlib import Path

import pytest
from mori_bench import Span, Trace
from mori_bench.timeline import flatten, phase_of

US = 1000


@pytest.fixture
def trace() -> Trace:
    """Two ranks; each computes 8 ms and its queue copies for 2 ms in between."""
    traces = []
    for rank in range(2):
        one = Trace(rank)
        start = 7_000_000_000_000 + rank * 1000 * US
        one.add("gemm", "compute", start, start + 6000 * US)
        one.add("reduce", "compute", start + 6000 * US, start + 8000 * US)
        one.add("put 0", "queue 0", start + 1000 * US, start + 2000 * US)
        one.add("put 1", "queue 0", start + 4000 * US, start + 5000 * US)
        traces.append(one)
    return Trace.merge(reversed(traces))


def test_spans_are_taken_from_the_clock_also_when_the_body_raises(clock) -> None:
    trace = Trace(3, clock=clock)
    with trace.span("a", lane="host"):
        clock.advance(5)
    with contextlib.suppress(RuntimeError), trace.span("b"):
        clock.advance(7)
        raise RuntimeError
    assert [(s.rank, s.name, s.lane, s.end_ns - s.start_ns) for s in trace.spans] == [
        (3, "a", "host", 5000),
        (3, "b", "host", 7000),
    ]


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' ends at 1 ns, before its start at 2 ns"):
        Trace().add("a", "host", 2, 1)


def test_traces_travel_between_ranks_and_merge_in_order(trace: Trace) -> None:
    assert [s.rank for s in trace.spans] == [0] * 4 + [1] * 4
    assert pickle.loads(pickle.dumps(trace)).spans == trace.spans


def test_the_chrome_file_is_valid_and_complete(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.write_chrome(path)
    loaded = json.loads(path.read_text())
    events = loaded["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 8
    assert {e["pid"] for e in spans} == {0, 1}
    assert min(e["ts"] for e in spans) == 0
    first = next(e for e in spans if e["pid"] == 1 and e["name"] == "put 1")
    assert (first["ts"], first["dur"]) == (5000.0, 1000.0)  # microseconds
    names = {(e["pid"], e.get("tid"), e["args"]["name"]) for e in events if e["name"].endswith("_name")}
    assert {(0, None, "rank 0"), (1, None, "rank 1")} <= names
    lanes = {(pid, tid): name for pid, tid, name in names if tid is not None}
    assert sorted(lanes.values()) == ["compute", "compute", "queue 0", "queue 0"]
    assert all((e["pid"], e["tid"]) in lanes for e in spans)
    assert len({tid for _, tid in lanes}) == len(lanes)  # Perfetto mixes up equal thread ids of two processes


def test_the_picture_shows_lanes_phases_axis_and_legend(trace: Trace) -> None:
    assert trace.draw(60, color=False).splitlines() == [
        "rank 0 compute │█ gemm ██████████████████░░░░░░░░    │  89 %",
        "       queue 0 │    ▒▒▒▒        ▒▒▒▒▒                │  22 %",
        "rank 1 compute │    █ gemm ██████████████████░░░░░░░░│  89 %",
        "       queue 0 │        ▒▒▒▒         ▒▒▒▒            │  22 %",
        "               └┴───────┴───────┴───────┴───────┴────┘",
        "                0       2       4       6       8 ms",
        "█ gemm 6 ms   ▒ put 2 ms   ░ reduce 2 ms",
        "(per rank, mean of the ranks)",
    ]


def test_no_line_is_wider_than_asked(trace: Trace) -> None:
    trace.add("a very long name " * 9, "a lane with a long name " * 5, 7_000_000_000_000, 7_000_000_500_000)
    for width in (40, 60, 100, 200):
        assert max(len(line) for line in trace.draw(width, color=False).splitlines()) <= width


def test_colours_only_add(trace: Trace) -> None:
    plain, colored = trace.draw(80, color=False), trace.draw(80, color=True)
    assert "\x1b" not in plain
    assert "\x1b" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_without_a_terminal_there_is_no_colour(trace: Trace) -> None:
    assert "\x1b" not in trace.draw(80)


def test_a_span_too_short_for_a_cell_is_still_seen() -> None:
    trace = Trace()
    trace.add("gemm", "compute", 0, 1_000_000)
    trace.add("signal", "queue", 500_000, 500_000)
    picture = trace.draw(80, color=False).splitlines()
    assert picture[1].count("▒") == 1


def test_nested_spans_show_the_inner_one() -> None:
    outer, inner = Span(0, "host", 0, 100, "step"), Span(0, "host", 40, 60, "wait")
    assert [(p.start_ns, p.end_ns, p.span.name) for p in flatten([outer, inner])] == [
        (0, 40, "step"),
        (40, 60, "wait"),
        (60, 100, "step"),
    ]


def test_where_spans_cross_the_shorter_one_shows() -> None:
    short, long = Span(0, "host", 40, 60, "short"), Span(0, "host", 50, 100, "long")
    assert [(p.start_ns, p.end_ns, p.span.name) for p in flatten([long, short])] == [
        (40, 50, "short"),
        (50, 60, "short"),
        (60, 100, "long"),
    ]


def test_numbered_names_are_one_phase() -> None:
    assert [phase_of(name) for name in ("put 3", "put[12]", "gemm #1", "gemm", "7")] == [
        "put",
        "put",
        "gemm",
        "gemm",
        "7",
    ]


def test_nothing_traced() -> None:
    assert Trace().draw(80) == "(nothing was traced)"
    assert Trace().chrome()["traceEvents"] == []


def test_all_spans_at_one_moment() -> None:
    trace = Trace()
    trace.add("a", "host", 5, 5)
    assert "a 0 ns" in trace.draw(60, color=False)


def test_many_spans_are_drawn_quickly() -> None:
    trace = Trace()
    for index in range(20_000):
        trace.add(f"put {index}", "queue", index * 1000, index * 1000 + 700)
    assert "put" in trace.draw(100, color=False)
