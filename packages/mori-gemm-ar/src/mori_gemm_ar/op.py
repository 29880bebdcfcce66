"""`GemmAllReduce`: out = sum over ranks of A_r @ B_r^T, bf16 on every rank, as one call.

    with GemmAllReduce(comm, n=7168, k=2048, m_max=16384, quant="blockscale", mode="fused-sdma") as op:
        out = op(a, b, a_scale, b_scale)   # [m, n]; a view of the op's window, good until its next call

When it is made, all ranks compare what they were given, allocate the window, and (unless told not to) prove
that the transport moves bytes. A call checks its arguments before it waits for anyone, finds the plan for its
M, and hands it to the target of the communicator's backend. Every M up to m_max works, in any order.

A call that fails while ranks are under way (a peer died, or did not come) leaves the op unusable: what its
flags and buffers hold is not known any more. An argument that is refused leaves it as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import mori_shmem
import torch
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    LayoutError,
    MoriError,
    PeerTimeout,
    TransportInert,
    UnsupportedShape,
)
from mori_shmem.settings import Snapshot

from mori_gemm_ar.options import Options, resolve
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.problem import Problem
from mori_gemm_ar.quant.operands import Looks, a_scale_grid, b_scale_grid, check_codes, looks_of
from mori_gemm_ar.quant.padding import pad_rows
from mori_gemm_ar.reference import fp8_wire
from mori_gemm_ar.rules import Rules
from mori_gemm_ar.settings import KERNELS, PULL_BLOCKS, SELF_TEST, TABLE
from mori_gemm_ar.support import (
    Support,
    check_options,
    check_sizes,
    check_tuned,
    defaults_of,
    supports,
    window_bytes,
)
from mori_gemm_ar.targets import target_for, target_name

if TYPE_CHECKING:
    from mori_bench import Trace
    from mori_tune import Decision

PLANS_KEPT = 256
Work = tuple[torch.Tensor, Sequence[Any]]  # a call's rows, and spans where it was timed


class GemmAllReduce:
    """One row-parallel layer's GEMM and all-reduce. See the module; the options are told in options.py."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        *,
        n: int,
        k: int,
        m_max: int,
        quant: str = "blockscale",
        mode: str = "fused-sdma",
        gather_dtype: str | None = None,
        gather_transport: str | None = None,
        chunks: int | None = None,
        sdma_queues: int | None = None,
        fuse_quantize: bool | None = None,
        fuse_reduce_push: bool | None = None,
        gather_bands: int | None = None,
        publish: str | None = None,
        pull_blocks: int | None = None,
        band_rows: int | None = None,
        lag: int | None = None,
        gather_scale: str | None = None,
        small_m: str | None = None,
        small_m_below: int | None = None,
        tuned: bool | None = None,
        kernels: str | None = None,
        self_test: bool | None = None,
    ) -> None:
        """Collective. `self_test=False` (MORI_GEMM_AR_SELF_TEST=0) leaves out the proof of the transport;
        `tuned=False` (MORI_GEMM_AR_LAUNCH_CONFIG_MODE=MANUAL) the tuned rules, see rules.py;
        `kernels="triton"` (MORI_GEMM_AR_KERNELS) takes the readable ones, see targets/triton."""
        self.settings = TABLE.read({PULL_BLOCKS: pull_blocks, SELF_TEST: self_test, KERNELS: kernels})
        name = target_name(comm.backend, self.settings[KERNELS])
        target = target_for(name)
        self.options: Options = resolve(
            mode=mode,
            quant=quant,
            gather_dtype=gather_dtype,
            gather_transport=gather_transport,
            chunks=chunks,
            sdma_queues=sdma_queues,
            fuse_quantize=fuse_quantize,
            fuse_reduce_push=fuse_reduce_push,
            gather_bands=gather_bands,
            publish=publish,
            pull_blocks=pull_blocks,
            band_rows=band_rows,
            lag=lag,
            gather_scale=gather_scale,
            small_m=small_m,
            small_m_below=small_m_below,
            default_pull_blocks=default_pull_blocks(self.settings, target),
            **defaults_of(name),
        )
        check_sizes(name, n, k, m_max)
        check_tuned(tuned)
        flags = {"fuse_reduce_push": fuse_reduce_push, "publish": publish, "small_m": small_m}
        numbers = {"chunks": chunks, "sdma_queues": sdma_queues, "gather_bands": gather_bands}
        numbers |= {"pull_blocks": pull_blocks, "band_rows": band_rows, "lag": lag}
        check_options(name, self.options, {**flags, **numbers})
        self.comm, self.n, self.k, self.m_max = comm, n, k, m_max
        self.trace: Trace | None = None  # set one, and every call adds its phases, bands and puts
        self.last_phases_us: dict[str, float] = {}  # of the last call on this rank, by phase
        self._target = target
        self._calls = 0
        self._broken: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._plan = functools.lru_cache(PLANS_KEPT)(self._plan_for)
        self._ready: OrderedDict[Looks, Any] = OrderedDict()  # the target's, for operands that were checked
        given = {name for name, value in numbers.items() if value is not None}
        if self.settings.origin(PULL_BLOCKS) != "default":
            given.add("pull_blocks")
        self._compare_ranks({"tuned": tuned, "numbers given": sorted(given), "kernels": name})
        self._rules = Rules(comm, self.options, n, k, target=name, given=given, tuned=tuned)
        self._rules.options_for(m_max)  # says which rule won, or why none; a bad one is refused here
        self._layout = target.layout_for(m_max, n, comm.world_size, self.options)
        self._window = comm.alloc(self._layout.nbytes)
        self._runner: Any = None
        try:
            self._runner = target.Runner(comm, self._window, self._layout, self.options, m_max)
            self._gemm = target.Gemm(n, k, quant, target.MAX_BAND_ROWS)
            if self.settings[SELF_TEST]:
                self.self_test()
        except BaseException:
            self.close()
            raise

    # ---- what can be asked without an op ----

    @staticmethod
    def supports(
        *, n: int, k: int, m_max: int, world_size: int, backend: str = "host", **options: Any
    ) -> Support:
        """Whether such an op can be made; false with the reason. `options` as for the constructor."""
        return supports(n=n, k=k, m_max=m_max, world_size=world_size, backend=backend, **options)

    @staticmethod
    def profitable(m: int, *, backend: str = "host", gather_dtype: str = "bf16") -> bool:
        """Whether fusing is known to pay at this M: a hint, not a limit. host: as measured on 8x MI355X;
        cuda: on 2x H200, where `small_m` is what to do instead."""
        least: int = target_for(backend).profitable_m(gather_dtype)
        return m >= least

    @staticmethod
    def window_bytes_for(
        *, n: int, m_max: int, world_size: int, k: int | None = None, backend: str = "host", **options: Any
    ) -> int:
        """The bytes of symmetric memory that such an op allocates on every rank, whatever k is."""
        return window_bytes(backend, n, m_max, world_size, options)

    # ---- rows ----

    def padded_m(self, m: int) -> int:
        """The rows that a call of m rows works on. Padding is the op's own business: pass m rows."""
        self._check_rows(m)
        multiple: int = self._target.ROW_MULTIPLE
        return -(-m // multiple) * multiple

    def pad_rows(self, a: torch.Tensor, a_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(a, a_scale) with zero rows up to padded_m; the very tensors given if that is m already."""
        return pad_rows(a, a_scale, self.options.quant, self._target.ROW_MULTIPLE)

    # ---- the call ----

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The reduced [m, n] matrix in bf16; with mode="gemm-only" this rank's own partial sums. Collective.

        a, b              # [m, k], [n, k] e4m3fn; unit stride along k, any row stride
        a_scale, b_scale  # see quant/operands.py
        out               # [m, n] bf16, unit stride along n; without it the result is a view of the op's
        window, which
                          # the caller may also write to, and which is overwritten by this op's next call
        """
        self._check_usable()
        looks = looks_of(a, b, a_scale, b_scale)
        ready = self._ready.get(looks) if self.trace is None else None
        if ready is not None:
            work = ready.at(a.data_ptr(), b.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr())
            if work is not None:
                if out is not None:
                    self._check_out(out, ready.m)
                return self._carry_out(work, out)
        m = self._check_operands(a, b, out)
        a_grid = a_scale_grid(a_scale, self.options.quant, m, self.k, self.comm.device)
        b_grid = b_scale_grid(b_scale, self.options.quant, self.n, self.k, self.comm.device)
        partials = self._gemm.partials(a, b, a_grid, b_grid)
        result = self._run(m, partials, out)
        self._keep_ready(looks, m, partials)
        return result

    def _keep_ready(self, looks: Looks, m: int, partials: Any) -> None:
        """Let the next call with operands that look like these skip what was found out about them."""
        ready = self._runner.ready(self._plan(m), partials)
        if ready is not None:
            self._ready[looks] = ready
            if len(self._ready) > PLANS_KEPT:
                self._ready.popitem(last=False)

    def _run(
        self, m: int, partials: Any, out: torch.Tensor | None = None, plan: Plan | None = None
    ) -> torch.Tensor:
        """One call on the target."""
        plan = plan or self._plan(m)

        def work(number: int) -> Work:
            return self._runner.run(plan, number, partials, timed=self.trace is not None)  # type: ignore[no-any-return]

        return self._carry_out(work, out)

    def _carry_out(self, work: Callable[[int], Work], out: torch.Tensor | None) -> torch.Tensor:
        """`work` of the next call, its result copied to `out` while the op is still this thread's; whatever
        goes wrong in it ends the op."""
        if not self._lock.acquire(blocking=False):
            raise MoriError(
                "this op is in a call already, on another thread: calls of one op are made one after the "
                "other, in the same order on every rank; use one op per thread"
            )
        try:
            self._check_usable()
            self._calls += 1
            result, spans = work(self._calls)
            output: torch.Tensor = result if out is None else out.copy_(result)
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._lock.release()
        if spans or self.last_phases_us:
            self._tell(spans)
        return output

    def _tell(self, spans: Sequence[Any]) -> None:
        self.last_phases_us = {s.name: (s.end_ns - s.start_ns) / 1e3 for s in spans if s.lane == "phase"}
        if self.trace is not None:
            for span in spans:
                self.trace.add(span.name, span.lane, span.start_ns, span.end_ns)

    def ran(self, m: int) -> str:
        """Which way calls of m rows have gone: the mode, or what `small_m` made of them."""
        way: str = self._runner.ran(m)
        return way

    def plan(self, m: int) -> Plan:
        """How a call of m rows is carried out."""
        self._check_rows(m)
        return self._plan(m)

    def rule(self, m: int) -> Decision | None:
        """Which tuned rule calls of m rows get, or why none; None where this target is not tuned."""
        self._check_rows(m)
        return self._rules.decision(m)

    def _plan_for(self, m: int) -> Plan:
        return self._plan_with(m, self._rules.options_for(m))

    def _plan_with(self, m: int, options: Options) -> Plan:
        problem = Problem(m, self.n, self.k, self.comm.world_size)
        return Plan(problem, options, self._target.MAX_BAND_ROWS)

    # ---- proof ----

    def self_test(self) -> None:
        """Collective: add up rank + 1 over this op's own path; TransportInert on every rank unless all is
        there.

        An engine that does nothing is fast and raises nothing: the result would be mostly the local part. One
        row of every rank's slice is enough to see it. Takes part in the count of calls, so all ranks must
        make it.
        """
        finding = self._try_transport()
        findings = [f"rank {rank}: {text}" for rank, text in enumerate(self.comm.all_gather(finding)) if text]
        if findings:
            error = TransportInert(
                f"self_test of mode={self.options.mode!r} on the {self.comm.backend} backend failed: "
                + "; ".join(findings)
            )
            self._broken = error
            raise error

    def _try_transport(self) -> str:
        """What is wrong with a sum of rank + 1 over all ranks, or nothing."""
        world_size = self.comm.world_size
        m = min(self.m_max, world_size)
        self._runner.poison(m)
        self.comm.barrier()  # nobody writes into a window that is still being filled
        try:
            constant = _Constant(float(self.comm.rank + 1))
            got = self._run(m, constant, plan=self._plan_with(m, self.options))  # no rule is for so few rows
        except PeerTimeout as late:
            return str(late)
        terms = range(1, world_size + 1) if self.options.communicates else (self.comm.rank + 1,)
        want = torch.full_like(got, float(sum(terms)))
        if self.options.gather_dtype == "fp8":
            want = fp8_wire(want.cpu(), self.options.gather_scale).to(got.device)
        wrong = got != want
        if not bool(wrong.any()):
            return ""
        row = int(wrong.any(dim=1).nonzero()[0])
        column = int(wrong[row].nonzero()[0])
        return (
            f"{int(wrong.sum())} of {got.numel()} elements are not {want[row, column].item():g}, the first "
            f"at row {row} (summed by rank {row}), column {column}: {got[row, column].item():g}"
        )

    # ---- checks ----

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this GemmAllReduce is closed")
        if self._broken is not None:
            raise MoriError(
                f"this GemmAllReduce cannot be used any more since call {self._calls} failed with "
                f"{type(self._broken).__name__}: {self._broken}. Close it; make a new communicator and a new "
                "op"
            )
        self.comm.check_open()

    def _check_rows(self, m: int) -> None:
        if type(m) is not int or m < 0:
            raise UnsupportedShape(f"m={m!r}: a whole number from 0 to m_max={self.m_max}")
        if m > self.m_max:
            raise UnsupportedShape(
                f"a has M={m} rows, this op was made for m_max={self.m_max}: make one with a larger m_max, "
                "or pass fewer rows at a time"
            )

    def _check_operands(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> int:
        """M, once everything about the matrices is in order."""
        device = self.comm.device
        check_codes("a", a, self.k, device)
        check_codes("b", b, self.k, device, self.n)
        m = a.shape[0]
        self._check_rows(m)
        if out is not None:
            self._check_out(out, m)
        return m

    def _check_out(self, out: torch.Tensor, m: int) -> None:
        device = self.comm.device
        if out.dtype != torch.bfloat16 or tuple(out.shape) != (m, self.n) or out.device.type != device.type:
            raise UnsupportedShape(
                f"out is {out.dtype} {tuple(out.shape)} on {out.device}, "
                f"wanted torch.bfloat16 {(m, self.n)} on {device}"
            )
        if out.numel() and (out.stride(1) != 1 or (m > 1 and out.stride(0) < self.n)):
            raise LayoutError(
                f"out has strides {out.stride()}: the stride along N must be 1, that of rows at least "
                f"{self.n}"
            )
        if out.requires_grad:
            raise ArgumentError(
                "out requires grad, and nothing can be differentiated through this call: pass out.detach(), "
                "which is the same memory"
            )

    def _compare_ranks(self, also: dict[str, Any]) -> None:
        """Collective: raise on every rank if any of them was given something else."""
        mine = {"n": self.n, "k": self.k, "m_max": self.m_max, **dataclasses.asdict(self.options), **also}
        mine["self_test"] = self.settings[SELF_TEST]
        given = self.comm.all_gather(mine)
        differing = [
            f"{name} is " + ", ".join(f"{values[name]!r} on rank {rank}" for rank, values in enumerate(given))
            for name in mine
            if any(values.get(name) != mine[name] for values in given)
        ]
        if differing:
            raise ArgumentError(
                "the ranks were given different arguments for GemmAllReduce, all must be the same: "
                + "; ".join(differing)
            )

    # ---- life ----

    @property
    def window_bytes(self) -> int:
        """The bytes of symmetric memory that this op holds on this rank."""
        return self._window.nbytes

    def close(self) -> None:
        """Give the window back. Local; twice is fine. Views of it stay readable."""
        self._closed = True
        self._ready.clear()
        if self._runner is not None:
            self._runner.close()
        self._window.close()

    def __enter__(self) -> GemmAllReduce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def default_pull_blocks(settings: Snapshot, target: ModuleType) -> int:
    """What the environment says, or else what the target was tuned to."""
    if settings.origin(PULL_BLOCKS) == "default":
        tuned: int = target.DEFAULT_PULL_BLOCKS
        return tuned
    return settings[PULL_BLOCKS]


class _Constant:
    """Partial sums for a self-test: the same number everywhere."""

    def __init__(self, value: float) -> None:
        self.value = value

    def begin(self) -> None:
        """Nothing is prepared."""

    def store(self, rows: object, into: torch.Tensor) -> None:
        """into = the number."""
        into.fill_(self.value)
