"""`run_ranks(fn, world_size, *args)`: call `fn` in that many processes of this machine.

Four kinds of processes take part:

    caller ──control──▶ server ──fork──▶ supervisor ──fork──▶ rank 0 … rank n-1
       ▲                                     │
       └────────────── outcomes ─────────────┘

  server      started once per caller, imports torch once (the slow part), forks one supervisor per run
  supervisor  plays torchrun's agent: holds the store at MASTER_ADDR:MASTER_PORT (on a port that it is already
              listening on, so no port is ever guessed), forks the ranks, collects how each ended
  rank        sets what torchrun sets, calls fn(*args), hands back its value or its exception

`fn` travels by value where the ranks could not import it (scripts without a guard, test modules, the REPL,
closures). The caller's main module is never run again.

Nothing outlives the caller: a rank dies with its supervisor (PR_SET_PDEATHSIG), the supervisor ends its
ranks and whatever they started when the caller's end of the connection closes, and the server ends when the
caller does. When a rank fails, the others get SIGTERM, then SIGKILL within two seconds, and the failure
that came first is raised in the caller with that rank's traceback as a note.

Read in this order: this file, client.py (the caller's side), server.py, supervisor.py, rank.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from mori_shmem.errors import ArgumentError
from mori_shmem.launch.client import Outcome, first_failure, preload, run_job

__all__ = ["Outcome", "preload", "run_ranks", "run_ranks_to_the_end", "started_by_launcher"]

T = TypeVar("T")


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: object, timeout_s: float | None = None
) -> list[T]:
    """Call `fn(*args)` in `world_size` new processes; returns what each rank returned, in rank order.

    In each rank RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun sets them,
    and torch computes on OMP_NUM_THREADS threads (1 if the caller has not set it). `timeout_s` limits the
    whole run; without it only the waits inside `fn` have limits.
    """
    outcomes = run_job(fn, args, _checked(world_size), timeout_s, stop_at_first_failure=True)
    failure = first_failure(outcomes)
    if failure is not None:
        raise failure
    return [outcome.value for outcome in outcomes]


def run_ranks_to_the_end(
    fn: Callable[..., object],
    world_size: int,
    *args: object,
    timeout_s: float | None = None,
    from_here: bool = False,
) -> list[Outcome]:
    """As `run_ranks`, but a failing rank does not end the others, and nothing is raised: how each rank
    ended.

    from_here  no server: the ranks are forked from this process, which must have one Python thread, and
               begin with all that it has imported and made (compiled kernels, say)
    """
    return run_job(
        fn, args, _checked(world_size), timeout_s, stop_at_first_failure=False, from_here=from_here
    )


def started_by_launcher() -> bool:
    """Whether this process is a rank already: of torchrun, or of `run_ranks`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _checked(world_size: int) -> int:
    if type(world_size) is not int or not 1 <= world_size <= 1024:
        raise ArgumentError(f"world_size={world_size!r}: run_ranks starts 1 to 1024 ranks")
    return world_size
