"""One launch of Stage1, whole as the layer runs it, and taken apart into phases that have the machine for
themselves.

    whole    prepare, then the stage's run, on every rank as fast as it comes
    apart    prepare | pack, or route + qpack | puts | gemm1    with a barrier at each |
             packing      what the stage does to its rows before they can be sent; of direct stores nothing
             puts         the stage's move_rows but for packing, until all ranks' rows are here
             gemm1        every tile, all rows being here

Each phase's time is that of the slowest rank, so the sum of the phases is a launch that overlaps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import mori_bench
import mori_shmem
from mori_bench.protocol import timing_of

from mori_megamoe.launch import Call, Launch
from mori_megamoe.reference import RankInput
from mori_megamoe.stage1 import Stage1
from mori_megamoe.weights import StoredWeights

PACKING = ("pack", "route", "qpack")  # first words of spans that a stage tells its trace
ORDER = ("prepare", *PACKING, "puts", "gemm1", "fused")
Samples = dict[str, list[float]]  # phase -> microseconds, a value for each launch
_T = TypeVar("_T")


class Launches:
    """Launches of one stage on one rank that end after Stage1, and what their phases took."""

    def __init__(
        self, comm: mori_shmem.Communicator, stage: Stage1, given: RankInput, experts: StoredWeights
    ) -> None:
        self._comm, self._stage, self._runner = comm, stage, stage.runner
        self._call = Call(given.x, None, None, given.weights, given.ids, experts)
        self.samples: Samples = {}

    def whole(self, trace: mori_bench.Trace | None = None) -> Launch:
        """As the layer runs it. Also notes what of it is `run`, as phase "fused"."""
        launch = self._prepare()
        launch.trace = trace
        began_ns = time.monotonic_ns()
        self._stage.run(launch)
        self._note("fused", began_ns)
        return launch

    def apart(self) -> None:
        """Phase by phase."""
        comm, stage = self._comm, self._stage
        launch = self._timed("prepare", self._prepare)
        launch.trace = trace = mori_bench.Trace(comm.rank)
        self._timed("puts", lambda: self._move(launch))
        packing = self._packing(trace)
        self.samples["puts"][-1] -= sum(packing.values())
        for phase, us in packing.items():
            self.samples.setdefault(phase, []).append(us)
        launch.trace = None
        self._timed("gemm1", lambda: stage.gemm1(launch))

    def _move(self, launch: Launch) -> None:
        """Until everybody's rows are here, and this rank's have been read."""
        self._stage.move_rows(launch)
        for number in range(self._runner.problem.sends_per_rank):
            self._runner.wait_arrived(launch, number)
        for rank in range(self._comm.world_size):
            if rank != self._comm.rank:
                self._comm.queue(rank).quiet()

    @staticmethod
    def _packing(trace: mori_bench.Trace) -> dict[str, float]:
        """What the stage told its trace about it: "pack", or "pack segment 3 for rank 1"."""
        spent: dict[str, float] = {}
        for span in trace.spans:
            phase = span.name.split()[0]
            if span.lane == "stage1" and phase in PACKING:
                spent[phase] = spent.get(phase, 0.0) + (span.end_ns - span.start_ns) / 1e3
        return spent

    def _timed(self, phase: str, work: Callable[[], _T]) -> _T:
        """All ranks begin together."""
        self._comm.barrier()
        began_ns = time.monotonic_ns()
        done = work()
        self._note(phase, began_ns)
        return done

    def _prepare(self) -> Launch:
        return self._runner.prepare(self._call, quantize=not self._stage.quantizes)

    def _note(self, phase: str, began_ns: int) -> None:
        self.samples.setdefault(phase, []).append((time.monotonic_ns() - began_ns) / 1e3)


def timings(comm: mori_shmem.Communicator, samples: Samples, reps: int) -> dict[str, mori_bench.Timing]:
    """Collective: of the last `reps` launches, the slowest rank of each, and their median."""
    last = {phase: us[-(reps + 1) :] for phase, us in samples.items()}  # with the one that is thrown away
    by_rank = comm.all_gather(last)
    return {
        phase: timing_of([(of[phase], of[phase], of[phase]) for of in by_rank])
        for phase in ORDER
        if phase in last
    }
