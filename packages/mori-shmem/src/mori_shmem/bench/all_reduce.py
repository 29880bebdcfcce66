"""All-reduce of bf16 partials: the load/store plan of `collectives.py`, in turns with gloo's all_reduce.

The sum of the load/store plan has one right value, bit for bit: fp32 additions in rank order, rounded once.
gloo adds in bf16, in its own order, so its result is compared by its relative error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mori_bench import Fault

from mori_shmem.bench.stage import Stage, mismatched_rows
from mori_shmem.collectives import all_reduce_lsa, reduced_bytes

if TYPE_CHECKING:
    import torch

ROWS, COLUMNS = 1024, 8192  # 16 MiB of bf16
GLOO_TOLERANCE = 1e-2  # world_size roundings to bf16 give about 3e-3; two swapped columns give 2e-2
_BF16_BYTES = 2


def run(stage: Stage) -> None:
    """Adds a row for each of the two."""
    import torch
    import torch.distributed as dist

    comm = stage.comm
    shape = (min(ROWS, max(2, stage.options.max_bytes // (COLUMNS * _BF16_BYTES))), COLUMNS)
    numel = shape[0] * shape[1]
    reduced_at = numel * _BF16_BYTES
    window = comm.alloc(reduced_at + reduced_bytes(numel, comm.world_size))
    partials = window.tensor(shape, torch.bfloat16)
    out = torch.empty(shape, dtype=torch.bfloat16)
    in_place = torch.empty(shape, dtype=torch.bfloat16)

    def lsa() -> None:
        all_reduce_lsa(window, out, partials_offset_bytes=0, reduced_offset_bytes=reduced_at)

    def gloo() -> None:
        dist.all_reduce(in_place)

    def refill() -> None:
        in_place.copy_(partials)  # gloo sums in place; without this its numbers would grow without bound
        comm.barrier()

    partials.copy_(_partial(stage, shape, comm.rank, 0))
    timings = stage.measure({"shmem": lsa, "gloo": gloo}, before=refill)
    right = _Check(stage, shape)
    for mode, action, result in (("shmem", lsa, out), ("gloo", gloo, in_place)):
        for round_ in (1, 2):
            mine = right.fault.input(_partial(stage, shape, comm.rank, round_), comm.rank, comm.world_size)
            comm.barrier()
            partials.copy_(mine)
            refill()
            action()
            right.compare(result, round_)
        rel_l2, wrong, validated = right.verdict(exact=mode == "shmem")
        extra = {"plan": "lsa" if mode == "shmem" else "gloo"}
        stage.add(
            "all_reduce", mode, timings[mode], {"rows": shape[0], "columns": shape[1]},
            mismatched_rows=wrong, rel_l2=rel_l2, validated=validated, **extra,
        )  # fmt: skip
    comm.barrier()
    window.close()


def _partial(stage: Stage, shape: tuple[int, int], rank: int, round_: int) -> torch.Tensor:
    return stage.numbers(shape, "all_reduce", rank, round_)


class _Check:
    """Compares results with the reference of their round, on every rank."""

    def __init__(self, stage: Stage, shape: tuple[int, int]) -> None:
        self._stage = stage
        self._shape = shape
        self.fault = Fault(stage.options.fault)
        self._rel_l2 = float("nan")
        self._wrong = 0

    def compare(self, result: torch.Tensor, round_: int) -> None:
        stage = self._stage
        total = _partial(stage, self._shape, 0, round_).float()
        for rank in range(1, stage.comm.world_size):
            total += _partial(stage, self._shape, rank, round_).float()
        got = self.fault.output(result)
        self._wrong = mismatched_rows(got, total.bfloat16())
        self._rel_l2 = float((got.float() - total).norm() / total.norm())

    def verdict(self, *, exact: bool) -> tuple[float, int, bool]:
        """(relative error, rows not bit-equal, right), the worst of all ranks."""
        everybodys = self._stage.comm.all_gather((self._rel_l2, self._wrong))
        wrong = max(wrong for _, wrong in everybodys)
        right = [rel <= GLOO_TOLERANCE and (w == 0 or not exact) for rel, w in everybodys]
        return max(rel for rel, _ in everybodys), wrong, all(right)
