"""Whose turn it is: one call of an op at a time, the halves of a call in order, and what a failure means."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from mori_shmem.errors import ArgumentError, MoriError

if TYPE_CHECKING:
    from mori_bench import Trace

    from mori_ep.op import EpDispatchCombineOp

CALLS = ("dispatch", "dispatch_send", "dispatch_recv", "combine", "combine_send", "combine_recv")


class Turn:
    """One call at a time; whatever goes wrong inside ends the op, since flags and buffers are under way.

    A plain object and no generator: it is in the path of every call.
    """

    __slots__ = ("_began_ns", "_due", "_op", "_what")

    def __init__(self, op: EpDispatchCombineOp, what: str) -> None:
        self._op, self._what = op, what
        self._due = what if what.endswith("_recv") else None  # the second half that must be due
        self._began_ns = 0

    def __enter__(self) -> None:
        op = self._op
        if not op._lock.acquire(blocking=False):
            raise MoriError(
                "this op is in a call already, on another thread: calls of one op are made one after the "
                "other, "
                "in the same order on every rank; use one op per thread"
            )
        if self._what == "combine":
            op._again.forget_combine()
        else:
            op._again.forget()
        if op._closed or op._broken is not None or op._half != self._due:
            try:
                self.check()  # which raises
            finally:
                op._lock.release()
        if op.trace is not None:
            self._began_ns = time.monotonic_ns()
            op._runner.trace_steps(True)

    def check(self) -> None:
        """The op can be used, and this is the call that is due."""
        op = self._op
        if op._closed or op._broken is not None:
            op._check_usable()
        if op._half != self._due:
            raise ArgumentError(
                f"{self._what} was called where {op._half or 'a send or a full call'} is due: the second "
                "half of a call follows its first before anything else"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        op = self._op
        if op.trace is not None:
            self._record(op.trace)
        if error is not None:
            op._again.forget()
            if not (isinstance(error, ArgumentError) or op.config.elastic):
                op._broken = error
        op._lock.release()

    def _record(self, trace: Trace) -> None:
        """The call, and the steps that the target tells of, one after the other."""
        trace.add(self._what, "call", self._began_ns, time.monotonic_ns())
        began_ns = self._began_ns
        for step, ended_ns in self._op._runner.trace_steps(False):
            trace.add(step, self._what, began_ns, ended_ns)
            began_ns = ended_ns
