"""The record that a wait of a kernel leaves when its time is over (signal.cuh), as an error."""

from __future__ import annotations

import struct
from collections.abc import Mapping

FAULT_BYTES = 32
NO_FAULT = 0


def describe(record: bytes, what: Mapping[int, str]) -> str | None:
    """The fault in words, or None. `what` names the flags of the kernel's package."""
    code, rank, peer, kind, index, seen, wanted, block = struct.unpack("<8I", record[:FAULT_BYTES])
    if code == NO_FAULT:
        return None
    return (
        f"rank {rank} waited for rank {peer} in block {block} of its kernel: {what.get(kind, f'flag {kind}')}[{index}] "
        f"was {seen}, wanted {wanted}"
    )
