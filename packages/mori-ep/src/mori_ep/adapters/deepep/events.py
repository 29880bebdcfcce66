"""Events of calls that run in the order of the caller's stream: there is no stream of our own to wait for."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError


class EventHandle:
    """A point in the current stream; on the host, where a call has returned when it is done, nothing."""

    def __init__(self) -> None:
        self._event: Any = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What a call with async_finish returns. `event` is None where there is nothing to wait for."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors  # kept alive as long as this object

    def current_stream_wait(self) -> None:
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.current_stream_wait()


def after(async_finish: bool) -> EventOverlap:
    """The event of a call that was just made."""
    return EventOverlap(EventHandle() if async_finish else None)


def wait_for(previous: EventOverlap | None) -> None:
    """`previous_event` of a call."""
    if previous is None:
        return
    if not isinstance(previous, EventOverlap):
        raise ArgumentError(
            f"previous_event is {described(previous)}: an EventOverlap is needed (Buffer.capture makes one)"
        )
    previous.current_stream_wait()
