"""Picking a winner from noisy measurements; pure decisions, without a process, a file or a clock."""

from mori_tune.search.decide import Request, Search, Standing, Verdict
from mori_tune.search.samples import Failure, Times

__all__ = ["Failure", "Request", "Search", "Standing", "Times", "Verdict"]
