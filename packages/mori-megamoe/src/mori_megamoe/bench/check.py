"""Is it right? Every byte of the layer's output against the reference, on each rank for its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mori_bench
import mori_shmem
import torch

from mori_megamoe.bench.inputs import Answer
from mori_megamoe.layer import MegaMoE
from mori_megamoe.reference import ACCURACY_GATE, RankInput, rel_l2
from mori_megamoe.testing import wrong_rows


@dataclass(frozen=True)
class Checked:
    """All ranks' findings together."""

    mismatched_rows: int  # of all calls
    rel_l2: float  # against float64 experts with the same weights and rows that are not quantised

    @property
    def ok(self) -> bool:
        return self.mismatched_rows == 0 and self.rel_l2 <= ACCURACY_GATE  # a NaN is not

    def __add__(self, other: Checked) -> Checked:
        """Both, at their worst."""
        errors = (self.rel_l2, other.rel_l2)
        worst = next((e for e in errors if e != e), max(errors))
        return Checked(self.mismatched_rows + other.mismatched_rows, worst)


class Checker:
    """Calls of one rank with inputs that alternate, and what must come out of each."""

    def __init__(
        self,
        moe: MegaMoE,
        given: Sequence[RankInput],
        answers: Sequence[Answer],
        fault: str | None,
    ) -> None:
        self._moe, self._given, self._answers = moe, given, answers
        self._fault = mori_bench.Fault(fault)
        ranks = (moe.comm.rank, moe.comm.world_size)
        self._called = [g._replace(x=self._fault.input(g.x, *ranks)) for g in given]

    def call(self, turn: int) -> torch.Tensor:
        """The layer's output, or what a fault makes of it. Until the next call."""
        out = self._moe(*self._called[turn])
        return self._fault.output(out) if self._fault and len(out) else out

    def check(self, comm: mori_shmem.Communicator, turns: Sequence[int]) -> Checked:
        """Collective: so many calls one after the other; then all are compared."""
        outs = [self.call(turn).clone() for turn in turns]
        wrong, error = 0, 0.0
        for turn, out in zip(turns, outs, strict=True):
            wrong += len(wrong_rows(out, self._answers[turn].out))
            error = _worse(error, rel_l2(out.double(), self._answers[turn].dense))
        found = Checked(0, 0.0)
        for rows, off in comm.all_gather((wrong, error)):
            found += Checked(rows, off)
        return found


def _worse(a: float, b: float) -> float:
    return a if a != a or a > b else b
