"""The workgroups of a launch, as threads that all exist from the start, and the board they share.

A thread that fails writes its error on the board; the others leave their waits, and whoever runs the launch
raises it without waiting for those that are in the middle of something.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable

from mori_shmem.errors import ClosedError, MoriError, PeerTimeout

_GRACE_S = 0.5  # how long a launch that failed waits for workgroups that still work
_CLOSE_S = 5.0


class Aborted(Exception):
    """Another workgroup failed; there is an error on the board."""


class Board:
    """Of one launch: flags that are set once, tickets, and the first error. For all threads."""

    def __init__(self, *, timeout_s: float, doing: str) -> None:
        self._timeout_s = timeout_s
        self._doing = doing
        self._changed = threading.Condition()
        self._flags: set[Hashable] = set()
        self._tickets: dict[str, int] = {}
        self._error: BaseException | None = None
        self._gone = 0
        self._progress_s = time.monotonic()

    def set(self, flag: Hashable) -> None:
        """What was stored before is visible to whoever sees the flag."""
        with self._changed:
            self._flags.add(flag)
            self._news()

    def wait(self, flag: Hashable) -> None:
        """Until the flag is set. The deadline counts from the last thing that any workgroup reported, so one
        who waits for a rank is late before those who wait here for him, and names it."""
        with self._changed:
            while flag not in self._flags:
                self._check()
                left_s = self._progress_s + 2 * self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise PeerTimeout(
                        f"{self._doing}: no workgroup has done anything for {2 * self._timeout_s:.3g} s, and "
                        f"the flag {flag} is not set"
                    )
                self._changed.wait(left_s)

    def draw(self, what: str) -> int:
        """0, 1, 2, ...: each to one thread."""
        with self._changed:
            number = self._tickets.get(what, 0)
            self._tickets[what] = number + 1
            return number

    def check(self) -> None:
        """Raise Aborted once there is an error."""
        with self._changed:
            self._check()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._news()

    def leave(self) -> None:
        """A workgroup is done."""
        with self._changed:
            self._gone += 1
            self._news()

    def join(self, size: int) -> None:
        """Until all have left; raises the first error."""
        with self._changed:
            while self._gone < size and self._error is None:
                self._changed.wait()
            end_s = time.monotonic() + _GRACE_S
            while self._gone < size and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if self._error is not None:
                raise self._error

    def _check(self) -> None:
        if self._error is not None:
            raise Aborted

    def _news(self) -> None:
        self._progress_s = time.monotonic()
        self._changed.notify_all()


Work = Callable[[int], None]  # gets the number of the workgroup


class Crew:
    """`size` workgroups. They are there from now until close(), so none can be kept from starting by
    others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._inboxes = [queue.SimpleQueue[tuple[Work, Board] | None]() for _ in range(size)]
        self._threads = [
            threading.Thread(
                target=_serve, args=(number, inbox), name=f"megamoe workgroup {number}", daemon=True
            )
            for number, inbox in enumerate(self._inboxes)
        ]
        self._closer = weakref.finalize(self, _dismiss, self._inboxes)
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                self._closer()
                raise MoriError(
                    f"{size} workgroups must run at the same time, and this process cannot start more than "
                    f"{number} threads for them ({error}): ask for fewer (workers=, packers=, shufflers=), "
                    "or raise the limit (ulimit -u)"
                ) from error

    def run(self, work: Work, board: Board) -> None:
        """`work(number)` on every workgroup; returns when all are done."""
        if self.closed:
            raise ClosedError("this stage is closed, its workgroups have ended: make another stage")
        for inbox in self._inboxes:
            inbox.put((work, board))
        try:
            board.join(self.size)
        except BaseException as error:  # an interrupt, too
            board.fail(error)
            raise

    @property
    def closed(self) -> bool:
        return not self._closer.alive

    def close(self) -> None:
        """Twice is fine. One that is still at work is left behind; it touches only memory that stays."""
        self._closer()
        end_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))


def _dismiss(inboxes: list[queue.SimpleQueue[tuple[Work, Board] | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _serve(number: int, inbox: queue.SimpleQueue[tuple[Work, Board] | None]) -> None:
    while (order := inbox.get()) is not None:
        work, board = order
        try:
            work(number)
        except Aborted:
            pass
        except BaseException as error:
            board.fail(error)
        finally:
            board.leave()
            del work, board, order
