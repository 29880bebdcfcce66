"""A step that may fail on one rank alone: done by all ranks, or told to all of them.

Every rank does its part, then says how that went. A rank whose part is a collective call (`alloc`, say) that
another one never reaches finds it here instead: both are told so, and both come here once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mori_shmem
from mori_shmem import errors
from mori_shmem.errors import CollectiveMismatch, MoriError

_T = TypeVar("_T")
_Told = tuple[str, str]  # the name of the error's class, and what it says


def together(comm: mori_shmem.Communicator, what: str, action: Callable[[], _T]) -> _T:
    """Collective: what `action` returns here; raises on every rank if it raised on any, with that rank's
    reason. `what` begins the message: "a stage cannot be opened"."""
    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    try:
        by_rank = _tell(comm, error)
    except MoriError:
        if error is not None:
            raise error from None  # nobody can be told: they left, or the communicator is closed
        raise
    failed = {rank: told for rank, told in enumerate(by_rank) if told is not None}
    if failed:
        said = "; ".join(f"rank {rank}: {name}: {text}" for rank, (name, text) in failed.items())
        raise _class_of({name for name, _ in failed.values()})(f"{what} on {said}") from error
    return result  # type: ignore[return-value]


def _tell(comm: mori_shmem.Communicator, error: Exception | None) -> list[_Told | None]:
    mine = None if error is None else (type(error).__name__, str(error))
    try:
        return comm.all_gather(mine)
    except CollectiveMismatch:
        return comm.all_gather(mine)


def _class_of(names: set[str]) -> type[MoriError]:
    """The error that all of them raised, if it is one of mori's."""
    found = getattr(errors, names.pop(), None) if len(names) == 1 else None
    return found if isinstance(found, type) and issubclass(found, MoriError) else MoriError
