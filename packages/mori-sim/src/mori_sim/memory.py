"""Torch tensors in simulated device memory.

A tensor made here is a CPU tensor for torch (so torch can compute references on it) and device memory for
kernels, copy engines and peers: `data_ptr()` is its device address. Kernels run asynchronously, and torch
does not know of them: call `synchronize()` before torch looks at what a kernel writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def empty(
    *shape: int, dtype: torch.dtype | None = None, device: int = 0, uncached: bool = False
) -> torch.Tensor:
    """A tensor in memory of `device`; its bytes are zero, or 0xCB in strict mode: nothing promises zeros."""
    import torch

    from mori_sim import _core

    dtype = dtype or torch.get_default_dtype()
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return torch.empty(*shape, dtype=dtype)
    memory = _core.DeviceMemory(count * dtype.itemsize, device, uncached)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # the tensor keeps `memory` alive


def full(*shape: int, value: Any, dtype: torch.dtype | None = None, device: int = 0) -> torch.Tensor:
    return empty(*shape, dtype=dtype, device=device).fill_(value)


def zeros(
    *shape: int, dtype: torch.dtype | None = None, device: int = 0, uncached: bool = False
) -> torch.Tensor:
    return empty(*shape, dtype=dtype, device=device, uncached=uncached).zero_()


def to_device(source: torch.Tensor, device: int = 0) -> torch.Tensor:
    """A copy of `source`, contiguous, in memory of `device`."""
    return empty(*source.shape, dtype=source.dtype, device=device).copy_(source)


def tensor(values: Any, *, dtype: torch.dtype | None = None, device: int = 0) -> torch.Tensor:
    import torch

    return to_device(torch.tensor(values, dtype=dtype), device)


def address_of(memory: torch.Tensor) -> int:
    return memory.data_ptr()


def is_device_tensor(memory: torch.Tensor) -> bool:
    from mori_sim import _core

    return _core.is_device_memory(memory.data_ptr())


def pending() -> bool:
    """Is anything queued or running in this process's streams?"""
    from mori_sim import _core

    return _core.pending()


def synchronize() -> None:
    """Waits until everything launched in this process has ended."""
    from mori_sim import _core

    _core.synchronize()
