"""Calls of an op that are like the one before, without Python in between.

A call of few tokens costs the host more than the GPU, and most of that is Python: looking at tensors, finding
what was prepared for such a call, writing addresses into a kernel's arguments. `repeated` makes a function of
a call that has come through: given tensors of the same types, dtypes, shapes and devices, contiguous and at
multiples of 16 bytes, it writes their addresses, launches, and returns the call's result; given anything
else, or with something to be raised, it does nothing and returns None, and the op goes the whole way.

The op sees to it that nothing else of its own has changed between: it forgets the function when it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mori_shmem import _core
from mori_shmem.jit.driver import PreparedLaunch

Repeated = Callable[..., object]
Place = tuple[int, int]  # where a tensor's address goes, 0: nowhere; the address it must have, 0: any


def repeated(
    launch: PreparedLaunch,
    tensors: Sequence[torch.Tensor | None],
    places: Sequence[Place],
    result: object,
    *,
    fault: int,
    device: int,
) -> Repeated | None:
    """Of a call that has just been made: a function of as many tensors.

    fault   address of a 32-bit word that is 0 as long as nothing is to be raised
    device  of the kernel; where another is current, the function returns None
    result  what the call returned, and what its repetitions return; not None
    None, where the call cannot be repeated so: empty tensors, or an address that is no multiple of 16.
    """
    likes: list[tuple[type, torch.dtype, int, list[int], int, int] | None] = []
    for tensor, (place, required) in zip(tensors, places, strict=True):
        if tensor is None:
            likes.append(None)
            continue
        address = tensor.data_ptr()
        if not address or address % 16 or not tensor.is_contiguous() or required not in (0, address):
            return None
        like = (type(tensor), tensor.dtype, tensor.get_device(), list(tensor.shape), place, required)
        likes.append(like)
    return _core.repeated_launch(
        likes,
        launch.addresses(),
        launch,
        result,
        fault,
        device,
        torch._C._cuda_getDevice,
        torch._C._cuda_getCurrentRawStream,
    )
