"""The op as mori-tune sees it, with a candidate more for each fault that MORI_TEST_FAULTS names: told from
the others by its warps, which mean nothing on the host. Every round runs and is said to take the same time,
so that a busy machine causes no further visits.

--op faulty_ep:TUNABLE
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mori_ep.tunable import Ep
from mori_tune import Candidate, Parameter, Place, Problem, Space
from mori_tune.device import Device

FAULTS = [fault for fault in os.environ.get("MORI_TEST_FAULTS", "").split(",") if fault]
FIRST_FAULTY = 2  # warps of the candidate with the first of them


class FaultyEp(Ep):
    def space(self, problem: Problem, device: Device) -> Space:
        """Without faults the op's own; else the default, and the other way with each fault."""
        space = super().space(problem, device)
        if not FAULTS:
            return space
        warps = Parameter("warp_per_block", (1, *range(FIRST_FAULTY, FIRST_FAULTY + len(FAULTS))))
        way = Parameter("low_latency", lambda _, chosen: ("no" if chosen["warp_per_block"] == 1 else "yes",))
        return replace(space, parameters=(*space.parameters[:2], warps, way))

    def open(self, problem: Problem, device: Device, place: Place) -> Any:
        session = super().open(problem, device, place)
        make = session.make

        def made(by_phase: Mapping[str, Candidate]) -> Any:
            trial = make(by_phase)
            measure = trial.measure
            trial.measure = lambda: dict.fromkeys(measure(), 100.0)
            warps = int(by_phase["dispatch"]["warp_per_block"])
            if warps >= FIRST_FAULTY and place.rank == 1:
                spoil(trial, FAULTS[warps - FIRST_FAULTY])
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
