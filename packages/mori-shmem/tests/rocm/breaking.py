"""breaking.py CASE: transports that are not what they should be, ranks that die. Prints what was raised."""

from __future__ import annotations

import sys
import time
from typing import Any

import mori_shmem
from mori_shmem.errors import MoriError
from mori_shmem.testing import die, run_ranks_to_the_end


def raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}"


def opens() -> str:
    """A communicator that copies a word to each peer."""
    with mori_shmem.init("rocm", timeout_s=20) as comm:
        win = comm.alloc(4096)
        for peer in range(comm.world_size):
            comm.queue(peer).signal(win.at(8 * comm.rank, peer), 1)
        for peer in range(comm.world_size):
            comm.wait(win.at(8 * peer), 1, peer=peer)
        comm.core.device_queues()
        comm.barrier()
        return f"opened by {comm.core.sdma.way}"


def runs_out_of_queues() -> list[str]:
    """An engine of this node holds 2 queues: some communicator finds none. Closed, they leave none behind."""
    said: list[str] = []
    kept: list[Any] = []
    try:
        for number in range(8):
            kept.append(mori_shmem.init("rocm", rank=0, world_size=1, name=f"c{number}"))
            kept[-1].queue(0)
    except MoriError as error:
        said.append(raised(error))
    for comm in kept:
        comm.close()
    with mori_shmem.init("rocm", rank=0, world_size=1, name="again") as comm:
        win = comm.alloc(64)
        comm.queue(0).signal(win.at(0), 3)
        comm.wait(win.at(0), 3)
        said.append("again works")
    return said


def waits_for_the_dead(how: str) -> str:
    """Rank 1 dies; the others wait for it, each in its own way, and say after how long they knew."""
    comm = mori_shmem.init("rocm", timeout_s=20)
    win = comm.alloc(4096)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.2)
        die()
    start = time.monotonic()
    try:
        if how == "signal":
            comm.wait(win.at(0), 1, peer=1)
        elif how == "barrier":
            comm.barrier()
        else:
            comm.queue(comm.rank).wait(win.at(8), 1)
            comm.queue(comm.rank).quiet()
    except MoriError as error:
        took = "soon" if time.monotonic() - start < 5 else "late"
        comm.close()
        return f"{how}: {took} {raised(error)}"
    return "not noticed"


def main(case: str) -> None:
    if case == "opens":
        for outcome in run_ranks_to_the_end(opens, 2):
            print(outcome.value if outcome.error is None else raised(outcome.error), flush=True)
    elif case == "runs_out_of_queues":
        print("\n".join(runs_out_of_queues()), flush=True)
    elif case == "one_device":
        for outcome in run_ranks_to_the_end(opens, 3):
            print(raised(outcome.error) if outcome.error else outcome.value, flush=True)
    else:
        for how in ("signal", "barrier", "quiet"):
            for outcome in run_ranks_to_the_end(waits_for_the_dead, 4, how):
                print(outcome.value if outcome.error is None else raised(outcome.error), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
