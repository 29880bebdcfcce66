"""The op as mori-tune sees it:  mori-tune run --op gemm-ar --tokens 4096,8192,16384 --save

A problem is one (mode, wire, n, k, M); a candidate is the numbers of that mode's space, given to the op by
hand. A visit compares two calls with different operands with the sum of all ranks' exact products, times
rounds, and compares again. On a GPU a round is the replay of a graph of 4 calls, as a server would run
them; on the host it is one call. Ranks meet before each round.

Everything of torch is imported in the ranks' processes.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mori_tune import (
    GEMM_AR,
    Candidate,
    Device,
    GemmArShape,
    Place,
    Problem,
    Query,
    Refused,
    Space,
    SpaceError,
    WrongOutput,
    gemm_ar_space,
    hardware_of,
)
from mori_tune.spaces.gemm_ar import LAGS

from mori_gemm_ar.options import (
    GATHER_DTYPES,
    GATHER_TRANSPORTS,
    MODES,
    QUANTS,
    Options,
    resolve,
)
from mori_gemm_ar.problem import Problem as GemmProblem
from mori_gemm_ar.rules import PACKAGE, TUNED_BACKENDS, device_of, query_for, shape_of

if TYPE_CHECKING:
    import mori_shmem
    import torch

    from mori_gemm_ar.op import GemmAllReduce

PHASE = GEMM_AR.phase
GRAPH_CALLS = 4  # of one replay: what lies between two calls is then part of the time
NUM_TURNS = 2  # sets of operands: a call that does nothing would leave the other set's result
SIZES = {  # by backend: m, n, k unless asked
    "host": ((256,), (512,), 256),
    "cuda": ((4096, 8192, 16384), (7168,), 2048),
}
TUNED_MODES = {"host": ("fused-sdma",), "cuda": ("fused-lsa", "fused-sdma")}
HOST_BAND_ROWS = 64  # what a chunk is made of there


def words_of(allowed: Sequence[str]) -> Any:
    """An option type: words from `allowed`, with commas between."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if not set(words) <= set(allowed) or len(set(words)) != len(words):
            raise argparse.ArgumentTypeError(f"{text!r}: wanted one or more of {', '.join(allowed)}")
        return words

    return parse


def options_of(problem: Problem) -> Options:
    """The op's options that a problem stands for."""
    wanted = {name: problem[name] for name in ("mode", "quant", "gather_dtype", "gather_transport")}
    return resolve(**wanted)  # type: ignore[arg-type]


def sizes_of(problem: Problem) -> tuple[int, int, int, int]:
    """m, n, k and the number of ranks."""
    m, n, k, num_ranks = (problem[name] for name in ("m", "n", "k", "world_size"))
    assert isinstance(m, int)
    assert isinstance(n, int)
    assert isinstance(k, int)
    assert isinstance(num_ranks, int)
    return m, n, k, num_ranks


class GemmAr:
    """What mori-tune asks; see mori_tune.tunable."""

    name = "gemm-ar"
    package = PACKAGE
    formats = (GEMM_AR,)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("-k", type=int, help="k of each rank (default: 2048 on a GPU); N is --hidden")
        parser.add_argument(
            "--mode", type=words_of(MODES), metavar="LIST", help="default: what the backend is used with"
        )
        parser.add_argument("--quant", choices=QUANTS, default="blockscale")
        parser.add_argument(
            *("--gather-dtype", "--gather-dtypes"),
            dest="gather_dtypes",
            type=words_of(GATHER_DTYPES),
            default=GATHER_DTYPES,
            metavar="LIST",
            help="the wires of finished rows (default: both)",
        )
        parser.add_argument("--gather-transport", choices=GATHER_TRANSPORTS, help="default: the mode's own")

    def problems(self, options: argparse.Namespace, device: Device) -> Sequence[Problem]:
        if device.backend not in SIZES:
            raise SpaceError(f"mori-gemm-ar is not tuned on {device.backend}: {', '.join(SIZES)}")
        tokens, hidden, k = SIZES[device.backend]
        found = [
            self.problem(mode, options.quant, dtype, options.gather_transport)
            | {"n": n, "k": options.k or k, "m": m, "world_size": options.world_size or 2}
            for mode in options.mode or TUNED_MODES[device.backend]
            for dtype in options.gather_dtypes
            for n in options.hidden or hidden
            for m in options.tokens or tokens
        ]
        return [Problem(values) for values in found]

    def problem(self, mode: str, quant: str, dtype: str, transport: str | None) -> dict[str, Any]:
        if mode == "gemm-only":
            raise SpaceError("mode gemm-only: ranks do not meet, so there is nothing to tune")
        chosen = resolve(mode=mode, quant=quant, gather_dtype=dtype, gather_transport=transport)
        return {
            "mode": mode,
            "quant": quant,
            "gather_dtype": chosen.gather_dtype,
            "gather_transport": chosen.gather_transport,
        }

    def query(self, problem: Problem, phase: str, device: Device) -> Query:
        m, n, k, num_ranks = sizes_of(problem)
        return query_for(m, n, k, num_ranks, options_of(problem), device)

    def space(self, problem: Problem, device: Device) -> Space:
        m, _, _, num_ranks = sizes_of(problem)
        shape = shape_of(m, num_ranks, device.backend, options_of(problem), HOST_BAND_ROWS)
        space = gemm_ar_space(hardware_of(device), shape)
        if not space.parameters:
            raise SpaceError(f"{problem}: nothing to tune on {device.backend}; leave this mode or wire out")
        return space

    def default(self, problem: Problem, device: Device) -> Candidate:
        """What runs without a rule, in the words of the space."""
        m, _, _, num_ranks = sizes_of(problem)
        shape = shape_of(m, num_ranks, device.backend, options_of(problem), HOST_BAND_ROWS)
        numbers = host_numbers(shape) if device.backend == "host" else cuda_numbers(shape)
        return Candidate.of({p.name: numbers[p.name] for p in self.space(problem, device).parameters})

    def device(self, backend: str) -> Device:
        from mori_shmem.comm import backend_of

        found = backend_of(backend)
        if found not in TUNED_BACKENDS:
            raise SpaceError(f"{found}: its numbers cannot be tuned yet; {' and '.join(TUNED_BACKENDS)} can")
        return device_of(found, None if found == "host" else own_gpu())

    def open(self, problem: Problem, device: Device, place: Place) -> Session:
        return Session(problem, communicator(device.backend), place.seed)


def host_numbers(shape: GemmArShape) -> dict[str, int]:
    """What the host takes without a rule; of `chunks`, what becomes of the most."""
    from mori_gemm_ar.targets.host import limits

    chunks = max(c for c in range(1, limits.DEFAULT_CHUNKS + 1) if shape.num_bands({}) % c == 0)
    return {"chunks": chunks, "pull_blocks": limits.DEFAULT_PULL_BLOCKS}


def cuda_numbers(shape: GemmArShape) -> dict[str, int]:
    """What the cuda target takes without a rule; a band no larger than a slice, no lag beyond the bands."""
    from mori_gemm_ar.targets.cuda import limits

    if shape.pushes:
        rows = limits.FP8_BAND_ROWS if shape.gather_dtype == "fp8" else limits.BF16_BAND_ROWS
    else:
        rows = max(-(-shape.slice_rows // limits.DEFAULT_CHUNKS), limits.LEAST_CHUNK_ROWS)
    rows = min(rows, next((choice for choice in shape.band_choices if choice >= shape.slice_rows), rows))
    lag = min(limits.LAG, max(LAGS[0], -(-shape.slice_rows // rows)))
    return {"band_rows": rows, "lag": lag, "pull_blocks": limits.DEFAULT_PULL_BLOCKS}


def own_gpu() -> int:
    """This process's GPU, made current before CUDA starts, as `init` would."""
    from mori_shmem.targets.cuda.devices import choose_device, prepare_environment

    prepare_environment()
    return choose_device(int(os.environ.get("LOCAL_RANK", "0")))


@functools.cache
def communicator(backend: str) -> mori_shmem.Communicator:
    """One a process: sessions follow one another in it."""
    import mori_shmem

    return mori_shmem.init(backend)


class Session:
    """One rank's operands for a problem, and the sums that all ranks must end with."""

    def __init__(self, problem: Problem, comm: mori_shmem.Communicator, seed: int) -> None:
        self.comm, self.options = comm, options_of(problem)
        self.m, self.n, self.k, num_ranks = sizes_of(problem)
        self.turns = [
            self.operands_and_sum(comm.rank, num_ranks, seed * NUM_TURNS + t) for t in range(NUM_TURNS)
        ]

    def operands_and_sum(
        self, mine: int, num_ranks: int, seed: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """(a, b, a_scale, b_scale) of this rank, and every rank's product added up."""
        import torch

        from mori_gemm_ar.quant.quantize import dequantize, quantize

        wanted = torch.float64 if self.comm.backend == "host" else torch.float32
        total = torch.zeros(self.m, self.n, dtype=wanted, device=self.comm.device)
        own: tuple[torch.Tensor, ...] = ()
        for rank in range(num_ranks):
            generator = torch.Generator(self.comm.device).manual_seed(1000 * seed + rank)
            make = functools.partial(torch.randn, generator=generator, device=self.comm.device)
            quant = self.options.quant
            a, a_scale = quantize(make(self.m, self.k), quant, "a")
            b, b_scale = quantize(make(self.n, self.k), quant, "b")
            values = (dequantize(a, a_scale, quant, "a"), dequantize(b, b_scale, quant, "b"))
            total.addmm_(values[0].to(wanted), values[1].t().to(wanted))
            if rank == mine:
                own = (a, b, a_scale, b_scale)
        return own, total

    def make(self, by_phase: Mapping[str, Candidate]) -> Trial:
        from mori_shmem.errors import ArgumentError, UnsupportedShape

        from mori_gemm_ar.op import GemmAllReduce

        options, numbers = self.options, by_phase[PHASE].as_dict()
        try:
            op = GemmAllReduce(
                self.comm,
                n=self.n,
                k=self.k,
                m_max=self.m,
                mode=options.mode,
                quant=options.quant,
                gather_dtype=options.gather_dtype,
                gather_transport=options.gather_transport,
                tuned=False,
                self_test=False,  # every visit compares with the reference
                **numbers,  # type: ignore[arg-type]
            )
        except (ArgumentError, UnsupportedShape) as refusal:
            raise Refused(str(refusal)) from refusal
        return (HostTrial if self.comm.backend == "host" else GraphTrial)(self, op)

    def moved_bytes(self) -> Mapping[str, float]:
        problem = GemmProblem(self.m, self.n, self.k, self.comm.world_size)
        gathered = problem.gather_bytes(self.comm.rank, self.options.gather_dtype or "bf16")
        return {PHASE: problem.scatter_bytes(self.comm.rank) + gathered}

    def close(self) -> None:
        self.turns = []


class Trial:
    """The op with one candidate."""

    def __init__(self, session: Session, op: GemmAllReduce) -> None:
        self.session, self.op = session, op

    def call(self, turn: int) -> torch.Tensor:
        return self.op(*self.session.turns[turn][0])

    def check(self) -> Mapping[str, float]:
        """Both sets of operands, the timed one last."""
        return {"rel_l2": max(self.compare(turn) for turn in reversed(range(NUM_TURNS)))}

    def compare(self, turn: int) -> float:
        from mori_gemm_ar.reference import errors_of, tolerance

        session = self.session
        allowed = tolerance(session.options.gather_dtype or "bf16", session.k, session.comm.world_size)
        found = errors_of(self.call(turn), session.turns[turn][1], allowed)
        if not found.within(allowed):
            raise WrongOutput(
                f"rel_l2 {found.rel_l2:.2e} of {allowed.rel_l2:.2e} allowed, worst element "
                f"{found.worst_element:.2f} times what is allowed, {found.non_finite} not finite"
            )
        return found.rel_l2

    def close(self) -> None:
        self.op.close()


class HostTrial(Trial):
    def measure(self) -> Mapping[str, float]:
        self.session.comm.barrier()
        began = time.perf_counter_ns()
        self.call(0)
        return {PHASE: (time.perf_counter_ns() - began) / 1e3}


class GraphTrial(Trial):
    """Calls captured after the first check; what is compared later is what the replays left."""

    def __init__(self, session: Session, op: GemmAllReduce) -> None:
        super().__init__(session, op)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: torch.Tensor | None = None

    def call(self, turn: int) -> torch.Tensor:
        if self.graph is None or turn != 0:
            return super().call(turn)
        assert self.out is not None
        self.graph.replay()
        return self.out

    def measure(self) -> Mapping[str, float]:
        import torch

        if self.graph is None:
            self.graph = self.capture()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.session.comm.device)
        self.session.comm.barrier()
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize(self.session.comm.device)
        return {PHASE: start.elapsed_time(end) * 1e3 / GRAPH_CALLS}

    def capture(self) -> torch.cuda.CUDAGraph:
        import torch

        torch.cuda.synchronize(self.session.comm.device)
        self.session.comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                self.out = super().call(0)
        torch.cuda.synchronize(self.session.comm.device)
        self.session.comm.barrier()
        return graph

    def close(self) -> None:
        self.graph = self.out = None
        super().close()


TUNABLE = GemmAr()
