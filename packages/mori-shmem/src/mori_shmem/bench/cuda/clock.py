"""How work on a stream is timed: events before and after, in a graph where the host would be too slow.

An eager case measures what a caller gets who enqueues as he goes; a graph of `calls` repetitions measures
what the GPU needs. Both end when the stream has gone through everything, copies of other streams included
(`join`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mori_bench import Case

if TYPE_CHECKING:
    import torch


def eager(action: Callable[[], object], calls: int = 1) -> Case:
    """`calls` times in a row."""

    def enqueue() -> None:
        for _ in range(calls):
            action()

    return _between_events(enqueue, calls)


def graph(action: Callable[[], object], calls: int = 1) -> Case:
    """One replay of a graph that holds `calls` of them."""
    return _between_events(captured(action, calls).replay, calls)


def captured(action: Callable[[], object], calls: int = 1) -> torch.cuda.CUDAGraph:
    """The graph of `calls` repetitions."""
    import torch

    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for _ in range(calls):
            action()
    return made


def _between_events(enqueue: Callable[[], object], calls: int) -> Case:
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def start() -> None:
        before.record()
        enqueue()
        after.record()

    def finish() -> float:
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e3

    return Case(start, finish, calls)
