"""dead_peer.py: a rank dies while kernels of the other wait for it, for longer than anybody would watch.

Prints `ok NAME` for each wait of the host that raises PeerDied and ends the kernel. For `mori-sim run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mori_shmem
import pytest
from mori_shmem.device.queue_words import ticks
from mori_shmem.errors import PeerDied
from mori_shmem.testing import die, run_ranks_to_the_end

WAIT_S, SOON_S = 600, 30  # the kernels' own limit; what ending them may take on a busy machine

Wait = Callable[[mori_shmem.Communicator, mori_shmem.Window], object]
WAITS: dict[str, Wait] = {
    "barrier": lambda comm, flags: comm.barrier(),
    "wait": lambda comm, flags: comm.wait(flags.at(8), 1, peer=1),
    "wait_for_anybody": lambda comm, flags: comm.wait(flags.at(8), 1),
    "alloc": lambda comm, flags: comm.alloc(64),
    "all_gather": lambda comm, flags: comm.all_gather(comm.rank),
}


def rank(name: str) -> None:
    import waiting

    comm = mori_shmem.init("rocm", timeout_s=WAIT_S)
    flags = comm.alloc(64, kind="signals")
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.2)
        die()
    stream = comm.core.callers_stream()
    waiting.launch(flags.at(0).address, comm.core.record.address, ticks(WAIT_S), stream=stream)
    with pytest.raises(PeerDied, match="rank 1 died"):
        WAITS[name](comm, flags)
    end = time.monotonic() + SOON_S
    while not comm.core.device.is_idle(stream):
        assert time.monotonic() < end, "the kernel still waits"
        time.sleep(0.01)
    with pytest.raises(PeerDied, match="rank 1 died"):
        comm.check()
    comm.close()


if __name__ == "__main__":
    for name in WAITS:
        survivor, _ = run_ranks_to_the_end(rank, 2, name, timeout_s=150)
        if survivor.error:
            raise survivor.error
        print("ok", name, flush=True)
