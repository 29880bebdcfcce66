"""Where the parts of a window lie: base + rank * stride + offset, the same for every peer."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx


@dataclass(frozen=True)
class Window:
    """A window's geometry, as kernel arguments; made once per kernel."""

    base: Any  # Int64
    stride: Any  # Int64
    rank: Any  # Int32, mine
    mine: Any  # Int64, where my part starts


def window(base, stride, rank):
    """From the fields of win.handle."""
    return Window(base, stride, rank, base + fx.Int64(rank) * stride)


def peer_address(window, peer, offset_bytes):
    """A byte of a peer's part."""
    return window.base + fx.Int64(peer) * window.stride + offset_bytes


def my_address(window, offset_bytes):
    """A byte of my part."""
    return window.mine + offset_bytes
