"""Ranks are processes of one machine, torch computes on the CPU, and rows are copied between shared
windows."""

from mori_megamoe.targets.host.checks import check_ids
from mori_megamoe.targets.host.direct import DirectStores
from mori_megamoe.targets.host.runner import Runner
from mori_megamoe.targets.host.sdma import CopyEngines

__all__ = ["CopyEngines", "DirectStores", "Runner", "check_ids"]
