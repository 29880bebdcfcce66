"""Put bandwidth: the last rank copies into rank 0's part, size by size.

In turns, and for one copy each:
  shmem       queue.put, then queue.quiet: done and visible to the peer, one copy at a time
  pipelined   DEPTH puts, then one quiet
  memcpy      libc's memmove by one thread, between the very same addresses
  gloo        torch.distributed send and recv, until the receiver has it
"""

from __future__ import annotations

import ctypes
import functools

from mori_shmem.bench.stage import Stage, nothing, repeated

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
DEPTH = 8
SHORT_BYTES, LONG_BYTES = 256 << 10, 4 << 20  # below them one copy is too short for the clock
_BF16_BYTES = 2


def run(stage: Stage) -> None:
    """All sizes; adds a row per size and mode."""
    for nbytes in SIZES:
        if nbytes <= stage.options.max_bytes:
            _one_size(stage, nbytes)


def _one_size(stage: Stage, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    comm = stage.comm
    shape = (2, nbytes // _BF16_BYTES // 2)
    window = comm.alloc(nbytes)
    sender, receiver = comm.world_size - 1, 0
    there, here = window.at(0, receiver), window.at(0, sender)
    queue = comm.queue(receiver) if stage.is_sender else None
    source = window.peer(sender).tensor(shape, torch.bfloat16)
    landing = window.peer(receiver).tensor(shape, torch.bfloat16)
    message = torch.empty(shape, dtype=torch.bfloat16)

    def put() -> None:
        assert queue is not None
        queue.put(there, here, nbytes)
        queue.quiet()

    def put_pipelined() -> None:
        assert queue is not None
        for _ in range(DEPTH):
            queue.put(there, here, nbytes)
        queue.quiet()

    def memcpy() -> None:
        ctypes.memmove(landing.data_ptr(), source.data_ptr(), nbytes)

    def gloo() -> None:
        if stage.is_sender:
            dist.send(message, receiver)
        elif stage.is_receiver:
            dist.recv(message, sender)

    def transfer(mode: str, contents: torch.Tensor) -> torch.Tensor:
        if stage.is_sender:
            (message if mode == "gloo" else source).copy_(contents)
        actions[mode]()
        comm.barrier()
        return message if mode == "gloo" else landing

    local = {"shmem": put, "pipelined": put_pipelined}
    if comm.device.type == "cpu":  # the CPU can reach it
        local["memcpy"] = memcpy
    actions = {mode: action if stage.is_sender else nothing for mode, action in local.items()} | {
        "gloo": gloo
    }
    calls = 64 if nbytes < SHORT_BYTES else 4 if nbytes < LONG_BYTES else 1
    puts = {mode: DEPTH if mode == "pipelined" else 1 for mode in actions}
    timings = stage.measure({mode: repeated(act, calls, puts[mode]) for mode, act in actions.items()})
    for mode, timing in timings.items():
        wrong = stage.check(shape, f"put/{nbytes}/{mode}", functools.partial(transfer, mode))
        rate = round(nbytes / timing.max_rank_time_us / 1e3, 3)
        stage.add("put", mode, timing, {"bytes": nbytes}, mismatched_rows=wrong, gb_per_s=rate)
    comm.barrier()
    window.close()
