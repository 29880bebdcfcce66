"""When the steps of a call ended, for a trace; costs a look at a flag where nobody asks."""

from __future__ import annotations

import time


class Marks:
    """(step, end in time.monotonic_ns) of the calls since `ends` was emptied."""

    def __init__(self) -> None:
        self.on = False
        self.ends: list[tuple[str, int]] = []

    def add(self, step: str) -> None:
        if self.on:
            self.ends.append((step, time.monotonic_ns()))
