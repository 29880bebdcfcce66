"""Every error of the mori packages, in one hierarchy.

A message says what was given, what is allowed and what to do about it, so that whoever reads it in a log of
eight ranks needs nothing else. What a program may want to act on is an attribute as well: the ranks
concerned, the value seen and the value wanted.

Errors travel between processes (`run_ranks` raises in the caller what a rank raised), so each one can be
pickled: the message is the only positional argument, everything else lives in the instance's dict.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoriError(Exception):
    """Anything that the mori packages raise on purpose."""


class ArgumentError(MoriError, ValueError):
    """A value that can never be right, refused before any rank starts to wait for it."""


class LayoutError(ArgumentError):
    """Memory that does not fit: an offset, size, shape or alignment, or sizes that differ between ranks."""


class UnsupportedShape(ArgumentError):
    """A problem shape, dtype or rank count that the chosen target or mode cannot compute."""


class SettingError(ArgumentError):
    """An environment variable (or the argument that overrides it) out of its range, or different between
    ranks."""


class ClosedError(MoriError, RuntimeError):
    """Use of a communicator, window or queue after `close()`."""


class ForkedError(MoriError, RuntimeError):
    """Use of a communicator in a process forked from the one that made it."""


class AlreadyInitialised(MoriError, RuntimeError):
    """A live communicator of this process has the same identity: same ranks, same store, same name."""


class TransportInert(MoriError, RuntimeError):
    """The asked-for transport is not there, or was tried and does not move bytes."""


class CoreMissing(TransportInert, ImportError):
    """The native part of the package cannot be loaded."""


class CollectiveMismatch(MoriError, RuntimeError):
    """Ranks met in different collective calls: one in `alloc`, another in `barrier`, say."""


class PeerError(MoriError, RuntimeError):
    """Something went wrong between this rank and others.

    rank   the rank that raises
    peers  the ranks it is about, in the communicator's numbering; empty where no rank is to blame
    """

    def __init__(self, message: str, *, rank: int | None = None, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.peers = tuple(peers)


class PeerTimeout(PeerError, TimeoutError):
    """A wait reached its deadline. `seen` and `wanted` are set when it waited for a value in memory."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peers: Sequence[int] = (),
        seen: int | None = None,
        wanted: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank, peers=peers)
        self.seen = seen
        self.wanted = wanted


class PeerDied(PeerError):
    """A peer's process ended, or left the communicator, while this rank still needed it."""


class QueueFault(MoriError, RuntimeError):
    """A copy queue met a packet that it may not execute and stopped. The message holds the packet's
    dwords."""


class QueueLimitError(MoriError, RuntimeError):
    """More copy queues asked for than the limit allows."""


class DescriptorLimitError(MoriError, RuntimeError):
    """This process, or the machine, may hold no more file descriptors; memory is shared by them."""


class RankFailed(MoriError, RuntimeError):
    """A rank started by `run_ranks` ended without a result: a signal, an exit, or an error that cannot
    travel."""

    def __init__(self, message: str, *, rank: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class RunTimeout(MoriError, TimeoutError):
    """`run_ranks` reached its time limit; the message shows where the unfinished ranks stood."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
