"""Ranks that are processes of one machine: rows move by loops in C++, or by the copy engines of
mori-shmem."""

from mori_ep.layout import layout_for
from mori_ep.plan import plan_for
from mori_ep.targets.host.launch import Runner
from mori_ep.targets.host.limits import why_not

__all__ = ["Runner", "layout_for", "plan_for", "why_not"]
