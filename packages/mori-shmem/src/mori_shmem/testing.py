"""For tests: ranks that are expected to fail, and transports that are broken on purpose.

    with faults(comm, drop_every=1):        # every copy of this rank's queues is dropped, signals arrive;
                                            # faults(queue, ...) breaks that one
        ...

    outcomes = run_ranks_to_the_end(fn, 4)  # how each rank ended, also when one was killed

A rank's function runs in another process, so assertions belong into it: `run_ranks` raises in the test what
a rank raised, with the rank's traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from mori_shmem.launch import Outcome, run_ranks, run_ranks_to_the_end
from mori_shmem.queue import CopyQueue

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator

__all__ = [
    "Outcome",
    "allowing_for_load",
    "die",
    "faults",
    "open_fds",
    "queue_limit",
    "run_ranks",
    "run_ranks_to_the_end",
]


@contextlib.contextmanager
def faults(
    where: Communicator | CopyQueue, *, drop_every: int = 0, delay_us: int = 0, reorder: bool = False
) -> Iterator[None]:
    """Inside the block, a queue misbehaves, or all copy queues of this rank, those opened inside it as well.

    drop_every=n leaves out every n-th copy (1: all), delay_us holds each copy back, reorder lets a signal
    overtake the copies before it.
    """
    set_faults = where.core.set_faults if isinstance(where, CopyQueue) else where.set_faults
    set_faults(drop_every=drop_every, delay_us=delay_us, reorder=reorder)
    try:
        yield
    finally:
        set_faults(drop_every=0, delay_us=0, reorder=False)


@contextlib.contextmanager
def queue_limit(limit: int) -> Iterator[None]:
    """Inside the block, communicators made by this process may use `limit` queues to each peer."""
    before = os.environ.get("MORI_SHMEM_QUEUES")
    os.environ["MORI_SHMEM_QUEUES"] = str(limit)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MORI_SHMEM_QUEUES"]
        else:
            os.environ["MORI_SHMEM_QUEUES"] = before


def die() -> NoReturn:
    """End this process as a crash would: by SIGKILL, with no chance to say goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive after SIGKILL")


def allowing_for_load(seconds: float, most: float = 5.0) -> float:
    """A limit in seconds that holds on an idle machine, longer (`most` times, at most) where more processes
    want to run than there are CPUs."""
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * min(max(waiting, 1.0), most)


def open_fds() -> dict[int, str]:
    """This process's open descriptors and what they are, to be compared before and after."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listdir itself used
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found
