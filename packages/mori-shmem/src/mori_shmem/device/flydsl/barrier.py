"""All ranks meet inside a kernel.

Each rank has, in a window that they share, one 64-bit word for each rank; `words` is where that row begins
in a part. `count` is a word of this rank's own: how many barriers it has entered.
  1. One wave of each rank raises its count to e, and publishes what this GPU has stored.
  2. Lane p stores e into rank p's row, at this rank's place.
  3. Lane p waits until its own row holds at least e at rank p's place.
A row's word has one writer and grows by one each time, so a barrier cannot be taken for another; a rank may
be one barrier ahead, and then its word is e + 1, which does as well. The count is in memory, so replays of a
graph and plain calls may mix.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from mori_shmem.device.flydsl.memory import load_system, release_fence, store_system
from mori_shmem.device.flydsl.waits import wait_at_least
from mori_shmem.device.flydsl.window import my_address, peer_address


@flyc.jit
def all_ranks_meet(window, words, count, record, what, deadline, world_size):
    """By one wave of each rank, lanes in step; false for a lane whose rank was late. At most 64 ranks."""
    lane = fx.thread_idx.x & 63
    epoch = load_system(count) + 1
    if lane == 0:
        store_system(count, epoch)
    release_fence("system")
    came = lane >= 0
    if lane < world_size:
        store_system(peer_address(window, lane, words) + fx.Int64(window.rank) * 8, epoch)
        there = my_address(window, words) + fx.Int64(lane) * 8
        came = wait_at_least(there, epoch, record, what, lane, deadline)
    return came
