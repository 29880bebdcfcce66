"""DeepEP's Buffer. Read buffer.py first; low_latency.py and normal.py hold its two modes."""

from mori_ep.adapters.deepep.buffer import Buffer
from mori_ep.adapters.deepep.events import EventHandle, EventOverlap
from mori_ep.adapters.deepep.sizes import Config

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
