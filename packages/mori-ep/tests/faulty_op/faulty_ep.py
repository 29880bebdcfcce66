"""The op as mori-tune sees it, with a fault in one of its two candidates: what MORI_TEST_FAULT names. Every
round runs and is said to take the same time, so that a busy machine causes no further visits.

--op faulty_ep:TUNABLE
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mori_ep.tunable import Ep
from mori_tune import Candidate, Place, Problem
from mori_tune.device import Device

FAULTY = "yes"  # the candidate with this low_latency


class FaultyEp(Ep):
    def open(self, problem: Problem, device: Device, place: Place) -> Any:
        session = super().open(problem, device, place)
        make = session.make

        def made(by_phase: Mapping[str, Candidate]) -> Any:
            trial = make(by_phase)
            measure = trial.measure
            trial.measure = lambda: dict.fromkeys(measure(), 100.0)
            if by_phase["dispatch"]["low_latency"] == FAULTY and place.rank == 1:
                spoil(trial, os.environ["MORI_TEST_FAULT"])
            return trial

        session.make = made
        return session


def spoil(trial: Any, fault: str) -> None:
    """One byte of one row, or one element of one sum; or the rank dies in a round."""
    dispatch, combine = trial.dispatch, trial.combine

    def spoilt_dispatch(turn: Any) -> Any:
        got = dispatch(turn)
        got[0][1, 7] += 1
        return got

    def spoilt_combine(rows: Any, turn: Any) -> Any:
        out = combine(rows, turn)
        out[2, 5] += 8
        return out

    if fault == "dispatch":
        trial.dispatch = spoilt_dispatch
    elif fault == "combine":
        trial.combine = spoilt_combine
    elif fault == "death":
        trial.measure = lambda: os._exit(7)


TUNABLE = FaultyEp()
