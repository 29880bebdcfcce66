"""What this target can do, and the numbers that it was tuned to."""

from __future__ import annotations

BODIES = ("R", "A")
MAX_DELTA = {"R": 11, "A": 17}  # of scales in a row of w1: decode.cuh
ROW_BYTES_PER_VALUE = {"R": 1, "A": 2}
TILE_ROWS = (128, 64, 32)
MAX_RANKS, MAX_EXPERTS = 8, 1024  # params.cuh
UNIT_ROWS = 16  # params.cuh
MAX_TILES, MAX_PAIRS = 1 << 20, 1 << 12  # of an item: params.cuh
# Who sends in the fused Stage1. Rows of 7 KB by 16-byte stores to one peer, 2x H200 (mori-ep's dispatch of
# 8192 tokens): 16 SMs of 256 threads 280 GB/s, of bf16 333; 64 SMs 322; the link 358. More threads on few SMs
# were slower.
SEND_BLOCKS, SEND_THREADS = 16, 256
DISPATCH_THREADS = 256  # a block, on all SMs: the baseline
SMALL_THREADS, SMALL_BLOCKS = 256, 4  # a block, and blocks an SM: what only moves memory (not measured)
# Slots that copy engines carry (slots.cuh), not measured: a copy costs about 7 us beside its bytes (2x H200),
# so eight a rank are 56 us of a wire that takes 450 at 8192 tokens of v4_pro, and the first rows are there
# after an eighth of it.
SLOTS_PER_RANK, SLOT_SLACK = 8, 1.25
SLOT_STEP_ROWS = 64  # sizes of copies: so that calls of similar numbers of tokens share their programs


def tile_rows_for(rows_per_expert: float) -> int:
    """Rows of a tile, for experts that get so many at most, on average. Fewer rows are less padding to
    multiply; more decode an expert's weights less often. A row's bytes do not depend on it.

    GEMM1, body R, v4_pro, 48 uneven experts on an H200 (December 2026), us by tiles of 32, 64, 128:
    16 rows an expert 303, 381, 541; 32: 425, 385, 538; 64: 696, 537, 543; 128: 1272, 890, 757.
    """
    return 32 if rows_per_expert <= 24 else 64 if rows_per_expert <= 64 else 128


def most_blocks(num_sms: int, sharing: int) -> int:
    """Blocks of a grid that waits inside itself: clusters of two, one block an SM, an even share of the SMs
    of a GPU that several ranks use. All of them are resident together."""
    return max(2, num_sms // sharing // 2 * 2)
