"""The group's store, asked with a deadline.

A call of a TCP store ends when its server has answered: on a link that was cut, not at all. So every question
is put by a thread of its own, and the rank goes on without it when the time is over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mori_shmem.deadline import Deadline
from mori_shmem.errors import PeerTimeout

_POLL_S = (0.001, 0.02)  # first and longest pause between looks


class PatientStore:
    """`store` as rank `rank` of `world_size` uses it; PeerTimeout where `deadline` passes."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def set(self, key: str, value: bytes, deadline: Deadline) -> None:
        """Leave a value."""
        self._answer(lambda: self._store.set(key, value), key, deadline)

    def fetch(self, keys: list[str], what: str, deadline: Deadline) -> list[bytes]:
        """The values, once they are all there; `what` names them in the error."""
        pause_s, longest_s = _POLL_S
        while not self._there(keys, what, deadline):
            if deadline.passed():
                late = [key.rsplit("/", 1)[1] for key in keys if not self._there([key], what, Deadline(1.0))]
                raise self._timeout(
                    f"{late} of {len(keys)} did not come to {what} within {deadline}. Is every rank started, "
                    "and does each make the same calls?"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return [bytes(value) for value in self._answer(lambda: [*map(self._store.get, keys)], what, deadline)]

    def _there(self, keys: list[str], what: str, deadline: Deadline) -> bool:
        return bool(self._answer(lambda: self._store.check(keys), what, deadline))

    def _answer(self, ask: Callable[[], Any], what: str, deadline: Deadline) -> Any:
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def put_it() -> None:
            try:
                answers.put((ask(), None))
            except BaseException as error:
                answers.put((None, error))

        threading.Thread(target=put_it, daemon=True).start()
        try:
            value, error = answers.get(timeout=max(deadline.left_s(), 0.001))
        except queue.Empty:
            raise self._timeout(
                f"the group's store did not answer about {what} within {deadline}: its server, on rank 0 or "
                "where the launcher runs, is gone or out of reach"
            ) from None
        if error is not None:
            raise error
        return value

    def _timeout(self, text: str) -> PeerTimeout:
        return PeerTimeout(f"rank {self._rank} of {self._world_size}: {text}", rank=self._rank)
