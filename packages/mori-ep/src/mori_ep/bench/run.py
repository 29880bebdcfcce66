"""One configuration: checked, timed in turns with what one would use instead, and checked again.

The cases, in the order of the first repetition; the next goes backwards, and so on:
    dispatch, combine    each by itself
    pair                 one round: dispatch and then combine, as a layer makes them
    pair, views anew     the same with MORI_EP_DISABLE_VIEW_CACHE=1: what memoised views save
    all_to_all           both exchanges of the same rows by torch.distributed, see peers.py
A timed run is `rounds` calls one after the other, divided by their number. Until the last returns is the
host's enqueue, until the device is idle is the wall; on GPUs events around the calls give the device's time.
On the host target a call has done its work when it returns, so the three are one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mori_bench
import mori_shmem
import torch

from mori_ep.bench import check, peers
from mori_ep.bench.check import Checked
from mori_ep.bench.inputs import Given, Sizes, experts, given_for
from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.op import EpDispatchCombineOp
from mori_ep.prepared import Dispatched
from mori_ep.problem import Traffic

TURNS = 2  # different inputs, so that a result of the call before would show
VIEWS_ANEW = "pair, views anew"


@dataclass(frozen=True)
class Choice:
    """What is measured besides the sizes."""

    kernel_type: str
    quant_type: str
    zero_copy: bool
    num_qp: int
    rounds: int
    reps: int
    warmup: int
    compare: bool
    fault: str | None = None
    nodes: int = 1  # that the ranks are on, or that this machine stands for
    engine: str | None = None  # between them; None: as MORI_EP_INTERNODE_ENGINE says

    @property
    def across_nodes(self) -> bool:
        return EpDispatchCombineKernelType[self.kernel_type].across_nodes


@dataclass
class Found:
    """What one configuration gave."""

    sizes: Sizes
    choice: Choice
    world_size: int
    backend: str
    device: str
    checked: Checked
    again: Checked  # after the last timed call
    timings: dict[str, mori_bench.Timing]
    traffic: list[Traffic]  # by rank
    window_bytes: int
    trace: mori_bench.Trace
    notes: list[str] = field(default_factory=list)
    engine: str | None = None  # between nodes

    @property
    def validated(self) -> bool:
        return self.checked.ok and self.again.ok


class Round:
    """The calls of one op on one rank, with the inputs of each turn."""

    def __init__(self, op: EpDispatchCombineOp, sizes: Sizes, choice: Choice, inputs: list[Given]) -> None:
        self.op, self._sizes, self._choice = op, sizes, choice
        self._fault = mori_bench.Fault(choice.fault)
        world_size = op.config.world_size
        self._x = [self._fault.input(given.x, given.rank, world_size) for given in inputs]
        self._inputs = inputs
        self.out = torch.empty(0)
        self._y = [self._experts(turn) for turn in range(len(inputs))]

    def dispatch(self, turn: int) -> Dispatched:
        given = self._inputs[turn]
        got: Dispatched = self.op.dispatch(self._x[turn], given.weights, given.scales, given.ids)
        return got

    def _experts(self, turn: int) -> torch.Tensor:
        """What the experts make of the rows of this turn; made once, outside of what is timed."""
        rows, weights, _, ids, count = self.dispatch(turn)
        n = int(count)
        positions = self.op.get_dispatch_src_token_pos()
        return experts(rows[:n], positions, ids[:n], weights[:n], self.op.config, self._sizes.combine_dtype)

    def answers(self, turn: int) -> torch.Tensor:
        """Where combine finds the experts' rows: with zero copy they are put into the op's buffer,
        untimed."""
        if not self._choice.zero_copy:
            return self._y[turn]
        buffer = self.op.get_registered_combine_input_buffer(self._sizes.combine_dtype, self._sizes.hidden)
        buffer[: len(self._y[turn])] = self._y[turn]
        return buffer

    def combine(self, rows: torch.Tensor, turn: int) -> torch.Tensor:
        external = 0 if self._choice.zero_copy else 1
        out, _ = self.op.combine(rows, None, self._inputs[turn].ids, use_external_inp_buf=external)
        self.out = self._fault.output(out) if self._fault else out
        return self.out


def make_config(comm: Any, sizes: Sizes, choice: Choice) -> EpDispatchCombineConfig:
    """The configuration that a bench of these sizes runs, for a rank of so many."""
    nodes = {"gpu_per_node": comm.world_size // choice.nodes} if choice.across_nodes else {}
    return EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=sizes.experts,
        data_type=sizes.dtype,
        combine_dtype=sizes.combine_dtype,
        hidden_dim=sizes.hidden,
        max_num_inp_token_per_rank=max(1, sizes.tokens),
        num_experts_per_token=sizes.topk,
        max_token_type_size=max(sizes.dtype.itemsize, sizes.combine_dtype.itemsize),
        scale_dim=sizes.scale_dim,
        scale_type_size=4,
        kernel_type=EpDispatchCombineKernelType[choice.kernel_type],
        quant_type=choice.quant_type,
        num_qp_per_pe=choice.num_qp,
        **nodes,
    )


def check_round(
    round_: Round, sizes: Sizes, given: Given, turn: int, comm: mori_shmem.Communicator
) -> Checked:
    """Collective: one dispatch and one combine against the reference. `given` is on the CPU."""
    op = round_.op
    wrong = check.mismatched(op, sizes, round_.dispatch(turn), turn)
    out = round_.combine(round_.answers(turn), turn)
    return check.gathered(comm, wrong, check.loss(op, sizes, given, out), op.config)


def run(comm: mori_shmem.Communicator, sizes: Sizes, choice: Choice) -> Found:
    """Collective."""
    config = make_config(comm, sizes, choice)
    inputs = [given_for(sizes, comm.rank, comm.world_size, turn) for turn in range(TURNS)]
    here = [given.to(comm.device) for given in inputs]
    reason = peers.why_not(comm) if choice.compare else "not asked for"
    with EpDispatchCombineOp(config, comm) as op, _without_cache(config, comm) as anew:
        round_, other = Round(op, sizes, choice, here), Round(anew, sizes, choice, here)
        for turn in range(TURNS):
            checked = check_round(round_, sizes, inputs[turn], turn, comm)
            check_round(other, sizes, inputs[turn], turn, comm)
        cases = _cases(comm, round_, other, choice)
        if reason is None:
            peers.start(comm)
            peer = peers.AllToAll(comm, config, sizes, here[0])
            both = _in_turn(peer.dispatch, peer.combine)
            cases[f"all_to_all ({peers.backend_for(comm.backend)})"] = _case(comm, both, choice.rounds)
        timings = mori_bench.measure(
            cases, reps=choice.reps, warmup=choice.warmup, gather=comm.all_gather, before=comm.barrier
        )
        again = check.gathered(comm, 0, check.loss(op, sizes, inputs[0], round_.out), op.config)
        trace = _traced(comm, round_)
        traffic = comm.all_gather(_traffic(round_, sizes, choice, here[0]))
        device = mori_bench.cpu_name()
        if comm.device.type == "cuda":
            device = torch.cuda.get_device_name(comm.device)
        return Found(
            sizes,
            choice,
            comm.world_size,
            comm.backend if not choice.across_nodes else "host",
            device,
            checked,
            again,
            timings,
            traffic,
            op.window_bytes,
            trace,
            [f"no all_to_all beside it: {reason}"] if reason else [],
            getattr(comm, "engine", None),
        )


def _without_cache(config: EpDispatchCombineConfig, comm: mori_shmem.Communicator) -> EpDispatchCombineOp:
    """The same op with views made anew in every call."""
    before = os.environ.get("MORI_EP_DISABLE_VIEW_CACHE")
    os.environ["MORI_EP_DISABLE_VIEW_CACHE"] = "1"
    try:
        return EpDispatchCombineOp(config, comm)
    finally:
        if before is None:
            del os.environ["MORI_EP_DISABLE_VIEW_CACHE"]
        else:
            os.environ["MORI_EP_DISABLE_VIEW_CACHE"] = before


def _cases(
    comm: mori_shmem.Communicator, round_: Round, other: Round, choice: Choice
) -> dict[str, Callable[[], object] | mori_bench.Case]:
    """All with the inputs of turn 0, whose answers lie where combine finds them."""
    rows, rows_anew = round_.answers(0), other.answers(0)

    def pair(of: Round, answers: torch.Tensor) -> Callable[[], None]:
        def both() -> None:
            of.dispatch(0)
            of.combine(answers, 0)

        return both

    cases = {
        "dispatch": lambda: round_.dispatch(0),
        "combine": lambda: round_.combine(rows, 0),
        "pair": pair(round_, rows),
        VIEWS_ANEW: pair(other, rows_anew),
    }
    return {name: _case(comm, call, choice.rounds) for name, call in cases.items()}


def _in_turn(*calls: Callable[[], object]) -> Callable[[], None]:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def _case(comm: mori_shmem.Communicator, call: Callable[[], object], rounds: int) -> mori_bench.Case:
    """`rounds` calls, timed as the top of the file says."""
    if comm.device.type != "cuda":
        return mori_bench.Case(lambda: [call() for _ in range(rounds)], calls=rounds)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def start() -> None:
        began.record()
        for _ in range(rounds):
            call()
        ended.record()

    def finish() -> float:
        torch.cuda.synchronize(comm.device)
        return float(began.elapsed_time(ended) * 1e3)

    return mori_bench.Case(start, finish, calls=rounds)


def _traced(comm: mori_shmem.Communicator, round_: Round) -> mori_bench.Trace:
    """One more round, with the steps of every call."""
    trace = mori_bench.Trace(comm.rank)
    comm.barrier()
    round_.op.trace = trace
    rows = round_.answers(0)
    round_.dispatch(0)
    round_.combine(rows, 0)
    round_.op.trace = None
    return mori_bench.Trace.merge(comm.all_gather(trace))


def _traffic(round_: Round, sizes: Sizes, choice: Choice, given: Given) -> Traffic:
    *_, count = round_.dispatch(0)
    positions = round_.op.get_dispatch_src_token_pos()
    own = positions // round_.op.config.position_stride == round_.op.config.rank
    nodes = choice.nodes if choice.across_nodes else 1
    per_node = sizes.experts // nodes
    went = [(given.ids >= n * per_node) & (given.ids < (n + 1) * per_node) for n in range(nodes)]
    return Traffic(
        recv_rows=int(count),
        remote_rows=int(count) - int(own.sum()),
        node_rows=sum(int(to.any(1).sum()) for to in went),
        tokens=sizes.tokens,
        topk=sizes.topk,
        nodes=nodes,
        payload_bytes=sizes.hidden * sizes.dtype.itemsize,
    )
