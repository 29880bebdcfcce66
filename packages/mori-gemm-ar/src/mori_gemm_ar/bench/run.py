"""One rank's part of a run: make the ops, check each, time them in turns, check again, trace one call.

    check   a call with other operands first, so that what a result is compared with was never in any buffer;
    then
            the checked call, against float64 (check.py)
    time    all cases in turns (mori_bench.measure), operands alternating from call to call
    check   the last timed call had the checked operands: its bits must be those from before
What lies inside the clock is the op's call as a caller sees it: B is widened, the product made, rows sent and
received, and the finished matrix is there on this rank. A barrier before each call is outside of it.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import mori_bench
import mori_shmem
import torch
import torch.distributed as dist
from mori_shmem.errors import UnsupportedShape

from mori_gemm_ar.bench.cases import Case
from mori_gemm_ar.bench.check import Checked, check_product, check_sum, exact
from mori_gemm_ar.bench.inputs import operands
from mori_gemm_ar.op import GemmAllReduce
from mori_gemm_ar.problem import Problem
from mori_gemm_ar.settings import KERNELS
from mori_gemm_ar.targets import target_for
from mori_gemm_ar.testing import Operands

TURNS = 2  # operands 0 warm up, operands 1 are checked, both are timed
CHECKED = 1
UNFUSED = "unfused"
UNFUSED_ROUNDINGS = 4.0  # a ring adds in bf16, rounding at every step


@dataclass
class Contender:
    """Something that is measured: one case's op, or the baseline."""

    label: str
    call: Callable[[int], torch.Tensor]  # with the operands of a turn
    check: Callable[[torch.Tensor], Checked]
    phases: Callable[[], dict[str, float]] = dict  # microseconds of the last call on this rank
    case: Case | None = None
    op: GemmAllReduce | None = None
    phase_runs: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """One case's outcome, the same on every rank."""

    label: str
    case: Case | None  # None for the baseline
    timing: mori_bench.Timing
    checked: Checked
    still_right: bool  # after the last repetition
    phases_us: dict[str, float]  # median over repetitions of the slowest rank
    window_bytes: int
    settings: dict[str, object]  # every effective option, and what the plan made of them

    @property
    def validated(self) -> bool:
        """The outcome of comparing with the reference, in this run."""
        return self.checked.ok and self.still_right


@dataclass(frozen=True)
class Run:
    """What a whole run found."""

    problem: Problem
    measured: list[Measured]
    refused: dict[str, str]  # by label: why this target cannot do a case
    trace: mori_bench.Trace
    backend: str
    device: str


def run(args: argparse.Namespace, cases: list[Case]) -> tuple[Run, int]:
    """Collective: (what was found, this rank)."""
    begins_gloo = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if begins_gloo:
        dist.init_process_group("gloo")  # for the reference and the baseline
    with mori_shmem.init(args.backend) as comm:
        problem = Problem(args.m, args.n, args.k, comm.world_size)
        inputs = operands(problem, comm.rank, args.quant, args.seed, turns=TURNS)
        alone = any(not case.options.communicates for case in cases)
        want = exact(inputs[CHECKED], problem, comm.rank, comm.all_gather, keep_product=alone)

        def check(out: torch.Tensor, case: Case | None) -> Checked:
            rounds, dtype = (1.0, case.options.gather_dtype) if case else (UNFUSED_ROUNDINGS, "bf16")
            if dtype is None:
                return check_product(out.cpu(), want, problem, comm.all_gather)
            return check_sum(out.cpu(), want, problem, comm.rank, comm.all_gather, dtype, roundings=rounds)

        given = [x.to(comm.device) for x in inputs]
        contenders, refused = _contenders(comm, problem, cases, given, args, check)
        measured = _measure(comm, contenders, args)
        trace = _traced(comm, contenders)
        for contender in contenders:
            if contender.op is not None:
                contender.op.close()
        device = _device_name(comm)
        found, rank = Run(problem, measured, refused, trace, comm.backend, device), comm.rank
    if begins_gloo:
        dist.destroy_process_group()
    return found, rank


def _device_name(comm: mori_shmem.Communicator) -> str:
    if comm.device.type != "cpu":
        return torch.cuda.get_device_name(comm.device)
    software = "simulated MI355X on " if comm.backend == "rocm" else ""
    return software + mori_bench.cpu_name()


def _contenders(
    comm: mori_shmem.Communicator,
    problem: Problem,
    cases: list[Case],
    given: list[Operands],
    args: argparse.Namespace,
    check: Callable[[torch.Tensor, Case | None], Checked],
) -> tuple[list[Contender], dict[str, str]]:
    """(what is measured; of `--mode all` the cases that this target cannot do, with its reasons)."""
    contenders, refused = [], {}
    for case in cases:
        try:
            contender = _contender(comm, problem, case, given, args.fault, check, args.time_phases)
            contenders.append(contender)
        except UnsupportedShape as reason:
            if args.mode != "all":
                raise
            refused[case.label] = str(reason)
    if args.compare == "unfused":
        contenders.append(_unfused(comm, problem, given, args.quant, check))
    return contenders, refused


def _contender(
    comm: mori_shmem.Communicator,
    problem: Problem,
    case: Case,
    inputs: list[Operands],
    fault_name: str | None,
    check: Callable[[torch.Tensor, Case | None], Checked],
    time_phases: bool,
) -> Contender:
    op = GemmAllReduce(comm, n=problem.n, k=problem.k, m_max=max(1, problem.m), **case.given)
    if time_phases:  # a GPU tells of its phases only when they are asked for
        op.trace = mori_bench.Trace(comm.rank)
    fault = mori_bench.Fault(fault_name)
    given = [(fault.input(x.a, comm.rank, comm.world_size), x.b, x.a_scale, x.b_scale) for x in inputs]

    def call(turn: int) -> torch.Tensor:
        out: torch.Tensor = fault.output(op(*given[turn]))
        return out

    return Contender(
        case.label, call, lambda out: check(out, case), lambda: op.last_phases_us, case=case, op=op
    )


def _unfused(
    comm: mori_shmem.Communicator,
    problem: Problem,
    inputs: list[Operands],
    quant: str,
    check: Callable[[torch.Tensor, Case | None], Checked],
) -> Contender:
    """The same product, all rows at once, and then gloo's all-reduce."""
    gemm = target_for(comm.backend).Gemm(problem.n, problem.k, quant, max(1, problem.m))
    out = torch.empty(problem.m, problem.n, dtype=torch.bfloat16)

    def call(turn: int) -> torch.Tensor:
        x = inputs[turn]
        partials = gemm.partials(x.a, x.b, *x.grids())
        partials.begin()
        partials.store(problem.all_rows, out)
        if comm.world_size > 1:
            dist.all_reduce(out)
        return out

    return Contender(UNFUSED, call, lambda out: check(out, None))


def _measure(
    comm: mori_shmem.Communicator, contenders: list[Contender], args: argparse.Namespace
) -> list[Measured]:
    """Check, time, check, as the top of the file says."""
    checks = {}
    for contender in contenders:
        contender.call(0)
        checks[contender.label] = contender.check(contender.call(CHECKED))

    last: dict[str, torch.Tensor] = {}
    first_turn = (CHECKED + args.warmup + args.reps) % TURNS  # so that the last call has the checked operands

    def timed(contender: Contender) -> mori_bench.Case:
        turns = itertools.count(first_turn)

        def start() -> None:
            last[contender.label] = contender.call(next(turns) % TURNS)

        def finish() -> None:
            if comm.device.type == "cuda":
                torch.cuda.synchronize(comm.device)
            contender.phase_runs.append(contender.phases())

        return mori_bench.Case(start, finish)

    timings = mori_bench.measure(
        {contender.label: timed(contender) for contender in contenders},
        reps=args.reps,
        warmup=args.warmup,
        gather=comm.all_gather,
        before=comm.barrier,
    )
    found = []
    for contender in contenders:
        checked, again = checks[contender.label], contender.check(last[contender.label])
        op, case = contender.op, contender.case
        found.append(
            Measured(
                contender.label,
                case,
                timings[contender.label],
                checked,
                still_right=again.ok and (again.digest == checked.digest or case is None),
                phases_us=_phase_medians(comm.all_gather(contender.phase_runs[-args.reps :])),
                window_bytes=op.window_bytes if op else 0,
                settings=_settings(op, args.m) if op else {"all_reduce": "gloo"},
            )
        )
    return found


def _phase_medians(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """Per phase and repetition the slowest rank, then the median over repetitions."""
    return {
        phase: sorted(max(run[phase] for run in of_ranks) for of_ranks in zip(*ranks, strict=True))[
            len(ranks[0]) // 2
        ]
        for phase in ranks[0][0]
    }


def _settings(op: GemmAllReduce, m: int) -> dict[str, object]:
    plan = op.plan(m)
    rule = op.rule(m)
    return {
        **asdict(plan.options),
        "kernels": op.settings[KERNELS],
        "tuned_rule": None if rule is None else rule.outcome,
        "bands_per_slice": plan.num_bands,
        "puts_per_slice": plan.num_chunks if plan.options.scatters_by_sdma else 0,
        "parts_per_slice": plan.num_parts if plan.options.gather_transport == "sdma" else 0,
    }


def _traced(comm: mori_shmem.Communicator, contenders: list[Contender]) -> mori_bench.Trace:
    """One more call of every case, with every band and put recorded; its lane `call` says which it is."""
    trace = mori_bench.Trace(comm.rank)
    for contender in contenders:
        if contender.op is None:
            continue
        comm.barrier()
        contender.op.trace = trace
        with trace.span(contender.label, lane="call"):
            contender.call(0)
        contender.op.trace = None
    return mori_bench.Trace.merge(comm.all_gather(trace))
