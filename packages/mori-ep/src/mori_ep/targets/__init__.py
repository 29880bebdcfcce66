"""One package per target. Each offers the same things, to be read side by side; see `target_for`.

What a target's Runner gets is checked: contiguous tensors on its device, shapes and dtypes that fit together
and into the capacities. It owns the op's memory, flags and counts of calls, and is called by one thread at a
time.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from mori_shmem.errors import ArgumentError, TransportInert

from mori_ep.again import Repeated
from mori_ep.plan import PLANNED, Geometry
from mori_ep.problem import RowFormat
from mori_ep.routing import EpDispatchRoutingHandle

TARGETS = {
    "host": "mori_ep.targets.host",
    "cuda": "mori_ep.targets.cuda",
    "internode": "mori_ep.internode.target",
    "triton": "mori_ep.targets.triton",
}


class DispatchShape(NamedTuple):
    """All of a dispatch that can change from call to call but for its number of tokens. The key of a
    launch."""

    hidden: int
    dtype: torch.dtype
    scale_dim: int
    scale_dtype: torch.dtype | None  # None: no scales
    weights: bool

    def row_format(self, topk: int) -> RowFormat:
        scale_bytes = self.scale_dim * self.scale_dtype.itemsize if self.scale_dtype else 0
        return RowFormat(self.hidden * self.dtype.itemsize, scale_bytes, topk, self.weights)


class CombineShape(NamedTuple):
    """The same of a combine."""

    hidden: int
    dtype: torch.dtype
    weights: bool
    registered: bool  # the rows are in the registered buffer already


class DispatchCall(NamedTuple):
    """The tensors of one dispatch on this rank."""

    x: torch.Tensor  # [n, hidden]
    weights: torch.Tensor | None  # [n, k] fp32
    scales: torch.Tensor | None  # [n, scale_dim]
    indices: torch.Tensor  # [n, k] int32
    replay: EpDispatchRoutingHandle | None = None
    geometry: Geometry = PLANNED
    homeward: int = -1  # Geometry.low_latency of the combine of as many tokens: peers are told now


class CombineCall(NamedTuple):
    """The tensors of one combine on this rank."""

    rows: torch.Tensor  # [>= rows received, hidden]
    weights: torch.Tensor | None  # [>= rows received, k] fp32
    num_tokens: int
    routing: EpDispatchRoutingHandle | None = None  # None: the maps of the last dispatch
    geometry: Geometry = PLANNED


class Runner(Protocol):
    """One op's memory and flags on this rank."""

    def view(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor over one of the regions of layout.py, at its start. The address is the same each
        time."""

    def prepare_dispatch(self, shape: DispatchShape) -> Any:
        """What `dispatch` needs for calls of this shape; made once per shape."""

    def prepare_combine(self, shape: CombineShape) -> Any:
        """What `combine` needs for calls of this shape."""

    def dispatch(self, launch: Any, call: DispatchCall) -> None:
        """Both halves. Afterwards (in stream order) out*, recv_count and the maps are those of this call."""

    def dispatch_send(self, launch: Any, call: DispatchCall) -> None:
        """Everything that need not wait for others."""

    def dispatch_recv(self) -> None:
        """The rest of the dispatch that was sent last, with the shape and tensors of that."""

    def combine(self, launch: Any, call: CombineCall) -> None:
        """Both halves. Afterwards result* are those of this call, for the first num_tokens rows."""

    def combine_send(self, launch: Any, call: CombineCall) -> None: ...

    def combine_recv(self) -> None: ...

    def repeated_dispatch(self, launch: Any, call: DispatchCall, results: object) -> Repeated | None:
        """For a dispatch that is over: a function of (x, weights, scales, indices) that makes another like it
        and returns `results`, or does nothing and returns None where it is not like it or something is to be
        raised. None: this target has no shorter way."""

    def repeated_combine(
        self, launch: Any, call: CombineCall, indices: torch.Tensor, results: object
    ) -> Repeated | None:
        """The same of a combine: a function of (rows, weights, indices)."""

    def dispatched_again(self) -> None:
        """A dispatch has been repeated."""

    def combined_again(self, launch: Any) -> None:
        """A combine of this launch has."""

    def lend_combine_input(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The region y, for a caller who fills it whenever no call is under way: from now on no combine that
        reads it ends before all ranks have read."""

    def routing(self) -> EpDispatchRoutingHandle:
        """A copy of the maps of the last dispatch."""

    def received_rows(self) -> int:
        """Rows received by the last dispatch; waits for the device where there is one."""

    def count_experts(self, counts: torch.Tensor) -> None:
        """counts[e] = (row, slot) pairs received for my e-th expert in the last dispatch."""

    def to_experts(
        self, rows: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Rows of the last dispatch laid out by expert: rows [experts, recv capacity, hidden], scales
        likewise, the rows of each expert [experts] int32, and their source positions [experts, recv capacity]
        int32. Memory of the runner's, the same in every call."""

    def from_experts(self, packed: torch.Tensor, weights: torch.Tensor | None, into: torch.Tensor) -> None:
        """The way back: into[row] = sum over its experts here of weight * row of `packed`, fp32, rounded
        once."""

    def why_not_launch(self, geometry: Geometry) -> str | None:
        """The reason against a tuned geometry on this rank, or None."""

    def trace_steps(self, on: bool) -> list[tuple[str, int]]:
        """Begin to note when the steps of a call end, or stop and give (step, time.monotonic_ns). A target
        whose calls return before their work is done has no steps to tell of."""

    def masked(self) -> list[bool]:
        """By rank: whether it is left out (elastic)."""

    def set_masked(self, rank: int, value: bool) -> None: ...

    def take_all_in(self) -> None:
        """No rank is left out any more. All ranks do so at the same call."""


def target_name(backend: str, kernels: str) -> str:
    """What `target_for` takes for a choice of kernels on a backend."""
    if kernels == "triton" and backend not in ("host", "cuda"):
        raise ArgumentError(
            f"kernels='triton' on backend {backend!r}: the Triton kernels are for host and cuda, inside one "
            "node. Leave kernels (MORI_EP_KERNELS) unset, or 'own'"
        )
    return backend if kernels == "own" else kernels


def target_for(backend: str) -> ModuleType:
    """The module that runs ops on a communicator's backend, or "triton" (see target_name). It has
    plan_for(config, few)   how the kernel type is carried out here, with what rules say of few tokens
    layout_for(config, plan)  what lies where in the window, with its size as `nbytes`
    why_not(config, dispatch_dtype, combine_dtype)   the reason against a configuration here, or None
    Runner(comm, window, layout, config, plan, values)   see above
    """
    if backend not in TARGETS:
        raise TransportInert(
            f"backend {backend!r} is not part of this version of mori-ep; it has: {', '.join(TARGETS)}"
        )
    return importlib.import_module(TARGETS[backend])
