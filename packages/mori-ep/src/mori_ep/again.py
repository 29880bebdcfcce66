"""Calls like the one before, without most of Python.

A call that goes the whole way (op.py) first forgets what it may change: a dispatch both, since a combine goes
by its dispatch; a combine the last combine. If it is like the one before, the target is asked for a function
that makes calls like it (`Runner.repeated_dispatch`); targets whose calls are more than a launch have none.
The next call tries that function, which does nothing where the call is not like it, or where something is to
be raised. What is remembered is forgotten too when a call fails, the caller masks ranks or looks at what
came, launches change, or the op is closed. Calls that are traced, ask for blocks or bring a routing handle
always go the whole way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mori_ep.op import EpDispatchCombineOp
    from mori_ep.prepared import Combined, Dispatched, Prepared
    from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape

Repeated = Callable[..., Any]


class Again:
    """One op's last dispatch and last combine."""

    def __init__(self, op: EpDispatchCombineOp) -> None:
        self._op = op
        self._last: dict[str, object] = {}  # the kind of the last call that went the whole way
        self.forget()

    def forget(self) -> None:
        self._dispatch: Repeated | None = None
        self.forget_combine()

    def forget_combine(self) -> None:
        self._combine: Repeated | None = None
        self._external: object = None  # use_external_inp_buf, as the combine was given it
        self._combined: Any = None  # its launch

    # ---- instead of the whole way ----

    def dispatch(self, *tensors: torch.Tensor | None) -> Dispatched | None:
        """Made, and what it returns; None: it has to go the whole way."""
        op = self._op
        if self._dispatch is None or op.trace is not None or not op._lock.acquire(blocking=False):
            return None
        try:  # nobody else changes what is remembered now
            results: Dispatched | None = self._dispatch(*tensors) if self._dispatch is not None else None
            if results is not None:
                op._count_dispatch()
                op._runner.dispatched_again()
            return results
        finally:
            op._lock.release()

    def combine(self, external: object, *tensors: torch.Tensor | None) -> Combined | None:
        """The same."""
        op = self._op
        if self._combine is None or op.trace is not None or not op._lock.acquire(blocking=False):
            return None
        try:
            if self._combine is None or external is not self._external:
                return None
            results: Combined | None = self._combine(*tensors)
            if results is not None:
                op._runner.combined_again(self._combined)
            return results
        finally:
            op._lock.release()

    # ---- after the whole way ----

    def after_dispatch(self, prepared: Prepared, shape: DispatchShape, call: DispatchCall) -> None:
        """Of a call as planned, without a routing handle."""
        if self._is_second("dispatch", (shape, call.x.shape[0])):
            self._dispatch = self._op._calls.repeated_dispatch(prepared, call)

    def after_combine(
        self,
        prepared: Prepared,
        shape: CombineShape,
        call: CombineCall,
        indices: torch.Tensor,
        external: object,
    ) -> None:
        """The same."""
        if self._is_second("combine", (shape, call.num_tokens)):
            self._combine = self._op._calls.repeated_combine(prepared, call, indices)
            self._external, self._combined = external, prepared.launch

    def _is_second(self, what: str, kind: object) -> bool:
        """Whether the call before was of this kind: making the function costs more than it saves once."""
        before, self._last[what] = self._last.get(what), kind
        return before == kind
