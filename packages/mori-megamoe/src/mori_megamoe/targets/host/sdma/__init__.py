"""Stage1 over the software copy engines of mori-shmem. Read stage.py first."""

from mori_megamoe.targets.host.sdma.stage import CopyEngines

__all__ = ["CopyEngines"]
