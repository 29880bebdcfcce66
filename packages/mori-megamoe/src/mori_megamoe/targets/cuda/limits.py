"""What this target can do, and the numbers that it was tuned to."""

from __future__ import annotations

BODIES = ("R", "A")
MAX_DELTA = {"R": 11, "A": 17}  # of scales in a row of w1: decode.cuh
ROW_BYTES_PER_VALUE = {"R": 1, "A": 2}
TILE_ROWS = (128, 64)
MAX_RANKS, MAX_EXPERTS = 8, 1024  # params.cuh
UNIT_ROWS = 16  # send.cuh
MAX_TILES, MAX_PAIRS = 1 << 20, 1 << 12  # of an item: params.cuh
# Blocks that send in the fused Stage1, of an even number. 16 SMs that store 16 bytes a lane reach the link on H200.
SEND_BLOCKS = 16


def most_blocks(num_sms: int, sharing: int) -> int:
    """Blocks of a grid that waits inside itself: clusters of two, one block an SM, an even share of the SMs of a GPU
    that several ranks use. All of them are resident together."""
    return max(2, num_sms // sharing // 2 * 2)
