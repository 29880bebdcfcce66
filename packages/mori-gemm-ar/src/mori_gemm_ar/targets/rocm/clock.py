"""When each phase of a call began and ended, for calls that are timed.

On a GPU: events between the phases, read after the call; the phases follow each other as in an untimed call.
On the simulated node: the host's clock, with a wait for the device after each phase. It says what the
simulator took, and nothing about hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """A stretch of work on time.monotonic_ns, for a trace."""

    name: str
    lane: str
    start_ns: int
    end_ns: int


class PhaseClock:
    """`mark(phase)` behind the launches of each phase, then `spans()`, which waits for them."""

    def __init__(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        self._on_gpu = device.type == "cuda"
        self._synchronize = synchronize
        self._names: list[str] = []
        synchronize()
        self._began_ns = time.monotonic_ns()
        self._marks = [self._mark()]

    def _mark(self) -> torch.cuda.Event | int:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        self._synchronize()
        return time.monotonic_ns()

    def mark(self, name: str) -> None:
        """What was launched since the last mark is this phase."""
        self._names.append(name)
        self._marks.append(self._mark())

    def spans(self) -> list[Span]:
        """One for each phase."""
        self._synchronize()
        at_ns = [self._since_first_ns(mark) + self._began_ns for mark in self._marks]
        return [Span(name, "phase", *at_ns[i : i + 2]) for i, name in enumerate(self._names)]

    def _since_first_ns(self, mark: torch.cuda.Event | int) -> int:
        first = self._marks[0]
        if isinstance(mark, int):
            assert isinstance(first, int)
            return mark - first
        assert not isinstance(first, int)
        return int(first.elapsed_time(mark) * 1e6)
