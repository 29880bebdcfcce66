"""The ways in which Stage1 over copy engines can be asked for, and what tests do with all of them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mori_shmem
import torch
from mori_megamoe import MegaMoE, MegaMoEStage1Sdma
from mori_megamoe.reference import RankInput
from mori_megamoe.targets.host.sdma.job import Job
from mori_megamoe.testing import Toy, wrong_rows
from mori_shmem.testing import faults

MODES: dict[str, dict[str, Any]] = {
    "auto": {},
    "shuffler": {"scale_mode": "shuffler", "shufflers": 2},
    "shuffler, one put, ready-first": {"scale_mode": "shuffler", "puts": "one", "order": "ready-first"},
    "ldsw, one put": {"scale_mode": "ldsw", "puts": "one"},
    "all merged": {"merge_rows": 10_000},
    "ldsw, ready-first": {"scale_mode": "ldsw", "order": "ready-first", "workers": 1},
    "fuse-quant, shuffler": {"fuse_quant": True, "scale_mode": "shuffler"},
    "fuse-quant, ldsw, one put": {"fuse_quant": True, "scale_mode": "ldsw", "puts": "one"},
    "in-launch": {"gemm1": "in-launch", "packers": 3},
    "7001, one put": {"gemm1": "7001", "puts": "one", "workers": 1, "merge_rows": 20},
    "in-launch, ready-first": {"gemm1": "in-launch", "order": "ready-first"},
}
FEW = ("shuffler", "fuse-quant, ldsw, one put", "in-launch", "ldsw, ready-first")  # every part of each once

Calls = Sequence[Sequence[RankInput]]  # for each call, what every rank gives


def check(moe: MegaMoE, inputs: Sequence[RankInput], results: Sequence[Any], what: object) -> None:
    """One call; every byte must be the reference's, which the baseline's are too (test_layer.py)."""
    wrong = wrong_rows(moe(*inputs[moe.comm.rank]), results[moe.comm.rank].out)
    assert not wrong, f"{what} on rank {moe.comm.rank}: rows {wrong[:5]} differ"


def run_modes(
    toy: Toy,
    calls: Calls,
    modes: Sequence[str],
    *,
    within: Callable[[MegaMoE, int], Any] | None = None,
    timeout_s: float = 20,
    **changes: Any,
) -> None:
    """The baseline, then in each mode all calls, then the baseline again. `within` is around each mode."""
    torch.set_num_threads(1)
    want = [toy.reference(inputs) for inputs in calls]

    def rank() -> None:
        with mori_shmem.init(timeout_s=timeout_s) as comm, toy.layer(comm, **changes) as moe:
            check(moe, calls[0], want[0], "baseline before")
            for number, mode in enumerate(modes):
                stage1 = MegaMoEStage1Sdma(moe, **MODES[mode]).install()
                with within(moe, number) if within is not None else contextlib.nullcontext():
                    for call, (inputs, results) in enumerate(zip(calls, want, strict=True)):
                        check(moe, inputs, results, f"{mode}, call {call}")
                stage1.uninstall()
            check(moe, calls[-1], want[-1], "baseline after")

    mori_shmem.run_ranks(rank, toy.num_ranks, timeout_s=200)


@contextlib.contextmanager
def random_arrivals(moe: MegaMoE, seed: int) -> Iterator[None]:
    """Every queue of this rank carries its copies with another delay, and the rank is late here and there."""
    rng = random.Random(100 * seed + moe.comm.rank)
    wait_ready, put = Job.wait_ready, Job.put

    def late(run: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: Any) -> None:
            run(*args)
            time.sleep(rng.choice([0, 0, 0, 0.004]))

        return wrapped

    with contextlib.ExitStack() as stack:
        for peer in range(moe.comm.world_size):
            if peer != moe.comm.rank:
                stack.enter_context(faults(moe.comm.queue(peer), delay_us=rng.choice([1, 500, 3000, 8000])))
        Job.wait_ready, Job.put = late(wait_ready), late(put)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Job.wait_ready, Job.put = wait_ready, put  # type: ignore[method-assign]
