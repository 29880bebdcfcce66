"""`MegaMoE`: the whole layer as one call.

    moe = MegaMoE(rank=r, world_size=R, model_dim=D, inter_dim=I, experts=E, topk=k, quant="a8w4",
                  w1=..., w1_scale=..., w2=..., w2_scale=..., max_tok_per_rank=T, swiglu_limit=10.0)
    out = moe(x, weights, ids)       # [n, D] bf16

Collective: all ranks make the layer, and all make the same calls in the same order; each may bring its own
number of tokens up to T, also none. `out` is a view of the layer's own memory, which its next call
overwrites.

A call is checked before it waits for anyone. One that fails while ranks are under way leaves the layer
unusable. The phases of a launch, and how Stage1 is replaced: stage1/__init__.py. The protocol:
targets/host/runner.py.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import mori_shmem
import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, ClosedError, MoriError

from mori_megamoe import checks, mx
from mori_megamoe.arguments import check_flag, check_number, check_whole, whole_numbers
from mori_megamoe.launch import Call, Launch
from mori_megamoe.layout import layout_for
from mori_megamoe.problem import Problem
from mori_megamoe.settings import COMBINE_MASK, TABLE
from mori_megamoe.stage1 import Stage1
from mori_megamoe.targets import Runner, target_for
from mori_megamoe.together import together
from mori_megamoe.weights import StoredWeights, stored_weights

if TYPE_CHECKING:
    from mori_bench import Trace

_numbers = itertools.count(1)


class Stage1Result(NamedTuple):
    """What Stage1 of one launch made on this rank; views that the next launch overwrites."""

    launch: Launch
    hidden: torch.Tensor  # [rows with padding, I] uint8
    hidden_scales: torch.Tensor  # [rows * padded columns] uint8, mx.ActivationScales tile by tile


class MegaMoE:
    """See the module."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        model_dim: int,
        inter_dim: int,
        experts: int,
        topk: int,
        quant: str,
        w1: torch.Tensor,
        w1_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        max_tok_per_rank: int,
        mega_scheme: str = "fixedslot",
        swiglu_limit: float = 0.0,
        fanout_masks: Sequence[int] = (),
        partials: str = "auto",
        comm: mori_shmem.Communicator | None = None,
    ) -> None:
        """Collective.

        w1, w1_scale, w2, w2_scale  of this rank's experts, as `shuffle_weights` makes them
        max_tok_per_rank            a power of two
        fanout_masks                pairs of the first launch, a mask of two experts for each rank; later ones
                                    follow from the launch before
        partials                    how weighted rows travel back: "bf16", "fp8_blockwise_1x32", or "auto",
                                    which is bf16 up to max_tok_per_rank=1024
        comm                        whose windows are used; without it the layer makes a communicator among
                                    the ranks that torchrun, or torch's default process group, knows, and
                                    closes it with itself
        """
        checks.check_words(quant, mega_scheme)
        check_whole("rank", rank)
        check_number("swiglu_limit", swiglu_limit)
        problem = Problem(
            model_dim, inter_dim, experts, topk, world_size, max_tok_per_rank, float(swiglu_limit), partials
        )
        problem.check()
        masks = whole_numbers("fanout_masks", fanout_masks, "a sequence of whole numbers, one for each rank,")
        pairs = checks.first_pairs(masks, problem)
        checks.check_comm(comm)
        self.problem = problem
        self.values = TABLE.read()
        self._weights = stored_weights(StoredWeights(w1, w1_scale, w2, w2_scale), problem)
        self._closed = False
        self._broken: BaseException | None = None
        self._lock = threading.Lock()
        self._window: mori_shmem.Window | None = None
        self._stages: list[Stage1] = []  # that are open
        self._made: weakref.WeakSet[Stage1] = weakref.WeakSet()  # for this layer, open or not
        self._owned: mori_shmem.Communicator | None = None
        self._trace: Trace | None = None
        if comm is None:
            comm = self._owned = mori_shmem.init(name=f"mori-megamoe/{next(_numbers)}")
        self.comm = comm
        try:
            checks.check_place(comm, rank, world_size)
            self._target = target_for(comm.backend)
            self._check_are_here(self._weights)
            self.values.check_same(comm.rank, comm.all_gather)
            checks.compare_ranks(comm, {**asdict(problem), "fanout_masks": masks})
            self._construct(pairs)
        except BaseException:
            self.close()
            raise

    def _construct(self, pairs: Any) -> None:
        layout = self._target.Runner.layout_for(self.problem, self.values)
        self._window = window = self.comm.alloc(layout.nbytes)
        with torch.inference_mode(False):  # calls write to these tensors, inside that mode and outside
            self._runner: Runner = together(
                self.comm,
                "a layer could not be made",
                lambda: self._target.Runner(self.comm, window, layout, self.values, pairs),
            )
            together(
                self.comm,
                "this layer's weights cannot be used",
                lambda: self._runner.take_weights(self._weights),
            )
        self.stage1: Stage1 = self._target.DirectStores()
        self._open(self.stage1)
        self.comm.barrier()  # nobody's first rows may come before everybody is here

    @staticmethod
    def window_bytes_for(problem: Problem) -> int:
        """Symmetric memory that such a layer takes on every rank of the host target, before it is made."""
        if not isinstance(problem, Problem):
            raise ArgumentError(f"{described(problem)} is no mori_megamoe.Problem: one is needed")
        problem.check()
        return layout_for(problem).nbytes

    # ---- calls ----

    def quantize(self, x_bf16: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x_q [n, D] e4m3fn, scales [n, D / 32] uint8), as the layer itself would. Local."""
        checks.check_width("x_bf16", x_bf16, torch.bfloat16, self.problem)
        codes, scales = mx.quantize_input(x_bf16.detach())
        return codes.view(torch.float8_e4m3fn), scales

    def forward(
        self,
        x_bf16: torch.Tensor,
        wts: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        stream: Any = None,
        slice_output: bool = True,
        mask_invalid_slots: bool | None = None,
    ) -> torch.Tensor:
        """The layer. Collective. [n, D] bf16, or with slice_output=False [max_tok_per_rank, D], stale from n
        on.

        x_bf16    # [n, D] bf16
        wts       # [n, k] fp32: the router's weights
        topk_ids  # [n, k] int32: global ids, different ones in a token
        mask_invalid_slots  ids outside 0..E-1 are slots that go nowhere and add nothing; False: there are
                            none
        """
        check_flag("slice_output", slice_output)
        call = self._call(x_bf16, None, wts, topk_ids, stream, mask_invalid_slots)
        return self._run(call, slice_output, stream)

    __call__ = forward_bf16 = forward

    def forward_prequant(
        self,
        x_q: torch.Tensor,
        scales: torch.Tensor,
        wts: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        stream: Any = None,
        slice_output: bool = True,
        mask_invalid_slots: bool | None = None,
    ) -> torch.Tensor:
        """`forward` with rows that `quantize` made: x_q [n, D] e4m3fn, scales [n, D / 32] uint8."""
        check_flag("slice_output", slice_output)
        checks.check_tensor("scales", scales, "as quantize returns them")
        call = self._call(x_q, scales, wts, topk_ids, stream, mask_invalid_slots)
        return self._run(call, slice_output, stream)

    def stage1_only(
        self,
        x_bf16: torch.Tensor,
        wts: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        mask_invalid_slots: bool | None = None,
    ) -> Stage1Result:
        """Prepare and Stage1 of a launch that ends there. Collective. For benches and tests."""
        call = self._call(x_bf16, None, wts, topk_ids, None, mask_invalid_slots)
        with self._turn():
            launch = self._stage1(call)
        rows = launch.plan.num_rows
        columns = mx.padded_columns(self.problem.inter_scales)
        return Stage1Result(launch, self._runner.hidden[:rows], self._runner.hidden_scales[: rows * columns])

    def _run(self, call: Call, slice_output: bool, stream: Any) -> torch.Tensor:
        with self._turn(), nullcontext() if stream is None else torch.cuda.stream(stream):
            launch = self._stage1(call)
            with self._phase("stage2"):
                self._runner.stage2(launch)
            with self._phase("combine"):
                out = self._runner.combine(launch)
        return out[: call.num_tokens] if slice_output else out

    def _stage1(self, call: Call) -> Launch:
        with self._phase("prepare"):
            launch = self._runner.prepare(call, quantize=not self.stage1.quantizes)
        launch.trace = self.trace
        with self._phase(f"stage1 {self.stage1.name}"):
            self.stage1.run(launch)
        return launch

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.trace is None else self.trace.span(name, "phases")

    @property
    def trace(self) -> Trace | None:
        """Set one, and every call adds its phases and what its stage tells."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        checks.check_trace(trace)
        self._trace = trace

    # ---- weights and stages ----

    @property
    def weights(self) -> StoredWeights:
        """This rank's experts. Set another layer's, and the next call computes with those."""
        return self._weights

    @weights.setter
    def weights(self, given: StoredWeights) -> None:
        self.check_usable()
        weights = stored_weights(given, self.problem)
        self._check_are_here(weights)
        with torch.inference_mode(False):
            self._runner.take_weights(weights)
        self._weights = weights

    def replace_stage1(self, stage: Stage1) -> Stage1:
        """Collective: from the next call on, Stage1 is done by `stage`. Returns the one before, still open.

        A stage that cannot be opened on some rank is closed on all of them, every rank raises with that
        rank's reason, and the layer keeps the stage that it has.
        """
        checks.check_stage(stage)
        with self._alone():
            self.check_usable()
            names = self.comm.all_gather(stage.name)
            if len(set(names)) > 1:
                raise ArgumentError(f"the ranks bring different stages: {names}, in rank order")
            self._open(stage)
            previous, self.stage1 = self.stage1, stage
            stage.put_in()
        return previous

    def _open(self, stage: Stage1) -> None:
        """Collective: on all ranks or on none."""
        tried = False

        def open_here() -> None:
            nonlocal tried
            if stage in self._stages:
                return
            if getattr(stage, "runner", self._runner) is not self._runner:
                raise ArgumentError(f"this {stage.name} stage is another layer's: make one for each layer")
            tried = True
            with torch.inference_mode(False):  # its tensors are for calls inside that mode and outside
                stage.open(self._runner)

        try:
            together(self.comm, f"stage {stage.name!r} cannot be opened", open_here)
        except BaseException:
            if tried:
                with suppress(Exception):  # of a stage that is half open; what is told is why
                    stage.close()
            raise
        if tried:
            self._stages.append(stage)

    def adopt(self, stage: Stage1) -> None:
        """Close this stage with the layer, even if it is never put in."""
        self._made.add(stage)

    # ---- life ----

    def check_usable(self) -> None:
        """Raise if no call can be made any more."""
        if self._closed:
            raise ClosedError("this MegaMoE is closed: make a new one")
        if self.comm.closed:
            raise ClosedError(
                "the communicator of this MegaMoE is closed: the layer goes with it. Make a new communicator "
                "and a new layer"
            )
        self.comm.check_open()
        if self._broken is not None:
            raise MoriError(
                f"this MegaMoE cannot be used any more since a call failed with "
                f"{type(self._broken).__name__}: {self._broken}. Close it; make a new communicator and a new "
                "layer"
            )

    @property
    def window_bytes(self) -> int:
        """Symmetric memory that this layer holds on this rank, without what a stage has of its own."""
        return self._runner.layout.nbytes

    def close(self) -> None:
        """Give the windows back, and end what stages have started. Local; twice is fine. Outputs stay
        readable."""
        self._closed = True
        with ExitStack() as last_first:  # all of it, though one should fail
            if self._owned is not None:
                last_first.callback(self._owned.close)
            if self._window is not None:
                last_first.callback(self._window.close)
            for stage in {*self._stages, *self._made}:
                last_first.callback(stage.close)

    def __enter__(self) -> MegaMoE:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside a call ----

    def _call(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        wts: torch.Tensor,
        ids: torch.Tensor,
        stream: Any,
        mask_invalid_slots: bool | None,
    ) -> Call:
        """Everything about the tensors of a call is in order, or this raises."""
        self.check_usable()
        problem, device = self.problem, self.comm.device
        if stream is not None and device.type == "cpu":
            raise ArgumentError(f"stream={stream!r}: the host target has no streams, leave it out")
        if mask_invalid_slots is not None:
            check_flag("mask_invalid_slots", mask_invalid_slots)
        mask = self.values[COMBINE_MASK] if mask_invalid_slots is None else mask_invalid_slots
        name, dtype = ("x_bf16", torch.bfloat16) if scales is None else ("x_q", torch.float8_e4m3fn)
        n = checks.check_rows(name, rows, dtype, problem, device)
        checks.check_shape("wts", wts, torch.float32, (n, problem.topk), device)
        checks.check_shape("topk_ids", ids, torch.int32, (n, problem.topk), device)
        self._target.check_ids(ids, problem, mask=mask)
        rows, wts = rows.detach(), wts.detach()  # there is no way back: nothing of a graph is kept
        if scales is None:
            return Call(rows, None, None, wts, ids, self._weights)
        checks.check_shape("scales", scales, torch.uint8, (n, problem.model_scales), device)
        return Call(None, rows.view(torch.uint8), scales, wts, ids, self._weights)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise MoriError(
                "this layer is in a call already, on another thread: make calls one after the other"
            )
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time; what goes wrong inside ends the layer, since rows and flags are under way."""
        with self._alone():
            self.check_usable()
            try:
                yield
            except BaseException as error:
                self._broken = error
                raise

    def _check_are_here(self, weights: StoredWeights) -> None:
        for name, part in zip(StoredWeights._fields, weights, strict=True):
            checks.check_memory(name, part, self.comm.device)
