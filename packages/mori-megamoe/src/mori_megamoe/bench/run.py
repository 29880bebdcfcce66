"""One number of tokens: every mode checked, timed in turns, and checked again.

The cases, in the order of the first repetition; the next goes backwards, and so on:
    MODE            prepare and Stage1 of a launch that ends there, as the layer runs it
    MODE, apart     the same launch phase by phase (phases.py)
    MODE, layer     the whole layer
Every case begins with a barrier, which is not timed. All modes have one layer: the stages are open on it side
by side, and which one the next launch uses is switched between the cases. Timed launches have the inputs of
turn 0; the calls that are checked alternate between turns, so what came before them is never theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mori_bench
import mori_shmem

from mori_megamoe.bench import phases
from mori_megamoe.bench.check import Checked, Checker
from mori_megamoe.bench.inputs import TURNS, SharedWeights, given_for
from mori_megamoe.bench.modes import Mode
from mori_megamoe.bench.overlap import Overlap
from mori_megamoe.bench.sizes import Sizes
from mori_megamoe.launch import Launch
from mori_megamoe.layer import MegaMoE
from mori_megamoe.stage1 import Stage1

TEST_TURNS = (0, 1, 0, 1)
BEFORE, AFTER = (0, 1), (1, 0)  # of the timed launches


@dataclass(frozen=True)
class Choice:
    """What is done besides the sizes."""

    modes: Sequence[Mode]
    reps: int
    warmup: int
    fault: str | None = None
    copy_delay_us: int = 0  # for which every copy of the queues is held back


@dataclass(frozen=True)
class Found:
    """Of one mode at one number of tokens."""

    mode: Mode
    tokens: int
    checked: Checked
    timing: mori_bench.Timing
    layer: mori_bench.Timing
    phases: dict[str, mori_bench.Timing]
    trace: mori_bench.Trace  # of one more launch

    @property
    def overlap(self) -> Overlap:
        alone = {name: timing.max_rank_time_us for name, timing in self.phases.items()}
        return Overlap(self.timing.max_rank_time_us, alone, packs_in_launch="gemm1" in self.mode.options)


@dataclass(frozen=True)
class Traffic:
    """Of one rank in a launch, with the pairs that the launches before have chosen."""

    rows: int  # that its experts multiply, without padding
    padded_rows: int
    sent_bytes: int  # to other ranks, scales included
    received_bytes: int


@dataclass
class Measured:
    """Everything of one number of tokens."""

    tokens: int
    found: list[Found]  # by mode
    traffic: list[Traffic]  # by rank


class Bench:
    """A layer with the stages of all modes, on one rank. Collective to make."""

    def __init__(self, comm: mori_shmem.Communicator, sizes: Sizes, choice: Choice) -> None:
        self.comm, self.sizes, self.choice = comm, sizes, choice
        self._weights = SharedWeights(comm, sizes)
        p = sizes.problem
        self.moe = MegaMoE(
            rank=comm.rank,
            world_size=comm.world_size,
            model_dim=p.model_dim,
            inter_dim=p.inter_dim,
            experts=p.num_experts,
            topk=p.topk,
            quant="a8w4",
            **self._weights.of(comm.rank)._asdict(),
            max_tok_per_rank=p.max_tokens,
            swiglu_limit=p.swiglu_limit,
            comm=comm,
        )
        self.stages: dict[str, Stage1] = {mode.name: mode.stage_of(self.moe) for mode in choice.modes}
        comm.set_faults(delay_us=choice.copy_delay_us)

    def close(self) -> None:
        self.comm.set_faults(delay_us=0)
        self.moe.close()
        self._weights.close()

    def use(self, mode: Mode) -> Stage1:
        """From the next call on, on all ranks alike. Local: every stage is open already."""
        self.moe.stage1 = stage = self.stages[mode.name]
        return stage

    def checker(self, tokens: int) -> Checker:
        """For so many tokens on each rank."""
        given = [given_for(self.sizes, self.comm.rank, tokens, turn) for turn in range(TURNS)]
        answers = [self._weights.answer(of_turn) for of_turn in given]
        return Checker(self.moe, given, answers, self.choice.fault)

    def check(self, checker: Checker, mode: Mode, turns: Sequence[int]) -> Checked:
        """Collective: one mode's calls."""
        self.use(mode)
        return checker.check(self.comm, turns)

    def measure(self, tokens: int) -> Measured:
        """Collective."""
        comm, choice, checker = self.comm, self.choice, self.checker(tokens)
        checked = [self.check(checker, mode, BEFORE) for mode in choice.modes]
        given = given_for(self.sizes, comm.rank, tokens, 0)
        launches = [
            phases.Launches(comm, self.stages[mode.name], given, self.moe.weights) for mode in choice.modes
        ]
        cases: dict[str, Callable[[], object] | mori_bench.Case] = {}
        for mode, launch in zip(choice.modes, launches, strict=True):
            cases[mode.name] = launch.whole
            cases[f"{mode.name}, apart"] = launch.apart
            cases[f"{mode.name}, layer"] = self._layer_call(checker, mode)
        timings = mori_bench.measure(
            cases, reps=choice.reps, warmup=choice.warmup, gather=comm.all_gather, before=comm.barrier
        )
        found = []
        for mode, launch, before in zip(choice.modes, launches, checked, strict=True):
            apart = phases.timings(comm, launch.samples, choice.reps)
            trace = self._traced(launch)
            after = self.check(checker, mode, AFTER)
            timing, layer = timings[mode.name], timings[f"{mode.name}, layer"]
            found.append(Found(mode, tokens, before + after, timing, layer, apart, trace))
        return Measured(tokens, found, comm.all_gather(self._traffic(launches[0].whole())))

    def _layer_call(self, checker: Checker, mode: Mode) -> Callable[[], object]:
        def call() -> None:
            self.use(mode)
            checker.call(0)

        return call

    def _traced(self, launch: phases.Launches) -> mori_bench.Trace:
        """One more launch, as a picture."""
        trace = mori_bench.Trace(self.comm.rank)
        self.comm.barrier()
        launch.whole(trace)
        return mori_bench.Trace.merge(self.comm.all_gather(trace))

    def _traffic(self, launch: Launch) -> Traffic:
        p, me = self.sizes.problem, launch.rank
        of_rank = [_segments(d, p.experts_per_rank, p.num_experts) for d in range(p.num_ranks)]
        sent = sum(launch.counts[me][s] for d, segments in enumerate(of_rank) if d != me for s in segments)
        received = sum(launch.counts[r][s] for r in range(p.num_ranks) if r != me for s in of_rank[me])
        rows = sum(section.rows for section in launch.plan.sections)
        return Traffic(rows, launch.plan.num_rows, sent * p.row_bytes, received * p.row_bytes)


def _segments(rank: int, experts_per_rank: int, num_experts: int) -> list[int]:
    """That a rank receives: its experts', and its pair's."""
    first = rank * experts_per_rank
    return [*range(first, first + experts_per_rank), num_experts + rank]
