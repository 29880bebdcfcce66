"""What a layer and its calls are held to before any rank waits for another. Messages carry the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mori_shmem
import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, LayoutError, UnsupportedShape

from mori_megamoe.arguments import check_word
from mori_megamoe.problem import Problem
from mori_megamoe.routing import Pair
from mori_megamoe.stage1 import Stage1

SCHEMES = ("fixedslot", "compact")


def check_words(quant: str, mega_scheme: str) -> None:
    """The strings are ones that are known."""
    if not isinstance(quant, str) or quant != "a8w4":
        raise UnsupportedShape(
            f"quant={described(quant)}: a8w4 (MX fp8 rows, MX fp4 weights) is all there is"
        )
    check_word("mega_scheme", mega_scheme, SCHEMES)  # rows are laid out compactly with both


def first_pairs(masks: Sequence[int], problem: Problem) -> list[Pair | None]:
    """The pairs of the first launch: for each rank two bits, numbers of its experts, or none."""
    if not masks:
        return [None] * problem.num_ranks
    if len(masks) != problem.num_ranks:
        raise ArgumentError(
            f"fanout_masks has {len(masks)} masks for {problem.num_ranks} ranks: one each is needed"
        )
    pairs: list[Pair | None] = []
    for rank, mask in enumerate(masks):
        members = [e for e in range(mask.bit_length()) if mask >> e & 1]
        if mask < 0 or len(members) not in (0, 2) or any(e >= problem.experts_per_rank for e in members):
            raise ArgumentError(
                f"fanout_masks[{rank}]={mask:#x}: two bits below 1 << {problem.experts_per_rank}, or 0"
            )
        pairs.append(Pair(*members) if members else None)
    return pairs


def check_comm(comm: object) -> None:
    """A communicator, or None."""
    if comm is not None and not isinstance(comm, mori_shmem.Communicator):
        raise ArgumentError(
            f"comm is {described(comm)}: a communicator of mori_shmem.init is needed, or None, and the layer "
            "makes one"
        )


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


def check_width(name: str, x: torch.Tensor, dtype: torch.dtype, problem: Problem) -> None:
    """[n, D] rows, any number of them."""
    check_tensor(name, x, f"{dtype} [n, {problem.model_dim}]")
    if x.dim() != 2 or x.shape[1] != problem.model_dim or x.dtype != dtype:
        raise LayoutError(f"{name} is {x.dtype} {tuple(x.shape)}: {dtype} [n, {problem.model_dim}] is needed")


def check_rows(name: str, x: torch.Tensor, dtype: torch.dtype, problem: Problem, device: torch.device) -> int:
    """[n, D] rows of one call; returns n."""
    check_width(name, x, dtype, problem)
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
    check_tensor(name, x, f"{dtype} {shape}")
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise LayoutError(f"{name} is {x.dtype} {tuple(x.shape)}: {dtype} {shape} is needed")
    check_memory(name, x, device)


def check_tensor(name: str, x: object, wanted: str) -> None:
    """A tensor that has a shape and strides: neither sparse nor nested."""
    if not isinstance(x, torch.Tensor):
        raise LayoutError(f"{name} is {described(x)}: a torch.Tensor is needed, {wanted}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise LayoutError(f"{name} is a tensor of layout {kind}: a dense one is needed, {wanted}")


def check_trace(trace: object) -> None:
    """What a layer's trace may be."""
    if trace is not None and not all(callable(getattr(trace, name, None)) for name in ("span", "add")):
        raise ArgumentError(f"trace is {described(trace)}: a mori_bench.Trace is needed, or None")


def check_stage(stage: object) -> None:
    """What can do Stage1 of a layer."""
    if not isinstance(stage, Stage1) or not isinstance(stage.name, str):
        raise ArgumentError(
            f"the stage is {described(stage)}: an object of a subclass of mori_megamoe.Stage1 is needed, "
            "with a name. MegaMoEStage1Sdma has install() instead"
        )


def check_memory(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise LayoutError(f"{name} is on {x.device}, this layer is on {device}")
    if not x.is_contiguous():
        raise LayoutError(f"{name} has strides {x.stride()}: a contiguous tensor is needed")
