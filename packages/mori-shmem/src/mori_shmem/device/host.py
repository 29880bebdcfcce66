"""Loops over CPU tensors in C++, for ops whose ranks live on the host. They release the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mori_shmem.core import native
from mori_shmem.errors import ArgumentError

if TYPE_CHECKING:
    import torch


def sum_bf16(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """out = sources[0] + sources[1] + ..., added in this order in fp32 and rounded once to bf16.

    All are contiguous bf16 tensors of one size; `out` may be one of the sources. The result depends on the
    values and the order alone, so ranks that add the same partials get the same bits.
    """
    for name, tensor in [("out", out), *((f"sources[{i}]", s) for i, s in enumerate(sources))]:
        _check(name, tensor, out.numel())
    if not sources:
        raise ArgumentError("sources is empty: at least one tensor is needed")
    native.sum_bf16(out.data_ptr(), [source.data_ptr() for source in sources], out.numel())


def _check(name: str, tensor: torch.Tensor, numel: int) -> None:
    import torch

    right = tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
    if not right or tensor.numel() != numel:
        raise ArgumentError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}: "
            f"a contiguous bfloat16 CPU tensor of {numel} elements is needed"
        )
