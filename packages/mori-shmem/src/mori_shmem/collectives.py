"""All-reduce by loads and stores alone ("LSA"): no copy engine, two barriers, every byte read once.

Each rank holds `num_elements` bf16 partials in its part of a window. With W ranks, rank r owns the r-th of
W slices.

  1. barrier          every rank has stored its partials
  2. reduce           rank r adds its slice of all W partials, straight from the peers' parts, in rank order
                      in fp32, rounds once and stores the sum in its `reduced` region
  3. barrier          all slices are reduced; nobody reads partials any more
  4. gather           rank r copies the W reduced slices out of the peers' parts into `out`

The bits are the same on every rank and in every run. After the call the caller may overwrite its partials
at once. `reduced` may still be read by a slower peer: its next writer is step 2 of the next call, behind
that call's first barrier. `out` must not be where a peer reads: neither the partials nor the reduced region
of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mori_shmem.device.host import sum_bf16
from mori_shmem.errors import ArgumentError, LayoutError
from mori_shmem.steps import check_count
from mori_shmem.window import Window

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = 2


def slice_bounds(num_elements: int, world_size: int) -> list[int]:
    """Where the slices begin, and the end: world_size + 1 numbers. The first slices are one longer where it
    is uneven."""
    size, longer = divmod(num_elements, world_size)
    return [rank * size + min(rank, longer) for rank in range(world_size + 1)]


def reduced_bytes(num_elements: int, world_size: int) -> int:
    """How large the `reduced` region must be."""
    return -(-num_elements // world_size) * _ITEM_BYTES


def all_reduce_lsa(
    window: Window,
    out: torch.Tensor,
    *,
    partials_offset_bytes: int,
    reduced_offset_bytes: int,
    timeout_s: float | None = None,
) -> None:
    """Collective: `out` (contiguous bf16, same size on all ranks) becomes the sum of all ranks' partials.

    The partials are out.numel() bf16 at `partials_offset_bytes` of each rank's part of `window`; the region
    at `reduced_offset_bytes` has `reduced_bytes(out.numel(), world_size)`. See the module for who may write
    when.
    """
    comm = window.comm
    num_elements = out.numel()
    _check(window, out, partials_offset_bytes, reduced_offset_bytes)
    bounds = slice_bounds(num_elements, comm.world_size)
    comm.barrier(timeout_s)
    _reduce(window, bounds, partials_offset_bytes, reduced_offset_bytes)
    comm.barrier(timeout_s)
    _gather(window, bounds, reduced_offset_bytes, out)


def _reduce(window: Window, bounds: list[int], partials: int, reduced: int) -> None:
    """Sum my slice of everybody's partials into my reduced region."""
    import torch

    rank, world_size = window.handle.rank, window.handle.world_size
    begin, end = bounds[rank], bounds[rank + 1]
    offset = partials + begin * _ITEM_BYTES
    sources = [window.peer(p).tensor(end - begin, torch.bfloat16, offset) for p in range(world_size)]
    sum_bf16(window.tensor(end - begin, torch.bfloat16, reduced), sources)


def _gather(window: Window, bounds: list[int], reduced: int, out: torch.Tensor) -> None:
    """Copy everybody's reduced slice into `out`, beginning with my right neighbour so that ranks do not
    queue up."""
    import torch

    rank, world_size = window.handle.rank, window.handle.world_size
    flat = out.view(-1)
    for step in range(1, world_size + 1):
        peer = (rank + step) % world_size
        begin, end = bounds[peer], bounds[peer + 1]
        flat[begin:end].copy_(window.peer(peer).tensor(end - begin, torch.bfloat16, reduced))


def _check(window: Window, out: torch.Tensor, partials: int, reduced: int) -> None:
    import torch

    if out.dtype != torch.bfloat16 or not out.is_contiguous() or out.device.type != "cpu":
        raise ArgumentError(f"out is {out.dtype} on {out.device}: a contiguous bfloat16 CPU tensor is needed")
    check_count("partials_offset_bytes", partials)
    check_count("reduced_offset_bytes", reduced)
    partials_nbytes = out.numel() * _ITEM_BYTES
    reduced_nbytes = reduced_bytes(out.numel(), window.handle.world_size)
    if partials < reduced + reduced_nbytes and reduced < partials + partials_nbytes:
        raise LayoutError(
            f"partials at {partials} ({partials_nbytes} bytes) and reduced at {reduced} ({reduced_nbytes} "
            "bytes) overlap"
        )
