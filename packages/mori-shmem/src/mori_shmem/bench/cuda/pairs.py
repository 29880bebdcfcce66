"""Every pair of ranks: the rate of one large put from each to each, alone, and of all ranks sending at
once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mori_shmem.bench.cuda import clock
from mori_shmem.bench.stage import Stage, nothing

if TYPE_CHECKING:
    import torch

NBYTES = 64 << 20
CALLS = 4
_ITEM_BYTES = 2


def run(stage: Stage) -> None:
    """A row for each ordered pair, and for each shift with everybody sending."""
    import torch

    comm = stage.comm
    nbytes = min(NBYTES, stage.options.max_bytes)
    shape = (2, nbytes // _ITEM_BYTES // 2)
    window = comm.alloc(2 * nbytes)
    ranks = range(comm.world_size)

    def puts(peer: int) -> None:
        for _ in range(CALLS):
            comm.queue(peer).put(window.at(nbytes, peer), window.at(0), nbytes)
        comm.queue(peer).join()

    def transfer(senders: dict[int, int], contents: torch.Tensor) -> torch.Tensor:
        """What came to a rank that is sent to; told to rank 0."""
        source = next(s for s in senders)
        target = senders[source]
        if comm.rank == source:
            window.tensor(shape, torch.bfloat16).copy_(contents)
        if comm.rank in senders:
            puts(senders[comm.rank])
            comm.queue(senders[comm.rank]).quiet()
        comm.barrier()
        return window.peer(target).tensor(shape, torch.bfloat16, nbytes).cpu()

    runs = [("alone", {a: b}) for a in ranks for b in ranks if a != b]
    runs += [("all_at_once", {a: (a + shift) % comm.world_size for a in ranks}) for shift in ranks if shift]
    for mode, senders in runs:
        mine = senders.get(comm.rank)
        case = nothing if mine is None else clock.graph(functools.partial(puts, mine))
        timing = stage.measure({mode: case})[mode]
        wrong = stage.check(shape, f"pairs/{mode}/{senders}", functools.partial(transfer, senders))
        first = next(iter(senders))
        rate = round(CALLS * nbytes / timing.max_rank_time_us / 1e3, 3)
        where = {"bytes": nbytes, "from": first, "to": senders[first]}
        stage.add("pairs", mode, timing, where, mismatched_rows=wrong, gb_per_s=rate, puts=CALLS)
    comm.barrier()
    window.close()
