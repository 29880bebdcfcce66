"""What a layer and its calls are held to before any rank waits for another. Messages carry the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError, LayoutError, UnsupportedShape

from mori_megamoe.problem import Problem
from mori_megamoe.routing import Pair

SCHEMES = ("fixedslot", "compact")


def check_words(quant: str, mega_scheme: str) -> None:
    """The strings are ones that are known."""
    if quant != "a8w4":
        raise UnsupportedShape(f"quant={quant!r}: a8w4 (MX fp8 rows, MX fp4 weights) is all there is")
    if mega_scheme not in SCHEMES:
        raise ArgumentError(
            f"mega_scheme={mega_scheme!r}: one of {', '.join(SCHEMES)} (rows are laid out compactly with "
            "both)"
        )


def first_pairs(masks: Sequence[int], problem: Problem) -> list[Pair | None]:
    """The pairs of the first launch: for each rank two bits, numbers of its experts, or none."""
    if not len(masks):
        return [None] * problem.num_ranks
    if len(masks) != problem.num_ranks:
        raise ArgumentError(f"fanout_masks has {len(masks)} masks for {problem.num_ranks} ranks")
    pairs: list[Pair | None] = []
    for rank, mask in enumerate(masks):
        members = [e for e in range(int(mask).bit_length()) if mask >> e & 1]
        if len(members) not in (0, 2) or any(e >= problem.experts_per_rank for e in members):
            raise ArgumentError(
                f"fanout_masks[{rank}]={mask:#x}: two bits below 1 << {problem.experts_per_rank}, or 0"
            )
        pairs.append(Pair(*members) if members else None)
    return pairs


def check_place(comm: mori_shmem.Communicator, rank: int, world_size: int) -> None:
    """The layer is for this rank of this communicator."""
    if (rank, world_size) != (comm.rank, comm.world_size):
        raise ArgumentError(
            f"the layer is made with rank={rank} of world_size={world_size}, the communicator is rank "
            f"{comm.rank} of {comm.world_size}"
        )


def compare_ranks(comm: mori_shmem.Communicator, given: dict[str, Any]) -> None:
    """Collective: raise on every rank if any of them was given something else."""
    by_rank = comm.all_gather(given)
    differing = [
        f"{name} is "
        + ", ".join(f"{values.get(name)!r} on rank {rank}" for rank, values in enumerate(by_rank))
        for name in given
        if any(values.get(name) != given[name] for values in by_rank)
    ]
    if differing:
        raise ArgumentError("all ranks must be given the same: " + "; ".join(differing))


# ---- calls ----


def check_rows(name: str, x: torch.Tensor, dtype: torch.dtype, problem: Problem, device: torch.device) -> int:
    """[n, D] rows; returns n."""
    if x.dim() != 2 or x.shape[1] != problem.model_dim or x.dtype != dtype:
        raise LayoutError(f"{name} is {x.dtype} {tuple(x.shape)}: {dtype} [n, {problem.model_dim}] is needed")
    n = x.shape[0]
    if n > problem.max_tokens:
        raise UnsupportedShape(
            f"{name} has {n} tokens, this layer was made for max_tok_per_rank={problem.max_tokens}: make one "
            f"with a larger value, or pass fewer tokens at a time"
        )
    check_memory(name, x, device)
    return n


def check_shape(
    name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise LayoutError(f"{name} is {x.dtype} {tuple(x.shape)}: {dtype} {shape} is needed")
    check_memory(name, x, device)


def check_memory(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise LayoutError(f"{name} is on {x.device}, this layer is on {device}")
    if not x.is_contiguous():
        raise LayoutError(f"{name} has strides {x.stride()}: a contiguous tensor is needed")
