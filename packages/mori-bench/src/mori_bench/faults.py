"""Ways to break an op's result on purpose, to prove that a bench's validation can fail.

A bench computes its reference from the true inputs, and passes its tensors through one Fault object:
    fault = Fault(args.fault)                      # None breaks nothing
    x = fault.input(x, rank, world_size)           # the inputs the op gets; never those the reference gets
    out = fault.output(op(x))                      # after every call, warm-up included
With any fault, `validated` must come out false. Inputs must differ from call to call, or `stale_result` shows
nothing. Works on torch tensors of two dimensions without importing torch; never changes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ROW_TILE = 128


def swap_columns(out: Any) -> Any:
    """The first and the last column exchanged."""
    _need(out.shape[-1] >= 2, f"swap_columns needs two columns, the output is {tuple(out.shape)}")
    broken = out.clone()
    broken[..., 0] = out[..., -1]
    broken[..., -1] = out[..., 0]
    return broken


def swap_row_tiles(out: Any, row_tile: int = ROW_TILE) -> Any:
    """The first and the last tile of rows exchanged; tiles shrink to half of the rows where there are few."""
    rows = out.shape[0]
    _need(rows >= 2, f"swap_row_tiles needs two rows, the output is {tuple(out.shape)}")
    tile = min(row_tile, rows // 2)
    broken = out.clone()
    broken[:tile] = out[rows - tile :]
    broken[rows - tile :] = out[:tile]
    return broken


def one_nan(out: Any) -> Any:
    """One NaN, in the middle."""
    _need(getattr(out.dtype, "is_floating_point", True), f"one_nan: {out.dtype} has no NaN")
    middle = tuple(extent // 2 for extent in out.shape)
    broken = out.clone()
    broken[middle] = float("nan")
    return broken


def drop_peer(x: Any, rank: int, world_size: int) -> Any:
    """The last rank takes part with zeros: what it had to add is missing from everyone's result."""
    if rank != world_size - 1:
        return x
    broken = x.clone()
    broken[...] = 0
    return broken


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


_OF_OUTPUT: dict[str, Callable[[Any], Any]] = {
    "swap_columns": swap_columns,
    "swap_row_tiles": swap_row_tiles,
    "one_nan": one_nan,
}
FAULTS = (*_OF_OUTPUT, "drop_peer", "stale_result")


class Fault:
    """One chosen fault, or none."""

    def __init__(self, name: str | None = None) -> None:
        _need(name is None or name in FAULTS, f"{name!r} is not a fault: {', '.join(FAULTS)}")
        self.name = name
        self._last: Any = None

    def __bool__(self) -> bool:
        return self.name is not None

    def input(self, x: Any, rank: int, world_size: int) -> Any:
        """What the op is to be given instead of x."""
        return drop_peer(x, rank, world_size) if self.name == "drop_peer" else x

    def output(self, out: Any) -> Any:
        """What the bench is to take for the op's result. To be called after every call of the op."""
        if self.name in _OF_OUTPUT:
            return _OF_OUTPUT[self.name](out)
        if self.name == "stale_result":
            last, self._last = self._last, out.clone()
            return out if last is None else last
        return out
