"""One call's problem: shapes, and the numbers that follow from them. No torch, no target.

out[m, n] = sum over ranks of A_r[m, k] * B_r[n, k], bf16 on every rank. Only M is split between the ranks:
rank r owns rows [r*S, (r+1)*S) with S = ceil(M / W), so that what one rank sends to another is one run of
bytes. The last ranks own fewer rows, or none, where W does not divide M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BF16_BYTES = 2
FP8_BYTES = 1
ROW_SCALE_BYTES = 4
SCALE_COLUMNS = 128  # gather_scale="1x128"


class Rows(NamedTuple):
    """Rows [start, stop) of the whole matrix."""

    start: int
    stop: int

    @property
    def height(self) -> int:
        """How many; 0 for an empty run."""
        return self.stop - self.start


@dataclass(frozen=True)
class Problem:
    """Each rank holds A [m, k] and B [n, k]; all get out [m, n]."""

    m: int
    n: int
    k: int
    num_ranks: int

    @property
    def slice_rows(self) -> int:
        """Rows of the largest slice."""
        return -(-self.m // self.num_ranks)

    def slice_of(self, rank: int) -> Rows:
        """The rows that `rank` sums up and sends to everyone."""
        return Rows(min(self.m, rank * self.slice_rows), min(self.m, (rank + 1) * self.slice_rows))

    @property
    def all_rows(self) -> Rows:
        """The whole matrix."""
        return Rows(0, self.m)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one rank's GEMM."""
        return 2 * self.m * self.n * self.k

    def scatter_bytes(self, rank: int) -> int:
        """bf16 partial sums that `rank` sends: everyone else's rows."""
        return (self.m - self.slice_of(rank).height) * self.n * BF16_BYTES

    def gather_bytes(self, rank: int, gather_dtype: str, gather_scale: str | None = "row") -> int:
        """Finished rows that `rank` sends, or that are pulled from it, scales included."""
        num_scales = 1 if gather_scale == "row" else -(-self.n // SCALE_COLUMNS)
        fp8_bytes = self.n * FP8_BYTES + num_scales * ROW_SCALE_BYTES
        row_bytes = self.n * BF16_BYTES if gather_dtype == "bf16" else fp8_bytes
        return (self.num_ranks - 1) * self.slice_of(rank).height * row_bytes
