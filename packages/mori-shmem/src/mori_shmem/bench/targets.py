"""The three targets of the host transport, held against the results of this run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mori_bench import Result

PUT_BYTES, PUT_SHARE = 1 << 20, 0.8
LATENCY_US = 20.0
ALL_REDUCE_BYTES, ALL_REDUCE_RANKS, ALL_REDUCE_FACTOR = 16 << 20, 4, 3.0


@dataclass(frozen=True)
class Target:
    """One target: what it asks for, what this run gave; `met` is None where the run has no such result."""

    asks: str
    gave: str
    met: bool | None

    def __str__(self) -> str:
        word = {True: "met", False: "NOT MET", None: "not measured in this run"}[self.met]
        return f"{self.asks}: {self.gave + ', ' if self.gave else ''}{word}"


def targets(results: Sequence[Result]) -> list[Target]:
    """All three. A result that was not validated meets nothing."""
    return [_put(results), _latency(results), _all_reduce(results)]


def _put(results: Sequence[Result]) -> Target:
    asks = f"put >= {PUT_SHARE:.0%} of a one-thread memcpy from {PUT_BYTES >> 20} MiB on"
    shares = {}
    for r in results:
        if (r.op, r.mode) == ("put", "shmem") and r.shape["bytes"] >= PUT_BYTES:
            shares[r.shape["bytes"]] = _ratio(_find(results, "put", "memcpy", r.world_size, r.shape), r)
    if not shares:
        return Target(asks, "", None)
    gave = ", ".join(f"{share:.0%} at {nbytes >> 20} MiB" for nbytes, share in sorted(shares.items()))
    return Target(asks, gave, min(shares.values()) >= PUT_SHARE)


def _latency(results: Sequence[Result]) -> Target:
    asks = f"8-byte put + signal + wait <= {LATENCY_US:g} us one way, median, 2 ranks"
    mine = _find(results, "put_signal", "shmem", 2)
    if mine is None or mine.timing is None:
        return Target(asks, "", None)
    took_us = mine.timing.max_rank_time_us
    return Target(asks, f"{took_us:.1f} us", mine.validated and took_us <= LATENCY_US)


def _all_reduce(results: Sequence[Result]) -> Target:
    asks = (
        f"all-reduce of 16 MiB bf16, {ALL_REDUCE_RANKS} ranks, >= {ALL_REDUCE_FACTOR:g} times faster than "
        "gloo"
    )
    mine = _find(results, "all_reduce", "shmem", ALL_REDUCE_RANKS)
    gloo = _find(results, "all_reduce", "gloo", ALL_REDUCE_RANKS)
    if mine is None or gloo is None or mine.shape["rows"] * mine.shape["columns"] * 2 < ALL_REDUCE_BYTES:
        return Target(asks, "", None)
    ratio = _ratio(gloo, mine)
    return Target(asks, f"{ratio:.1f} times", ratio >= ALL_REDUCE_FACTOR)


def _find(
    results: Sequence[Result], op: str, mode: str, world_size: int, shape: object = None
) -> Result | None:
    for r in results:
        if (r.op, r.mode, r.world_size) == (op, mode, world_size) and shape in (None, r.shape):
            return r
    return None


def _ratio(base: Result | None, mine: Result) -> float:
    """base's time in mine's; 0 where one of them is missing or wrong."""
    if base is None or base.timing is None or mine.timing is None or not (base.validated and mine.validated):
        return 0.0
    return base.timing.max_rank_time_us / mine.timing.max_rank_time_us
