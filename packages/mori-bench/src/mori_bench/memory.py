"""What this machine has left, so that a bench can refuse sizes before it starts ranks."""

from __future__ import annotations

MEMINFO = "/proc/meminfo"


def free_bytes(meminfo: str = MEMINFO) -> int:
    """Memory that can be taken now without swapping: MemAvailable of Linux's /proc/meminfo, in bytes."""
    with open(meminfo) as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
