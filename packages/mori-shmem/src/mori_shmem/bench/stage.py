"""What every part of the bench stands on: the ranks, the options, and how a result is checked.

A part times its cases, and in the same run shows that each of them moves what it should: `check` runs a
case twice with new contents and compares what came with what was sent, row by row. The contents on the way
in and the result on the way out pass through the bench's fault (`--break`, for tests of the bench); the
expected numbers never do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mori_bench
from mori_bench import Case, Fault, Result, Timing

if TYPE_CHECKING:
    import torch

    from mori_shmem.comm import Communicator

PACKAGES = ("mori-shmem", "torch")


@dataclass(frozen=True)
class Options:
    """The part of the command line that the ranks need."""

    reps: int
    warmup: int
    seed: int
    fault: str | None
    backend: str
    max_bytes: int


@dataclass
class Stage:
    """One rank's view of the run."""

    comm: Communicator
    options: Options
    has_nccl: bool = False
    results: list[Result] = field(default_factory=list)

    @property
    def is_sender(self) -> bool:
        """The last rank sends, in the parts that are about one pair; rank 0 receives."""
        return self.comm.rank == self.comm.world_size - 1

    @property
    def is_receiver(self) -> bool:
        return self.comm.rank == 0

    def _device_name(self) -> str:
        if self.comm.backend == "host":
            return mori_bench.cpu_name()
        if self.comm.device.type == "cpu":
            return "software node (times are the simulator's)"
        import torch

        return torch.cuda.get_device_name(self.comm.device)

    def numbers(self, shape: tuple[int, int], *purpose: object) -> torch.Tensor:
        """Random bf16 for one purpose, equal wherever it is asked for, all finite."""
        import torch

        generator = torch.Generator().manual_seed(mori_bench.seed_for(self.options.seed, *purpose))
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    def measure(
        self, cases: Mapping[str, Any], before: Callable[[], object] | None = None
    ) -> dict[str, Timing]:
        """Collective: all cases in turns; `before` each run, untimed, a barrier."""
        return mori_bench.measure(
            cases,
            reps=self.options.reps,
            warmup=self.options.warmup,
            gather=self.comm.all_gather,
            before=before or self.comm.barrier,
        )

    def check(
        self, shape: tuple[int, int], purpose: str, transfer: Callable[[torch.Tensor], torch.Tensor]
    ) -> int:
        """Collective: how many rows came wrong to rank 0.

        `transfer` is called on every rank with the contents that the sender is to send, and gives on rank 0
        what came.
        """
        fault = Fault(self.options.fault)
        wrong = 0
        for round_ in range(2):
            contents = self.numbers(shape, purpose, round_)
            self.comm.barrier()
            got = transfer(fault.input(contents, self.comm.rank, self.comm.world_size))
            if self.is_receiver:
                wrong = mismatched_rows(fault.output(got.clone()), contents)
        return int(self.comm.all_gather(wrong)[0])

    def add(
        self,
        op: str,
        mode: str,
        timing: Timing,
        shape: Mapping[str, int],
        *,
        mismatched_rows: int | None = None,
        rel_l2: float | None = None,
        validated: bool | None = None,
        **extra: object,
    ) -> None:
        """Keep one configuration's result."""
        settings = {line.variable: line.value for line in self.comm.settings.effective()}
        self.results.append(
            Result(
                op=op,
                backend=self.comm.backend,
                device=self._device_name(),
                world_size=self.comm.world_size,
                mode=mode,
                shape=shape,
                dtype={"payload": "bf16"},
                timing=timing,
                validated=mismatched_rows == 0 if validated is None else validated,
                mismatched_rows=mismatched_rows,
                rel_l2=rel_l2,
                settings={**settings, "queues_per_peer": self.comm.num_queues},
                packages=PACKAGES,
                extra=extra,
            )
        )


def mismatched_rows(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Rows that are not equal bit for bit."""
    import torch

    same = got.contiguous().view(torch.int16) == expected.contiguous().view(torch.int16)
    return int((~same.all(dim=1)).sum())


def nothing() -> None:
    """What a rank does while others are timed."""


def repeated(action: Callable[[], object], calls: int, each: int = 1) -> Case:
    """What is too short for the clock: `action`, which does its thing `each` times, `calls` times in a
    row."""

    def start() -> None:
        for _ in range(calls):
            action()

    return Case(start, calls=calls * each)
