"""Visits of mori-tune in a rank's process: an op with a candidate's geometry, its checks, its rounds.

A session holds what a problem needs and does not change: the rows of all ranks, what dispatch must give for
them, what the experts make of them, and what combine must give. On a GPU it also holds the op: candidates
differ in how its calls are launched, so it is made once, with memory for either way, and told before each
visit.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError, UnsupportedShape
from mori_tune import Candidate, Device, Place, Problem, Refused, WrongOutput

from mori_ep import reference
from mori_ep.bench import inputs
from mori_ep.bench.check import LOSS
from mori_ep.keys import PHASES, geometry_of
from mori_ep.op import EpDispatchCombineOp
from mori_ep.plan import Geometry
from mori_ep.possible import config_of, dtypes_of
from mori_ep.reference import bytes_of
from mori_ep.tunable import across_nodes, hidden_of, number

NUM_TURNS = 2  # sets of rows: a call that does nothing would leave the other set's result
PAIRS = 5  # of a round on a GPU; the first is dropped
SLEEP_CYCLES, MOST_SLEEP_CYCLES = 2_000_000, 64_000_000  # about 1 and 32 ms


def own_gpu() -> int:
    """This process's GPU, made current before CUDA starts, as `init` would."""
    from mori_shmem.targets.cuda.devices import choose_device, prepare_environment

    prepare_environment()
    return choose_device(int(os.environ.get("LOCAL_RANK", "0")))


@functools.cache
def communicator(backend: str) -> mori_shmem.Communicator:
    """One a process: sessions follow one another in it."""
    return mori_shmem.init(backend)


@functools.cache
def nodes_communicator(ranks_per_node: int, engine: str) -> Any:
    """Ranks of one machine as if they were on several nodes, or of several."""
    from mori_ep import internode

    return internode.join(ranks_per_node=ranks_per_node, engine=engine, name="mori-tune")


def open_session(problem: Problem, device: Device, place: Place) -> Session:
    """Collective."""
    if across_nodes(problem):
        if device.backend != "host":
            raise UnsupportedShape(
                f"{problem['kernel_type']} goes across nodes, which {device.backend} does not"
            )
        comm = nodes_communicator(number(problem, "ranks_per_node"), str(problem["engine"]))
    else:
        comm = communicator(device.backend)
    return Session(problem, comm, place.seed)


@dataclass
class Turn:
    """One set of rows: what this rank gives, must get, makes of it, and must get back. On the op's device."""

    given: inputs.Given
    rows: torch.Tensor  # [received, row bytes] uint8
    scales: torch.Tensor | None  # likewise
    weights: torch.Tensor  # [received, k] fp32
    ids: torch.Tensor  # [received, k] int32
    positions: torch.Tensor  # [received] int32
    answers: torch.Tensor  # [received, hidden] what the experts of this rank make of the rows
    sums: torch.Tensor  # [n, hidden]


class Session:
    """One rank's side of a problem."""

    def __init__(self, problem: Problem, comm: mori_shmem.Communicator, seed: int) -> None:
        self.problem, self.comm = problem, comm
        self.zero_copy = bool(problem["zero_copy"])
        dtype, combine_dtype = dtypes_of(problem)
        self.sizes = inputs.Sizes(
            number(problem, "tokens"),
            hidden_of(problem, "dispatch"),
            number(problem, "topk"),
            number(problem, "experts"),
            dtype,
            combine_dtype,
            "uniform",
            number(problem, "scale_dim"),
            seed,
        )
        self.config = config_of(problem, comm)
        self.turns = [self._turn(turn) for turn in range(NUM_TURNS)]
        self.sleep_cycles = SLEEP_CYCLES
        self._op: EpDispatchCombineOp | None = None  # cuda: of all visits

    def _turn(self, turn: int) -> Turn:
        """From the reference alone; the op has no part in it."""
        sizes, config, device = self.sizes, self.config, self.comm.device
        parts = list(inputs.received_rows(sizes, config, turn))
        rows = torch.cat([bytes_of(given.x)[tokens] for given, tokens in parts]).to(device)
        weights = torch.cat([given.weights[tokens] for given, tokens in parts]).to(device)
        ids = torch.cat([given.ids[tokens] for given, tokens in parts]).to(device)
        scales = [bytes_of(given.scales)[tokens] for given, tokens in parts if given.scales is not None]
        places = [given.rank * config.position_stride + tokens.int() for given, tokens in parts]
        positions = torch.cat(places).to(device)
        mine = parts[config.rank][0].to(device)
        return Turn(
            mine,
            rows,
            torch.cat(scales).to(device) if scales else None,
            *(weights, ids, positions),
            inputs.experts(rows.view(sizes.dtype), positions, ids, weights, config, sizes.combine_dtype),
            inputs.answer(mine, config, sizes.combine_dtype),
        )

    def make(self, by_phase: Mapping[str, Candidate]) -> Trial:
        geometry = {phase: geometry_of(by_phase[phase].as_dict(), f"{phase}'s candidate") for phase in PHASES}
        try:
            op = self._made(geometry)
        except (ArgumentError, UnsupportedShape) as refusal:
            raise Refused(str(refusal)) from refusal
        return (GpuTrial if self.comm.device.type == "cuda" else HostTrial)(self, op)

    def _made(self, geometry: Mapping[str, Geometry]) -> EpDispatchCombineOp:
        """The op with this geometry. Collective."""
        if self.comm.device.type != "cuda":
            return EpDispatchCombineOp(self.config, self.comm, geometry=geometry)
        if self._op is None:
            either = dict.fromkeys(PHASES, Geometry(low_latency=1))
            self._op = EpDispatchCombineOp(self.config, self.comm, geometry=either)
        for phase in PHASES:
            reason = self._op._runner.why_not_launch(geometry[phase])
            if reason is not None:
                raise Refused(f"{phase}: {reason}")
        self._op.launch_with(geometry)
        return self._op

    def moved_bytes(self) -> Mapping[str, float]:
        """Payload of the rows that this rank receives, and of as many on their way home."""
        received, sizes = len(self.turns[0].ids), self.sizes
        home = number(self.problem, "hidden") * sizes.combine_dtype.itemsize
        return {
            "dispatch": float(received * sizes.hidden * sizes.dtype.itemsize),
            "combine": float(received * home),
        }

    def close(self) -> None:
        self.turns = []
        if self._op is not None:
            self._op.close()


class Trial(ABC):
    """The op with one candidate."""

    def __init__(self, session: Session, op: EpDispatchCombineOp) -> None:
        self.session, self.op = session, op

    # ---- calls ----

    def dispatch(self, turn: Turn) -> Any:
        given = turn.given
        return self.op.dispatch(given.x, given.weights, given.scales, given.ids)

    def answers(self, turn: Turn) -> torch.Tensor:
        """Where combine finds the experts' rows; with zero copy they are put into the op's buffer."""
        if not self.session.zero_copy:
            return turn.answers
        buffer = self.op.get_registered_combine_input_buffer(turn.answers.dtype, turn.answers.shape[1])
        buffer[: len(turn.answers)] = turn.answers
        return buffer

    def combine(self, rows: torch.Tensor, turn: Turn) -> torch.Tensor:
        out, _ = self.op.combine(rows, None, turn.given.ids)
        return out

    # ---- is it right? ----

    def check(self) -> Mapping[str, float]:
        """Both sets of rows, the timed one last."""
        found = [self.compare(turn) for turn in reversed(self.session.turns)]
        return {name: max(f[name] for f in found) for name in found[0]}

    def compare(self, turn: Turn) -> dict[str, float]:
        """Dispatch byte for byte, combine to the bit or within what its transport may lose."""
        wrong = self.mismatched(turn, self.dispatch(turn))
        if wrong:
            raise WrongOutput(f"dispatch: {wrong} of {len(turn.ids)} rows are not what their source gave")
        out = self.combine(self.answers(turn), turn)[: len(turn.sums)]
        error = reference.rel_l2(out.float(), turn.sums.float())
        allowed = LOSS[self.op.config.quant_type]
        if self.op.config.kernel_type.across_nodes:
            allowed = max(allowed, 1e-2)  # rounded once per node, and once at the end
        if not error <= allowed:
            raise WrongOutput(f"combine: rel_l2 {error:.2e} of {allowed:.2e} allowed")
        return {"mismatched_rows": 0.0, "rel_l2": error}

    def mismatched(self, turn: Turn, got: Any) -> int:
        rows, weights, scales, ids, count = got
        n = len(turn.ids)
        if int(count) != n:
            return abs(int(count) - n)
        right = (bytes_of(rows[:n]) == turn.rows).all(1)
        right &= (weights[:n] == turn.weights).all(1) & (ids[:n] == turn.ids).all(1)
        right &= self.op.get_dispatch_src_token_pos() == turn.positions
        if turn.scales is not None:
            right &= (bytes_of(scales[:n]) == turn.scales).all(1)
        return int((~right).sum())

    @abstractmethod
    def measure(self) -> Mapping[str, float]:
        """One round: microseconds of each phase."""

    def close(self) -> None:  # noqa: B027 - most have nothing of their own
        """Nothing: a GPU's op serves the next visit."""


class HostTrial(Trial):
    def measure(self) -> Mapping[str, float]:
        turn, meet = self.session.turns[0], self.session.comm.barrier
        meet()
        began = time.perf_counter_ns()
        self.dispatch(turn)
        dispatched = time.perf_counter_ns()
        rows = self.answers(turn)
        meet()
        again = time.perf_counter_ns()
        self.combine(rows, turn)
        ended = time.perf_counter_ns()
        return {"dispatch": (dispatched - began) / 1e3, "combine": (ended - again) / 1e3}

    def close(self) -> None:
        self.op.close()


class GpuTrial(Trial):
    def measure(self) -> Mapping[str, float]:
        session, turn = self.session, self.session.turns[0]
        rows = self.answers(turn)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * PAIRS + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(session.comm.device)
        session.comm.barrier()
        torch.cuda._sleep(session.sleep_cycles)  # type: ignore[no-untyped-call]
        events[0].record()
        for pair in range(PAIRS):
            self.dispatch(turn)
            events[2 * pair + 1].record()
            self.combine(rows, turn)
            events[2 * pair + 2].record()
        if events[0].query():  # type: ignore[no-untyped-call]
            # the GPU did not sleep until all was queued: it waited for the host
            session.sleep_cycles = min(2 * session.sleep_cycles, MOST_SLEEP_CYCLES)
        torch.cuda.synchronize(session.comm.device)
        spans = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
        return {"dispatch": mean(spans[2::2]), "combine": mean(spans[3::2])}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
