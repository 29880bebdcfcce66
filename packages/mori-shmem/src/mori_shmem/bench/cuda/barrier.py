"""Barriers of all ranks: in a kernel on the stream, by the hosts, and by NCCL (an all-reduce of one number).

Checked by what a barrier is for: every rank stores its row and enters; behind it rank 0 must see all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mori_bench import Case

from mori_shmem.bench.cuda import clock
from mori_shmem.bench.stage import Stage, repeated

if TYPE_CHECKING:
    import torch

    from mori_shmem.window import Window

CALLS = 20
_COLUMNS = 8


def run(stage: Stage) -> None:
    """Adds a row for each."""
    import torch
    import torch.distributed as dist

    comm = stage.comm
    number = torch.zeros(1, device=comm.device)
    barriers: dict[str, Callable[[], object]] = {"shmem": comm.stream_barrier, "host": comm.barrier}
    cases: dict[str, Case] = {
        "shmem": clock.graph(comm.stream_barrier, CALLS),
        "host": repeated(comm.barrier, CALLS),
    }
    if stage.has_nccl:
        barriers["nccl"] = lambda: dist.all_reduce(number)
        cases["nccl"] = clock.eager(barriers["nccl"], CALLS)
    window = comm.alloc(4096)
    timings = stage.measure(cases)
    for mode, barrier in barriers.items():
        shape = (max(comm.world_size, 2), _COLUMNS)
        wrong = stage.check(shape, f"barrier/{mode}", functools.partial(_transfer, window, barrier))
        stage.add("barrier", mode, timings[mode], {}, mismatched_rows=wrong)
    comm.barrier()
    window.close()


def _transfer(window: Window, barrier: Callable[[], object], contents: torch.Tensor) -> torch.Tensor:
    """Each rank stores its row in its own part, and after the barrier takes everybody's."""
    import torch

    rank, world_size = window.handle.rank, window.handle.world_size
    window.tensor(_COLUMNS, torch.bfloat16).copy_(contents[rank])
    barrier()
    rows = [window.peer(peer).tensor(_COLUMNS, torch.bfloat16) for peer in range(world_size)]
    return torch.stack([*(row.cpu() for row in rows), *contents[world_size:]])
