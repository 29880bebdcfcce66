"""The words that a device queue, a fault record and the clock consist of: what the host writes and kernels
use.

A device queue is 128 bytes of uncached device memory. Its address is all that a kernel is given; the queues
of a rank lie one after the other, in the order of the peers (`queue_address`). Who writes which word:

    RING, RPTR, WPTR, DOORBELL, RING_BYTES   the host, before any kernel runs: where the queue's parts are
    RECORD, TIMEOUT, PEER                    the host: where and how kernels say that the queue is stuck
    RESERVED      kernels, atomic add: bytes of the ring that have been given out
    COMMITTED     kernels, in turn: bytes that the engine has been told of
    READ          kernels: a read pointer that somebody has seen; never above the true one
    DONE          the engine: the low 32 bits of the position (in packets) of the last `quiet` it has reached
    LOCK          kernels: 0, or 1 while somebody holds the queue (`lock_queue`)

All positions are byte counts that only grow; the place in the ring is the position modulo RING_BYTES.
"""

from __future__ import annotations

QUEUE_BYTES = 128
RING, RPTR, WPTR, DOORBELL = 0, 8, 16, 24
RESERVED, COMMITTED, READ = 32, 40, 48
RING_BYTES, RECORD, TIMEOUT, PEER = 56, 64, 72, 80
DONE, LOCK = 96, 104

PACKET_BYTES = 32  # every packet is this long, so that none lies across the ring's end
# The engine takes 30 bits of size; this is a power of two, so that a kernel counts packets by a shift.
COPY_BYTES = 1 << 29

TICKS_PER_S = 100_000_000  # of the clock that kernels read (s_memrealtime)
LOOK_TICKS = TICKS_PER_S // 1000  # how often a wait of a kernel looks at the fault record

# The fault record: eight 32-bit words, as targets/fault_record.py has them.
RECORD_CODE, RECORD_PEER, RECORD_WHAT, RECORD_INDEX, RECORD_SEEN, RECORD_WANTED, RECORD_BLOCK = (
    0, 8, 12, 16, 20, 24, 28,
)  # fmt: skip
RECORD_FIELDS = ("code", "rank", "peer", "what", "index", "seen", "wanted", "block")
CODE_PUBLISHED, CODE_BUSY, CODE_ABANDONED = 1, 2, 3  # the last is the host's: a peer has died
QUEUE_ROOM, QUEUE_TURN, QUEUE_QUIET, QUEUE_LOCK = (
    0xC0001,
    0xC0002,
    0xC0003,
    0xC0004,
)  # `what` of a stuck queue


def queue_address(table: int, peer: int) -> int:
    """The queue to `peer`, for one kernel argument per rank instead of one per peer. Works on DSL values,
    too."""
    return table + peer * QUEUE_BYTES


def ticks(timeout_s: float) -> int:
    """Seconds in ticks of the kernels' clock."""
    return int(timeout_s * TICKS_PER_S)
