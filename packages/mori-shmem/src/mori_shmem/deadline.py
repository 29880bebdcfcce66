"""A point in time, and the words that tell whoever missed it which limit that was."""

from __future__ import annotations

import time


class Deadline:
    """`timeout_s` from now, on the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self._at - time.monotonic()

    def passed(self) -> bool:
        return self.left_s() <= 0

    def __str__(self) -> str:
        return f"{self.timeout_s:g} s (the limit is timeout_s=, or MORI_TIMEOUT_S in the environment)"
