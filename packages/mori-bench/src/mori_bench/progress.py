"""How far a sweep is: a bar that is redrawn on a terminal, one line per cell elsewhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

BAR_WIDTH = 24


class Progress:
    """Counts cells. The estimate of what is left is the mean time of the cells run so far."""

    def __init__(
        self, total: int, done: int, stream: TextIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self.done = done
        self.failed = 0
        self._ran = 0
        self._began = clock()
        self._clock = clock
        self._stream = stream
        self._redraws = stream.isatty()
        self._label = ""
        if done:
            self._say(f"{done} of {total} cells were done before")

    def begin(self, label: str) -> None:
        """A cell starts."""
        self._label = label
        if self._redraws:
            self._draw()

    def end(self, cause: str | None) -> None:
        """The cell ended; `cause` tells why it failed, None if it did not."""
        self.done += 1
        self._ran += 1
        self.failed += cause is not None
        if cause is not None or not self._redraws:
            self._say(
                f"{self.done}/{self.total}  {self._label}  {'ok' if cause is None else 'FAILED: ' + cause}"
            )
        if self._redraws:
            self._draw()

    def close(self) -> None:
        """Leave the bar's line."""
        if self._redraws and self._ran:
            self._stream.write("\n")
            self._stream.flush()

    def line(self) -> str:
        """The bar as text."""
        filled = BAR_WIDTH * self.done // self.total if self.total else BAR_WIDTH
        parts = [f"[{'█' * filled}{'░' * (BAR_WIDTH - filled)}] {self.done}/{self.total}"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self._ran and self.done < self.total:
            left_s = (self._clock() - self._began) / self._ran * (self.total - self.done)
            parts.append(f"about {duration(left_s)} left")
        if self.done < self.total:
            parts.append(self._label)
        return "  ".join(parts)

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + self.line()[:width])
        self._stream.flush()

    def _say(self, text: str) -> None:
        self._stream.write(("\r\x1b[K" if self._redraws else "") + text + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """A rough time for people: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
