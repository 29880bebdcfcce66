"""Barriers: how long until all ranks have met, in turns with gloo's.

Checked by what a barrier is for: every rank writes its row and enters; behind it rank 0 must see all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mori_shmem.bench.stage import Stage, repeated

if TYPE_CHECKING:
    import torch

    from mori_shmem.window import Window

CALLS = 50
_COLUMNS = 8


def run(stage: Stage) -> None:
    """Adds a row for each of the two barriers."""
    import torch.distributed as dist

    barriers: dict[str, Callable[[], object]] = {"shmem": stage.comm.barrier, "gloo": dist.barrier}
    window = stage.comm.alloc(4096)
    timings = stage.measure({mode: repeated(barrier, CALLS) for mode, barrier in barriers.items()})
    for mode, barrier in barriers.items():
        shape = (max(stage.comm.world_size, 2), _COLUMNS)
        wrong = stage.check(shape, f"barrier/{mode}", functools.partial(_transfer, window, barrier))
        stage.add("barrier", mode, timings[mode], {}, mismatched_rows=wrong)
    stage.comm.barrier()
    window.close()


def _transfer(window: Window, barrier: Callable[[], object], contents: torch.Tensor) -> torch.Tensor:
    """Each rank stores its row in its own part, and after the barrier takes everybody's."""
    import torch

    rank, world_size = window.handle.rank, window.handle.world_size
    window.tensor(_COLUMNS, torch.bfloat16).copy_(contents[rank])
    barrier()
    rows = [window.peer(peer).tensor(_COLUMNS, torch.bfloat16) for peer in range(world_size)]
    return torch.stack([*rows, *contents[world_size:]])
