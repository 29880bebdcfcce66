"""What travels between the processes of a run. Plain data: the supervisor never unpickles a user's object."""

from __future__ import annotations

from dataclasses import dataclass

from mori_shmem.errors import MoriError


@dataclass(frozen=True)
class Job:
    """Caller to supervisor: what to run, and the caller's surroundings, which the ranks take over."""

    call: bytes  # cloudpickle of (fn, args)
    world_size: int
    timeout_s: float | None
    stop_at_first_failure: bool
    environ: dict[str, str]
    cwd: str
    sys_path: list[str]
    argv: list[str]


@dataclass(frozen=True)
class Returned:
    """Rank to caller: the pickled value of fn."""

    rank: int
    value: bytes


@dataclass(frozen=True)
class Raised:
    """Rank to caller: fn raised. `consequence`: it complains about another rank, which may be the real
    culprit."""

    rank: int
    exception: bytes | None  # None: it could not be pickled, or not unpickled again
    traceback: str
    consequence: bool


@dataclass(frozen=True)
class Ended:
    """Supervisor to caller: the process ended with no word from fn. `exit_code` is negative for a signal."""

    rank: int
    exit_code: int
    stack: str  # where Python stood, if it could still say so


@dataclass(frozen=True)
class TimedOut:
    """Supervisor to caller: still running at the run's time limit, or when the run was given up."""

    rank: int
    stack: str


@dataclass(frozen=True)
class Stopped:
    """Supervisor to caller: ended by the supervisor because another rank had failed."""

    rank: int


@dataclass(frozen=True)
class Refused:
    """Server or supervisor to caller, in place of all reports: no rank can be run, and why."""

    error: MoriError
    module: str = ""  # that must not be preloaded


Report = Returned | Raised | Ended | TimedOut | Stopped
