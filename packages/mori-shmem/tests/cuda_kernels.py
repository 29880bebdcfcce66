"""Triton kernels of test_cuda.py. Triton reads their source, so they live in a module of their own."""

from __future__ import annotations

import triton
import triton.language as tl
from mori_shmem.device.triton import (
    add_to_word,
    all_ranks_meet,
    peer_pointer,
    read_word,
    set_word,
    wait_word,
    word_pointer,
)


@triton.jit(do_not_specialize=["value", "timeout_ms"])  # one variant: loading another may wait for the queues
# type: ignore
def produce(table, rank, words, value, timeout_ms, record, n: tl.constexpr, chunks: tl.constexpr):
    """Store a chunk, release its flag, and wait until what the peer sent for it is here."""
    timeout_ns = timeout_ms.to(tl.int64) * 1000000
    mine = peer_pointer(table, rank)
    data = mine.to(tl.pointer_type(tl.int64))
    for c in range(chunks):
        tl.store(data + c * n + tl.arange(0, n), tl.zeros((n,), tl.int64) + value + c)
        set_word(word_pointer(mine, words + 8 * c), 1, "sys")
        came = word_pointer(mine, words + 512 + 8 * c)
        wait_word(came, 1, record, timeout_ns, rank, 1 - rank, 3, c)
        set_word(came, 0, "sys")


@triton.jit
def meet_and_signal(table, count, record, rank, world, out, timeout_ns, wanted):  # type: ignore
    """A barrier, 3 more at the peer's word, a wait for mine, a barrier."""
    all_ranks_meet(table, 0, count, record, timeout_ns, rank, world, 5)
    add_to_word(word_pointer(peer_pointer(table, 1 - rank), 512), 3, "sys")
    mine = word_pointer(peer_pointer(table, rank), 512)
    came = wait_word(mine, wanted, record, timeout_ns, rank, 1 - rank, 6, 64)
    tl.store(out, came.to(tl.int64))
    tl.store(out + 1, read_word(mine, "sys"))
    all_ranks_meet(table, 0, count, record, timeout_ns, rank, world, 5)
