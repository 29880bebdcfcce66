"""The kernels of the bench, in Triton, on the helpers that everybody uses."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from mori_shmem.device.triton import peer_pointer, set_word, wait_word, word_pointer


@triton.jit(do_not_specialize=["turns"])
def ping_pong(table, count, record, rank, peer, first: tl.constexpr, timeout_ns, turns):
    """`turns` times: one tells the other and waits for the answer; `count` goes on from launch to launch."""
    mine = word_pointer(peer_pointer(table, rank), 0)
    there = word_pointer(peer_pointer(table, peer), 0)
    epoch = tl.load(count)
    for _ in range(turns):
        epoch += 1
        if first:
            set_word(there, epoch, "sys")
        wait_word(mine, epoch, record, timeout_ns, rank, peer, 1, 0)
        if not first:
            set_word(there, epoch, "sys")
    tl.store(count, epoch)
