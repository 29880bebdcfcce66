"""One call of the layer on its way through the phases: what the caller gave, and what `prepare` made of
it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mori_megamoe.plan import Counts, Destination
from mori_megamoe.routing import Pairs, Routes
from mori_megamoe.weights import StoredWeights

if TYPE_CHECKING:
    from mori_bench import Trace


class Call(NamedTuple):
    """Checked tensors of one call on this rank. Either `x`, or `x_q` with `x_scales`."""

    x: torch.Tensor | None  # [n, D] bf16
    x_q: torch.Tensor | None  # [n, D] uint8, e4m3 codes
    x_scales: torch.Tensor | None  # [n, D / 32] uint8
    weights: torch.Tensor  # [n, k] fp32
    ids: torch.Tensor  # [n, k] int32
    experts: StoredWeights  # as they are at this call: a framework may swap them from call to call

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]


@dataclass
class Launch:
    """What every phase after `prepare` goes by. Made anew in each launch; on the host target of plain
    integers and CPU tensors. A target that plans on its device has tensors there under the same names."""

    call: Call
    epoch: int
    rank: int
    counts: Counts  # [ranks][segments]
    pairs: Pairs  # by rank, of this launch
    routes: Routes  # the rows that this rank sends
    plans: list[Destination]  # of every rank
    x_q: torch.Tensor | None  # [n, D] uint8, [n, D / 32] uint8: this rank's rows, quantised by prepare or the
    x_scales: torch.Tensor | None  # caller; None where the stage quantises for itself
    scratch: dict[str, Any] = field(default_factory=dict)  # for the phases of one target or stage
    trace: Trace | None = None  # where somebody wants to see what happened when

    @property
    def plan(self) -> Destination:
        """Of what this rank receives."""
        return self.plans[self.rank]

    def span(self, name: str, lane: str) -> AbstractContextManager[None]:
        """What is inside goes into the trace, if there is one."""
        return nullcontext() if self.trace is None else self.trace.span(name, lane)
