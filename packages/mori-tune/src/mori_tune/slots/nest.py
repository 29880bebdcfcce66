"""The process that the ranks of one crew on one machine are forked from: what they all import, torch say, is
imported once.

    python -m mori_tune.slots.nest OP PARENT CONTROL RANKS

  1. imports the tunable, and the modules that it names as `preload`
  2. forks each rank, which leads a session of its own and serves (worker.py)
  3. writes {"rank": r, "pid": ...} to CONTROL for each, and {"rank": r, "code": ...} when one has ended

RANKS is a JSON list of {"place": ..., "environ": ..., "fds": [input, output, replies]}. Every crew has a new
nest: sets of processes differ in all that chance decides when a process starts. What cannot be imported is
left to the rank that needs it. The nest dies with its parent, and its ranks with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mori_tune.slots.worker import die_with, serve
from mori_tune.tunable import Place, Preloads, load


def import_once(op: str) -> None:
    """Once for all ranks; the pages are shared."""
    with contextlib.suppress(BaseException):
        tunable = load(op)
        if isinstance(tunable, Preloads):
            for name in tunable.preload:
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page


def fork_ranks(ranks: Sequence[Mapping[str, Any]], control: int) -> Mapping[str, Any] | None:
    """In a rank: which one it is. In the nest: None, once all are there."""
    for number, rank in enumerate(ranks):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(control)
            for other in ranks[number + 1 :]:
                close(other["fds"])
            return rank
        tell(control, {"rank": rank["place"]["rank"], "pid": pid})
        close(rank["fds"])
        ranks[number]["pids"].append(pid)
    return None


def become(rank: Mapping[str, Any], nest: int) -> int:
    """This process is that rank from now on; returns where it replies."""
    os.setsid()  # its own children end with it
    die_with(nest)
    reads, writes, replies = rank["fds"]
    os.environ.update(rank["environ"])
    os.dup2(reads, 0)
    os.dup2(writes, 1)
    os.dup2(writes, 2)
    close((reads, writes))
    return int(replies)


def watch(ranks: Sequence[Mapping[str, Any]], control: int) -> None:
    """Until the last has ended."""
    quiet = os.open(os.devnull, os.O_RDWR)  # the first rank's output would be held open
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    number_of = {rank["pids"][0]: rank["place"]["rank"] for rank in ranks}
    while number_of:
        pid, status = os.wait()
        if pid in number_of:
            tell(control, {"rank": number_of.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def tell(control: int, what: Mapping[str, Any]) -> None:
    os.write(control, (json.dumps(what) + "\n").encode())


def close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def main() -> None:
    op, parent, control = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ranks = [{**rank, "pids": []} for rank in json.loads(sys.argv[4])]
    die_with(parent)
    nest = os.getpid()
    import_once(op)
    mine = fork_ranks(ranks, control)
    if mine is None:
        watch(ranks, control)
    else:
        serve(op, Place(**mine["place"]), become(mine, nest))


if __name__ == "__main__":
    main()
