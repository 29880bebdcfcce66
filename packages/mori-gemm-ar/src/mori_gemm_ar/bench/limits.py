"""What cannot be measured, said by the command itself: no rank is started, to fail one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import mori_bench
from mori_bench.memory import MEMINFO
from mori_shmem.errors import UnsupportedShape

from mori_gemm_ar.support import check_sizes, window_bytes

FP64_BYTES = 8  # the reference multiplies in float64


def check_run(backend: str, m: int, n: int, k: int, world_size: int, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedShape for sizes that no op has, or that this machine's memory does not hold."""
    check_sizes(backend, n, k, max(1, m))
    window = window_bytes(backend, n, max(1, m), world_size, options)
    num_here = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    check_memory(
        num_here * (reference_bytes(m, n, k, world_size) + window), f"-m {m} -n {n} -k {k}", num_here
    )


def reference_bytes(m: int, n: int, k: int, world_size: int) -> int:
    """What a rank's check takes at the least: its operands, and its slice of the product."""
    return FP64_BYTES * (m * k + n * k + -(-m // world_size) * n)


def check_memory(needed: int, what: str, num_ranks: int = 1, meminfo: str = MEMINFO) -> None:
    """Raise UnsupportedShape if this machine cannot hold so many bytes now."""
    free = mori_bench.free_bytes(meminfo)
    if needed > free:
        raise UnsupportedShape(
            f"{what}: {num_ranks} rank{'s' * (num_ranks > 1)} of this machine and their float64 check need "
            f"at least {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: smaller sizes, "
            "or fewer ranks"
        )
