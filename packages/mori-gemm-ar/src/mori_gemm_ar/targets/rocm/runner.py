"""Calls of one op on this rank: what was prepared for their M, launched on the caller's stream.

A call of an M that was there before launches kernels and does nothing else: their arguments were made the
first time, and nothing in them depends on the call but where the operands lie. On a GPU a call returns when
its kernels are queued, and what goes wrong in them is raised by the next call, or by `comm.check`. On the
software node, whose windows are CPU tensors, it returns when they have ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mori_shmem
import torch
from mori_shmem.core import CoreError
from mori_shmem.errors import ArgumentError, CollectiveMismatch, MoriError, PeerDied, UnsupportedShape
from mori_shmem.wording import worded

from mori_gemm_ar.options import Options
from mori_gemm_ar.plan import Phase, Plan
from mori_gemm_ar.targets.rocm.clock import PhaseClock, Span
from mori_gemm_ar.targets.rocm.gemm import Gemm, Partials, shape_for
from mori_gemm_ar.targets.rocm.gemm_kernel import gemm_kernel
from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.launch import Launch, Launches, here_of
from mori_gemm_ar.targets.rocm.limits import PACK
from mori_gemm_ar.targets.rocm.meet import CALLED, FINISHED, OTHER_M, PARTIALS
from mori_gemm_ar.targets.rocm.regions import M_BITS, Regions
from mori_gemm_ar.targets.rocm.tiles import Slices, TileShape
from mori_gemm_ar.targets.rocm.wire import ToOutput, Wire, one_slice
from mori_gemm_ar.targets.rocm.wires import ToPeers, ToQueues

OUTPUT, QUEUES, PEERS = ToOutput(), ToQueues(), ToPeers()
WIRES: dict[str, Wire] = {"fused-sdma": QUEUES, "fused-lsa": PEERS}
_AWAITED = {PARTIALS: "partial sums", FINISHED: "finished rows"}  # by `what` of a record
_PAUSES_S = (50e-6, 5e-3)  # between two looks of the host, the first and the longest
_ENGINES_S = 1.0  # for what copy engines still hold
_FINISH_S = 5.0  # what kernels need behind a wait that was late
_DEATH_GRACE_S = 0.25  # kernels that need no peer any more may end in this time after one has died


@dataclass(frozen=True)
class Product:
    """The GEMM for one M: `where` its wire finds what it needs, and the table that this may point to."""

    kernel: Kernel
    where: int
    tiles: int
    table: torch.Tensor | None

    def launch(self, partials: Partials, stream: int) -> None:
        """Queue it."""
        self.kernel.launch(partials.product(self.where), self.tiles, stream)


@dataclass(frozen=True)
class Prepared:
    """All kernels of a call of some M."""

    start: Launch | None
    gemm: Product | None
    after: tuple[tuple[Phase, tuple[Launch, ...]], ...]  # by phase


class Runner:
    """One op's window on this rank."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Regions,
        options: Options,
        m_max: int,
    ) -> None:
        if (options.sdma_queues or 1) > 1:
            raise ArgumentError(
                f"sdma_queues={options.sdma_queues}: kernels of this target have one copy queue to each "
                "peer, which is one link; several would share it and pay for each packet again"
            )
        if layout.slice_rows * layout.n // PACK >= 1 << 31:
            raise UnsupportedShape(
                f"m_max={m_max}, n={layout.n} on {comm.world_size} ranks: a rank's slice has "
                f"{layout.slice_rows * layout.n} elements, at most {PACK << 31} can be counted"
            )
        self._comm, self._window, self._layout, self._options = comm, window, layout, options
        self._launches = Launches(here_of(comm, window, options), layout, options)
        self._prepared: dict[int, Prepared] = {}
        self._number = 0
        self._failed = False

    def run(
        self, plan: Plan, number: int, partials: Any, *, timed: bool = False
    ) -> tuple[torch.Tensor, list[Span]]:
        """(the finished rows, a view of the window; what ran when, if `timed`)."""
        self._number = number
        self._check()  # what a kernel of an earlier call has left
        if not isinstance(partials, Partials):  # a self-test's constant
            gemm = Gemm(plan.problem.n, plan.problem.k, self._options.quant, 0)
            partials = gemm.constant(partials.value, plan.problem.m, self._comm.device)
        prepared = self._prepared.get(plan.problem.m)
        if prepared is None:
            prepared = self._prepared[plan.problem.m] = self._prepare(plan, partials)
        clock = PhaseClock(self._comm.device, self._wait) if timed else None
        self._launch(prepared, partials, clock)
        spans = clock.spans() if clock else []
        if self._comm.device.type == "cpu":
            self._wait()
        return self.output(plan.problem.m), spans

    def _launch(self, prepared: Prepared, partials: Partials, clock: PhaseClock | None) -> None:
        stream = self._comm.core.callers_stream()
        if prepared.start:
            prepared.start.kernel.launch(prepared.start.args, prepared.start.blocks, stream)
        if prepared.gemm:
            prepared.gemm.launch(partials, stream)
        if clock:
            clock.mark(Phase.GEMM)
        for phase, launches in prepared.after:
            for launch in launches:
                launch.kernel.launch(launch.args, launch.blocks, stream)
            if clock:
                clock.mark(phase)

    # ---- once per M ----

    def _prepare(self, plan: Plan, partials: Partials) -> Prepared:
        """Arguments of all kernels, and the kernels themselves: the first of a kind is compiled here."""
        after = self._launches.after_gemm(plan) if plan.options.communicates else []
        start = self._launches.start(plan) if plan.options.communicates else None
        for launch in [start, *after] if start else after:
            launch.kernel.compile(launch.args, launch.blocks)
        gemm = self._gemm(plan, partials) if plan.problem.m else None
        by_phase = tuple((phase, tuple(same)) for phase, same in groupby(after, lambda launch: launch.phase))
        return Prepared(start, gemm, by_phase)

    def _gemm(self, plan: Plan, partials: Partials) -> Product:
        problem, wire = plan.problem, WIRES.get(plan.options.mode, OUTPUT)
        shape = shape_for(problem.m, problem.n, problem.num_ranks)
        kernel = gemm_kernel(plan.options.quant, problem.n, shape, wire)
        table, where, cut = self._destination(plan, wire, shape)
        tiles = cut.num_tiles(-(-problem.n // shape.cols))
        kernel.compile(partials.product(where), tiles)
        return Product(kernel, where, tiles, table)

    def _destination(
        self, plan: Plan, wire: Wire, shape: TileShape
    ) -> tuple[torch.Tensor | None, int, Slices]:
        """(the wire's table, what it is given, how rows are cut)."""
        if wire is OUTPUT:
            return None, self._launches.plain_rows(plan), one_slice(plan.problem.m, shape)
        cut = self._launches.slices(plan, shape)
        words = self._launches.table(cut)
        table = torch.tensor(words, dtype=torch.int64).to(self._comm.device)
        return table, table.data_ptr(), cut

    # ---- results, and what went wrong ----

    def output(self, m: int) -> torch.Tensor:
        """[m, n], a view of my part of the window."""
        return self._window.tensor((m, self._layout.n), torch.bfloat16, self._layout.output_row(0))

    def poison(self, m: int) -> None:
        """Fill everything with NaN, so that nothing old can pass for new."""
        data = self._layout.offsets["c"]
        self._window.tensor((self._layout.nbytes - data,), torch.uint8, data).fill_(0xFF)
        if self._comm.device.type == "cuda":
            torch.cuda.synchronize(self._comm.device)

    def ready(self, plan: Plan, partials: Partials) -> None:
        """Nothing is kept beside what `run` prepares for an M."""

    def ran(self, m: int) -> str:
        """Every call goes the op's own way."""
        return self._options.mode

    def close(self) -> None:
        """Before the window goes: until no kernel uses it, since without its window an engine or a wave would
        fault. Kernels that wait for a rank that died are made to end; others have their deadlines."""
        give_up = time.monotonic() + self._comm.timeout_s + _FINISH_S
        while self._busy() and time.monotonic() < give_up:
            self._failed = bool(self._comm.core.give_up_kernels()) or self._failed
            time.sleep(_PAUSES_S[1])
        if self._failed:
            time.sleep(_ENGINES_S)  # nobody waits for the puts of a call that failed

    def _busy(self) -> bool:
        """Whether kernels of the caller's stream may still use the window."""
        core = self._comm.core
        return not (core.closed or core.device.is_idle(core.callers_stream()))

    def _wait(self) -> None:
        """Until this rank's kernels have ended, which they are made to do when a rank dies. A wait of theirs
        that was late ends those behind it, too, so the record is looked at last: taken earlier, it would let
        them wait for their own deadlines."""
        core, pause_s, dead_since = self._comm.core, _PAUSES_S[0], None
        stream = core.callers_stream()
        while not core.device.is_idle(stream):
            dead = core.dead_ranks()
            now = time.monotonic()
            dead_since = (dead_since or now) if dead else None
            self._failed = self._failed or bool(dead)
            if dead_since is not None and now - dead_since > _DEATH_GRACE_S:
                core.give_up_kernels()
                raise PeerDied(
                    f"rank {self._comm.rank} of {self._comm.world_size}, in {self._doing}: rank "
                    f"{', '.join(map(str, dead))} died",
                    rank=self._comm.rank,
                    peers=dead,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])
        self._check()

    @property
    def _doing(self) -> str:
        return f"call {self._number} of its GEMM + all-reduce"

    def _check(self) -> None:
        try:
            self._comm.core.check()
        except CoreError as error:
            raise self._worded(error) from None

    def _worded(self, error: CoreError) -> MoriError:
        self._failed, info = True, error.info
        what, _, _ = str(info.get("purpose", "")).removeprefix("flag ").partition("/")
        if info.get("what") == "kernel" and what == str(OTHER_M):
            return CollectiveMismatch(
                f"rank {self._comm.rank} called with M={info['wanted']}, rank {info['peer']} with "
                f"M={info['seen']} (call {self._number} of this op): all ranks must call with the same M, in "
                "the same order"
            )
        if what == str(CALLED):  # the record has the low 32 bits of (call, M)
            behind = (info["wanted"] - info["seen"]) >> M_BITS & 0xFF
            info.update(seen=self._number - behind, wanted=self._number, purpose="the number of the call")
        elif what.isdigit() and int(what) in _AWAITED:
            info["purpose"] = f"the count of {_AWAITED[int(what)]}"
        return worded(error, self._comm, self._doing)
