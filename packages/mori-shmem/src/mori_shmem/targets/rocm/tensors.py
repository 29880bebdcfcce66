"""Torch tensors over memory that torch did not allocate. They keep the memory alive.

On the ROCm torch by the array interface that torch shares with CUDA: a "cuda" tensor on the GPU that holds
the address. On the CPU torch of the software node by the buffer protocol: a CPU tensor over the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mori_shmem.core import native


class _Array:
    """A span for torch.as_tensor; the tensor holds on to it."""

    def __init__(self, span: native.Span) -> None:
        self._span = span
        self.__cuda_array_interface__ = {
            "shape": (span.nbytes,),
            "typestr": "|u1",
            "data": (span.address, False),
            "version": 2,
        }


def tensor_at(span: native.Span) -> torch.Tensor:
    """The bytes of the span."""
    import torch

    if torch.version.hip:
        tensor: Any = torch.as_tensor(_Array(span), device="cuda")
        return tensor  # type: ignore[no-any-return]
    return torch.frombuffer(span, dtype=torch.uint8)
