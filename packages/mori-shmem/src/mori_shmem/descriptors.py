"""File descriptors: what ranks hand each other memory by, and what a process may hold only so many of.

Where they run out, the kernel says it in three ways: a call fails with EMFILE (this process's limit) or
ENFILE (the machine's); descriptors that came with a message are dropped, and fewer arrive than were sent; a
message with descriptors is not taken while too many of this user's are under way (ETOOMANYREFS).
Where it is known beforehand how many will be needed, `check_room` says so before anything is begun.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mori_shmem.errors import DescriptorLimitError

if TYPE_CHECKING:
    from mori_shmem.mesh import Message

_RAN_OUT = (errno.EMFILE, errno.ENFILE)


def ran_out(error: BaseException | None) -> bool:
    """Whether this error, or what it came from, is that no descriptor was left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _RAN_OUT:
            return True
        facts = getattr(error, "info", None)  # of a CoreError; launchers get here where there is no core
        if isinstance(facts, dict) and facts.get("errno") in _RAN_OUT:
            return True
        if isinstance(error, RuntimeError) and os.strerror(errno.EMFILE) in str(error):  # torch's
            return True
        error = error.__cause__
    return False


def room() -> float:
    """How many more descriptors this process may hold."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    try:
        return soft - (len(os.listdir("/proc/self/fd")) - 1)  # less the one that it is listed by
    except OSError:
        return 0


def check_room(who: str, needed: int) -> None:
    """DescriptorLimitError unless `who`, which is this process, may hold so many descriptors more."""
    if (free := room()) < needed:
        raise limit_error(
            who, f"{needed} more file descriptors are needed, {free:g} can be had", int(needed - free)
        )


def needed_by_init(world_size: int) -> int:
    """How many `init` holds at once, on the host: a socket to each peer, the control page and pidfd that each
    hands over, and two copies of the pidfd."""
    return 5 * world_size + 2


def shortage() -> int | None:
    """The errno with which the kernel would refuse a descriptor now, for failures of others that do not say
    why."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno
    return None


def limit_error(who: str, what: str, more: int = 1) -> DescriptorLimitError:
    """`what` happened to `who`, for want of at least `more` descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 1 << (soft + more).bit_length()
    beyond = "" if enough <= hard or hard < 0 else f" (the hard limit is {hard}: /etc/security/limits.conf)"
    return DescriptorLimitError(
        f"{who}: {what}: this process may hold {soft} file descriptors. Raise the limit before the ranks are "
        f"started: ulimit -n {enough}{beyond}"
    )


def check_all_came(who: str, messages: Sequence[Message]) -> None:
    """DescriptorLimitError unless every message has the descriptors that were sent with it."""
    sent, came = (sum(numbers) for numbers in zip(*((m.num_fds, len(m.fds)) for m in messages), strict=True))
    if came < sent:
        raise limit_error(who, f"{came} of {sent} descriptors of shared memory came", sent - came)


@contextlib.contextmanager
def limit_named(who: str) -> Iterator[None]:
    """What fails in here for want of a descriptor becomes a DescriptorLimitError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DescriptorLimitError) or not ran_out(error):
            raise
        raise limit_error(who, "no file descriptor was left") from error
