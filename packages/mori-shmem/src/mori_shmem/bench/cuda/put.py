"""Put bandwidth and time by size: the last rank copies into rank 0's part.

shmem       queue.put by a copy engine, a graph of them: back to back, per put
signalled   the same, each followed by the signal that tells the peer
eager       queue.put and join, enqueued one by one: what a caller sees who does not capture
sm          a kernel on all SMs that stores into the peer's memory
nccl        torch.distributed send and recv
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mori_bench import Case

from mori_shmem.bench.cuda import clock
from mori_shmem.bench.put import SIZES
from mori_shmem.bench.stage import Stage, nothing

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = 2
_THREADS = 512
LARGE_BYTES = 16 << 20
MORE_SIZES = (256 << 20,)


def run(stage: Stage) -> None:
    """All sizes; adds a row per size and mode."""
    for nbytes in (*SIZES, *MORE_SIZES):
        if nbytes <= stage.options.max_bytes:
            _one_size(stage, nbytes)


def _one_size(stage: Stage, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    comm = stage.comm
    shape = (2, nbytes // _ITEM_BYTES // 2)
    window = comm.alloc(nbytes + 4096)
    sender, receiver = comm.world_size - 1, 0
    source = window.peer(sender).tensor(shape, torch.bfloat16)
    landing = window.peer(receiver).tensor(shape, torch.bfloat16)
    message = torch.empty(shape, dtype=torch.bfloat16, device=comm.device)
    calls = 4 if nbytes >= LARGE_BYTES else 32
    queue = comm.queue(receiver)
    there, here, arrived = (
        window.at(0, receiver),
        window.at(0, sender),
        window.at(nbytes // 8 * 8 + 8, receiver),
    )

    def put(*, signal: bool, join: bool) -> None:
        queue.put(there, here, nbytes)
        if signal:
            queue.signal(arrived, 1)
        if join:
            queue.join()

    def puts(signal: bool) -> None:
        for i in range(calls):
            put(signal=signal, join=i == calls - 1)

    def by_sms() -> None:
        comm.core.kernels.launch(
            "copy", torch.cuda.current_stream().cuda_stream, there.address, here.address, nbytes // 16,
            grid=_blocks(), block=_THREADS,
        )  # fmt: skip

    def nccl() -> None:
        if stage.is_sender:
            dist.send(message, receiver)
        elif stage.is_receiver:
            dist.recv(message, sender)

    cases: dict[str, Case | Callable[[], object]] = dict.fromkeys(("shmem", "signalled", "eager"), nothing)
    if stage.is_sender:
        for mode, signal in (("shmem", False), ("signalled", True)):
            one = clock.graph(functools.partial(puts, signal))
            cases[mode] = Case(one.start, one.finish, calls)
        cases["eager"] = clock.eager(functools.partial(put, signal=False, join=True), calls)
    if nbytes % 16 == 0:
        cases["sm"] = clock.graph(by_sms, calls) if stage.is_sender else nothing
    if stage.has_nccl:
        cases["nccl"] = clock.eager(nccl, calls)
    timings = stage.measure(cases)

    def transfer(mode: str, contents: torch.Tensor) -> torch.Tensor:
        if stage.is_sender:
            (message if mode == "nccl" else source).copy_(contents)
        case = cases[mode]
        if isinstance(case, Case):
            case.start()
        comm.barrier()
        return (message if mode == "nccl" else landing).cpu()

    for mode, timing in timings.items():
        wrong = stage.check(shape, f"put/{nbytes}/{mode}", functools.partial(transfer, mode))
        rate = round(nbytes / timing.max_rank_time_us / 1e3, 3)
        stage.add("put", mode, timing, {"bytes": nbytes}, mismatched_rows=wrong, gb_per_s=rate)
    comm.barrier()
    window.close()


def _blocks() -> int:
    import torch

    return 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
