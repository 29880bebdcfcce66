"""Symmetric memory between the processes of one machine: windows, copy queues, signals, barriers.

    comm = mori_shmem.init()               # this rank's Communicator
    window = comm.alloc(nbytes)            # the same size on every rank; each rank can reach every part
    queue = comm.queue(peer)               # copies and signals to a peer, in order, while the caller goes on

`mori_shmem.run_ranks(fn, 8)` starts ranks on this machine. Importing the package starts nothing and does
not import torch; what needs the native core loads it at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mori_shmem import errors, settings, variables
from mori_shmem.launch import run_ranks

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator, init
    from mori_shmem.program import PutProgram
    from mori_shmem.queue import CopyQueue
    from mori_shmem.window import Handle, Part, Ref, Window

_HOMES = {
    "Communicator": "comm",
    "CopyQueue": "queue",
    "Handle": "window",
    "Part": "window",
    "PutProgram": "program",
    "Ref": "window",
    "Window": "window",
    "init": "comm",
}

__all__ = [
    "Communicator",
    "CopyQueue",
    "Handle",
    "Part",
    "PutProgram",
    "Ref",
    "Window",
    "errors",
    "init",
    "run_ranks",
    "settings",
    "variables",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mori_shmem' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mori_shmem.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
