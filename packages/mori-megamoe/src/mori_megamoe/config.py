"""How a launch is cut up, by the number of tokens that a rank brings. Data; the bytes of a result never
depend on it.

The number of tokens falls into the nearest bucket, a tie into the larger one. `sort_block_m` is part of the
plan: a rank's rows are padded to it, expert by expert, and ranks with different numbers of tokens have
different ones. All else is geometry for the kernels of a target.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32  # values that share a scale
TILE_K = 256
MAX_TOKENS = 32768


@dataclass(frozen=True)
class Bucket:
    """One row of the table."""

    tokens: int
    sort_block_m: int  # rows of a tile
    tile_n: int  # columns of GEMM1's tile, where the intermediate size is at least 2048
    num_waves: int
    work_shards: int  # counters that workgroups draw their items from
    stage2_block_m: int
    stage2_block_n: int
    scale_mode: str  # of Stage1 over copy engines: who brings landed scales into the form of the GEMM
    chunk_rows: int = 384  # of Stage1 by stores: rows that a producer takes at a time


BUCKETS = (
    Bucket(1, 32, 256, 4, 1, 32, 256, "ldsw"),
    Bucket(4, 32, 256, 4, 1, 32, 256, "ldsw"),
    Bucket(8, 32, 512, 8, 4, 32, 256, "ldsw"),
    Bucket(16, 32, 512, 8, 4, 32, 256, "ldsw"),
    Bucket(32, 32, 512, 8, 4, 32, 256, "ldsw"),
    Bucket(64, 32, 512, 8, 4, 32, 256, "ldsw"),
    Bucket(128, 32, 512, 8, 4, 32, 256, "ldsw"),
    Bucket(256, 64, 512, 8, 4, 32, 128, "ldsw"),
    Bucket(512, 64, 512, 8, 4, 32, 256, "ldsw"),
    Bucket(1024, 64, 512, 8, 4, 32, 256, "ldsw"),
    Bucket(2048, 64, 512, 8, 8, 32, 256, "ldsw"),
    Bucket(4096, 128, 512, 8, 4, 64, 256, "shuffler"),
    Bucket(8192, 128, 512, 8, 4, 64, 256, "shuffler"),
    Bucket(16384, 128, 512, 8, 4, 64, 256, "shuffler"),
    Bucket(32768, 128, 512, 8, 4, 64, 256, "shuffler"),
)


def bucket_for(num_tokens: int) -> Bucket:
    """The nearest bucket; no tokens is the smallest."""
    return min(BUCKETS, key=lambda b: (abs(b.tokens - num_tokens), -b.tokens))


def tile_n_for(bucket: Bucket, inter_dim: int) -> int:
    """Columns of GEMM1's tile; narrow layers get narrow tiles."""
    return bucket.tile_n if inter_dim >= 2048 else 256


def max_sort_block_m(max_tokens: int) -> int:
    """The largest that any launch of up to so many tokens can have."""
    last = bucket_for(max_tokens).tokens
    return max(b.sort_block_m for b in BUCKETS if b.tokens <= last)
