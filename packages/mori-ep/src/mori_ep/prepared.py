"""What an op works out once for each kind of call, so that the next of its kind costs the host little.

    shape      of tensors that are given: checked, and remembered by all that the checks look at
    Prepared   of a shape: what the target launches, the tensors that are handed out, and what tuned rules say
               by the number of tokens

The tensors handed out are views of the op's own memory, the same objects in every call of a shape
(MORI_EP_DISABLE_VIEW_CACHE=1: new objects over the same memory).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from mori_shmem.settings import Snapshot

from mori_ep import checks
from mori_ep.again import Repeated
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.plan import PLANNED, Geometry
from mori_ep.rules import Rules
from mori_ep.settings import CHECK_IDS, DISABLE_VIEW_CACHE
from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape, Runner

UNASKED = (-1, -1, -1)  # blocks, network blocks, warps: as planned
_MOST_KINDS = 4096  # of calls that are remembered as checked

Dispatched = tuple[
    torch.Tensor,  # rows [recv capacity, hidden]
    torch.Tensor,  # weights [recv capacity, k] fp32; stale where dispatch was given none
    torch.Tensor | None,  # scales [recv capacity, scale_dim]
    torch.Tensor,  # expert ids [recv capacity, k] int32, global
    torch.Tensor,  # rows received [1] int32
]
Combined = tuple[torch.Tensor, torch.Tensor | None]  # [max tokens, hidden], [max tokens, k] fp32


class Prepared(NamedTuple):
    """What is made once for a shape of call."""

    launch: Any
    results: tuple[Any, ...] | None  # None: made anew in every call
    tuned: Callable[[int], Geometry]  # by tokens: what rules say

    def geometry(self, tokens: int, asked: tuple[int, int, int]) -> Geometry:
        """What the caller asks for, or else what rules say."""
        tuned = self.tuned(tokens)
        return tuned if asked == UNASKED else Geometry(*asked, low_latency=tuned.low_latency)


class PreparedCalls:
    """One op's, on this rank."""

    def __init__(
        self,
        config: EpDispatchCombineConfig,
        device: torch.device,
        dispatch_dtype: torch.dtype,
        rules: Rules,
        runner: Runner,
        values: Snapshot,
    ) -> None:
        self._config, self._device, self._dispatch_dtype = config, device, dispatch_dtype
        self._rules, self._runner = rules, runner
        self._caches_views = not values[DISABLE_VIEW_CACHE]
        self._checks_ids = bool(values[CHECK_IDS])
        self._dispatch_kinds: dict[object, DispatchShape] = {}
        self._combine_kinds: dict[object, CombineShape] = {}
        self._dispatches: dict[DispatchShape, Prepared] = {}
        self._combines: dict[CombineShape, Prepared] = {}
        self.homeward = rules.homeward()  # by tokens: the way that a combine of so many will go

    def tune_again(self) -> None:
        """Forget what rules said: they may say something else now."""
        self.homeward = self._rules.homeward()
        self._dispatches = {
            shape: p._replace(tuned=self._tuned_dispatch(shape)) for shape, p in self._dispatches.items()
        }
        self._combines = {
            shape: p._replace(tuned=self._tuned_combine(shape)) for shape, p in self._combines.items()
        }

    # ---- dispatch ----

    def dispatch_shape(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
    ) -> DispatchShape:
        """The shape of a dispatch of these, checked unless its like has been before."""
        kinds = checks.dispatch_kinds(input, weights, scales, indices)
        shape = self._dispatch_kinds.get(kinds)
        if shape is None:
            shape = checks.dispatch_shape(self._config, self._device, input, weights, scales, indices)
            _remember(self._dispatch_kinds, kinds, shape)
        if self._checks_ids:
            checks.check_ids(self._config, indices)
        return shape

    def dispatch(self, shape: DispatchShape) -> Prepared:
        """Of this shape; made where it is the first."""
        return self._dispatches.get(shape) or self._prepare_dispatch(shape)

    def dispatch_views(self, shape: DispatchShape) -> Dispatched:
        """New tensors over what a dispatch of this shape fills."""
        rows, topk, view = self._config.recv_capacity, self._config.num_experts_per_token, self._runner.view
        scales = None
        if shape.scale_dtype is not None:
            scales = view("out_scales", (rows, shape.scale_dim), shape.scale_dtype)
        return (
            view("out", (rows, shape.hidden), shape.dtype),
            view("out_weights", (rows, topk), torch.float32),
            scales,
            view("out_indices", (rows, topk), torch.int32),
            view("recv_count", (1,), torch.int32),
        )

    def repeated_dispatch(self, prepared: Prepared, call: DispatchCall) -> Repeated | None:
        """A function for dispatches like this one, if there may be one."""
        if prepared.results is None or self._checks_ids:
            return None
        return self._runner.repeated_dispatch(prepared.launch, call, prepared.results)

    def _prepare_dispatch(self, shape: DispatchShape) -> Prepared:
        launch = self._runner.prepare_dispatch(shape)
        results = self.dispatch_views(shape) if self._caches_views else None
        prepared = self._dispatches[shape] = Prepared(launch, results, self._tuned_dispatch(shape))
        return prepared

    def _tuned_dispatch(self, shape: DispatchShape) -> Callable[[int], Geometry]:
        """What rules say of dispatches of one shape, by tokens: looked up once for each number of them."""
        asked = functools.partial(self._rules.geometry, "dispatch", shape.dtype, hidden=shape.hidden)
        return functools.lru_cache(None)(lambda tokens: asked(tokens=tokens))

    # ---- combine ----

    def combine_shape(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        num_tokens: int,
        *,
        external: bool,
    ) -> CombineShape:
        """The shape of a combine of these, checked unless its like has been before."""
        kinds = checks.combine_kinds(num_tokens, external, input, weights, indices)
        shape = self._combine_kinds.get(kinds)
        if shape is None:
            shape = checks.combine_shape(
                self._config, self._device, input, weights, indices, num_tokens, registered=not external
            )
            checks.check_combine_dtype(self._config, self._dispatch_dtype, shape.dtype)
            _remember(self._combine_kinds, kinds, shape)
        return shape

    def combine(self, shape: CombineShape) -> Prepared:
        """Of this shape; made where it is the first."""
        return self._combines.get(shape) or self._prepare_combine(shape)

    def launched(self, call: CombineCall, prepared: Prepared, asked: tuple[int, int, int]) -> CombineCall:
        """With blocks and warps of the rule for this call, and the way home that its dispatch has told."""
        geometry, home = prepared.geometry(call.num_tokens, asked), self.homeward(call.num_tokens)
        if geometry.low_latency != home:
            geometry = (geometry if asked != UNASKED else PLANNED)._replace(low_latency=home)
        return call if geometry == PLANNED else call._replace(geometry=geometry)

    def combine_views(self, shape: CombineShape) -> Combined:
        """New tensors over what a combine of this shape fills."""
        tokens, topk = self._config.max_num_inp_token_per_rank, self._config.num_experts_per_token
        weights = (
            self._runner.view("result_weights", (tokens, topk), torch.float32) if shape.weights else None
        )
        return self._runner.view("result", (tokens, shape.hidden), shape.dtype), weights

    def repeated_combine(
        self, prepared: Prepared, call: CombineCall, indices: torch.Tensor
    ) -> Repeated | None:
        """A function for combines like this one, if there may be one."""
        if prepared.results is None:
            return None
        return self._runner.repeated_combine(prepared.launch, call, indices, prepared.results)

    def _prepare_combine(self, shape: CombineShape) -> Prepared:
        launch = self._runner.prepare_combine(shape)
        results = self.combine_views(shape) if self._caches_views else None
        prepared = self._combines[shape] = Prepared(launch, results, self._tuned_combine(shape))
        return prepared

    def _tuned_combine(self, shape: CombineShape) -> Callable[[int], Geometry]:
        """What rules say of combines of one shape."""
        zero_copy, hidden = shape.registered, shape.hidden
        asked = functools.partial(
            self._rules.geometry, "combine", shape.dtype, hidden=hidden, zero_copy=zero_copy
        )
        return functools.lru_cache(None)(lambda tokens: asked(tokens=tokens))


def _remember(kinds: dict[Any, Any], kind: object, shape: object) -> None:
    """What has passed the checks; so many different ones that memory would matter are forgotten."""
    if len(kinds) >= _MOST_KINDS:
        kinds.clear()
    kinds[kind] = shape
