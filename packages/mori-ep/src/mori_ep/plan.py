"""From a configuration to the ways in which its rows travel. Pure; the same on every rank.

All ways give the same rows in the same order and the same maps, so nobody can tell from a result which one
was taken. A target decides which ways it has (`targets/`).

  dispatch
    COUNTS   ranks tell each other how many rows they send to whom, then store each row where it belongs
    SLOTS    rows go to a block that the receiver keeps for the source, and the receiver lays the blocks
             together
    QUEUES   as SLOTS, but rows are packed first and a copy queue carries the block: the caller may compute
             between the two halves
  combine
    PULL     the owner of a token reads the rows of its experts in their ranks' windows and adds them
    QUEUES   copy queues bring the rows back to the owner, who adds them in the second half

COUNTS needs everybody's counts to place a row. With `elastic` a rank may be gone, and what it told before may
have reached some and not others, so every row goes by SLOTS: there the receiver alone decides.

Where a call has a way for few tokens and one for many, tuned rules may say which (rules.py). A target
follows them as it can: the host for all calls of an op at once (IntraNode: SLOTS or COUNTS), cuda and
InterNode call by call, each rank for its own tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType


class Way(enum.Enum):
    COUNTS = "counts"
    SLOTS = "slots"
    QUEUES = "queues"
    PULL = "pull"


class Geometry(NamedTuple):
    """How a call is launched; -1 or 0: as the target plans it. Results never depend on it.

    A kernel that cannot use all that it is allowed takes what it can: blocks and warps are limits.
    """

    blocks: int = -1
    network_blocks: int = -1  # of them, those that serve the network
    warps: int = -1  # of a block
    low_latency: int = -1  # 1: the way for few tokens, 0: that for many, -1: as planned


PLANNED = Geometry()


class FewTokens(NamedTuple):
    """What is known, when an op is made, of calls that rules send by the way for few tokens."""

    when_full: int = -1  # Geometry.low_latency of a dispatch of as many tokens as fit
    dispatch: int = 0  # tokens of a rank, at most
    combine: int = 0


NOTHING_SAID = FewTokens()


@dataclass(frozen=True)
class Plan:
    """How dispatch and combine are carried out."""

    dispatch: Way
    combine: Way
    num_queues: int = 0  # copy queues to each peer
    few: FewTokens = NOTHING_SAID

    @property
    def uses_blocks(self) -> bool:
        """Whether received rows lie in blocks by source before they are laid together."""
        return self.dispatch in (Way.SLOTS, Way.QUEUES)

    @property
    def in_halves(self) -> bool:
        """Whether the second half of a call has something to do."""
        return self.dispatch is Way.QUEUES


def plan_for(config: EpDispatchCombineConfig, few: FewTokens = NOTHING_SAID) -> Plan:
    """The ways of a kernel type inside one node."""
    kind = config.kernel_type
    if kind is EpDispatchCombineKernelType.AsyncLL:
        return Plan(Way.QUEUES, Way.QUEUES, config.num_qp_per_pe)
    if kind is EpDispatchCombineKernelType.IntraNodeLL or config.elastic or few.when_full == 1:
        return Plan(Way.SLOTS, Way.PULL)
    return Plan(Way.COUNTS, Way.PULL)
