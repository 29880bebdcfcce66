"""How a launch is cut up, by the number of tokens that a rank brings. Data; the bytes of a result never
depend on it.

The number of tokens falls into the nearest bucket, a tie into the larger one. `sort_block_m` is part of the
plan: a rank's rows are padded to it, expert by expert, and ranks with different numbers of tokens have
different ones.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32  # values that share a scale
MAX_TOKENS = 32768


@dataclass(frozen=True)
class Bucket:
    """One row of the table."""

    tokens: int
    sort_block_m: int  # rows of a tile
    scale_mode: str  # of Stage1 over copy engines: who brings landed scales into the form of the GEMM


BUCKETS = (
    Bucket(1, 32, "ldsw"),
    Bucket(4, 32, "ldsw"),
    Bucket(8, 32, "ldsw"),
    Bucket(16, 32, "ldsw"),
    Bucket(32, 32, "ldsw"),
    Bucket(64, 32, "ldsw"),
    Bucket(128, 32, "ldsw"),
    Bucket(256, 64, "ldsw"),
    Bucket(512, 64, "ldsw"),
    Bucket(1024, 64, "ldsw"),
    Bucket(2048, 64, "ldsw"),
    Bucket(4096, 128, "shuffler"),
    Bucket(8192, 128, "shuffler"),
    Bucket(16384, 128, "shuffler"),
    Bucket(32768, 128, "shuffler"),
)


def bucket_for(num_tokens: int) -> Bucket:
    """The nearest bucket; no tokens is the smallest."""
    return min(BUCKETS, key=lambda b: (abs(b.tokens - num_tokens), -b.tokens))


def max_sort_block_m(max_tokens: int) -> int:
    """The largest that any launch of up to so many tokens can have."""
    last = bucket_for(max_tokens).tokens
    return max(b.sort_block_m for b in BUCKETS if b.tokens <= last)
