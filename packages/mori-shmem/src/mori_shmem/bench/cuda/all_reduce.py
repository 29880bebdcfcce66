"""All-reduce of bf16 partials: the load/store plan of `collectives.py`, in turns with NCCL's all_reduce.

The plan's sum has one right value, bit for bit: fp32 additions in rank order, rounded once. NCCL adds in
its own order and precision, so its result is compared by its relative error.
"""

from __future__ import annotations

from mori_bench import Case

from mori_shmem.bench.all_reduce import _Check, _partial
from mori_shmem.bench.cuda import clock
from mori_shmem.bench.stage import Stage
from mori_shmem.collectives import all_reduce_lsa, reduced_bytes

SHAPE = (1024, 8192)  # 16 MiB of bf16
CALLS = 4
_ITEM_BYTES = 2


def run(stage: Stage) -> None:
    """Adds a row for each of the two."""
    import torch
    import torch.distributed as dist

    comm = stage.comm
    numel = SHAPE[0] * SHAPE[1]
    reduced_at = numel * _ITEM_BYTES
    window = comm.alloc(reduced_at + reduced_bytes(numel, comm.world_size))
    partials = window.tensor(SHAPE, torch.bfloat16)
    out, in_place = (torch.empty(SHAPE, dtype=torch.bfloat16, device=comm.device) for _ in range(2))

    def lsa() -> None:
        all_reduce_lsa(window, out, partials_offset_bytes=0, reduced_offset_bytes=reduced_at)

    def nccl() -> None:
        dist.all_reduce(in_place)

    def refill() -> None:
        in_place.copy_(partials)
        comm.barrier()

    partials.copy_(_partial(stage, SHAPE, comm.rank, 0))
    lsa()
    cases: dict[str, Case] = {"shmem": clock.graph(lsa, CALLS)}
    actions = {"shmem": (lsa, out)}
    if stage.has_nccl:
        cases["nccl"] = clock.eager(nccl, CALLS)
        actions["nccl"] = (nccl, in_place)
    timings = stage.measure(cases, before=refill)
    for mode, (action, result) in actions.items():
        right = _Check(stage, SHAPE)
        for round_ in (1, 2):
            mine = right.fault.input(_partial(stage, SHAPE, comm.rank, round_), comm.rank, comm.world_size)
            comm.barrier()
            partials.copy_(mine)
            refill()
            action()
            right.compare(result.cpu(), round_)
        rel_l2, wrong, validated = right.verdict(exact=mode == "shmem")
        stage.add(
            "all_reduce", mode, timings[mode], {"rows": SHAPE[0], "columns": SHAPE[1]},
            mismatched_rows=wrong, rel_l2=rel_l2, validated=validated,
        )  # fmt: skip
    comm.barrier()
    window.close()
