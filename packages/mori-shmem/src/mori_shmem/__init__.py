"""Symmetric memory between the processes of one machine: windows, copy queues, signals, barriers.

comm = mori_shmem.init()               # one Communicator per rank
window = comm.alloc(nbytes)            # the same size on every rank, each rank can reach every part
queue = comm.queue(peer)               # copies and signals to a peer, in order, without stopping the caller
"""

from __future__ import annotations

from mori_shmem import errors, settings, variables
from mori_shmem.launch import run_ranks

__all__ = ["errors", "run_ranks", "settings", "variables"]
__version__ = "0.1.0"
