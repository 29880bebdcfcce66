"""What one argument is held to, whoever takes it: an op, an adapter, an operator.

The type comes first, so that nothing is asked of an object that does not have it. All of these look at this
rank's argument alone and wait for nobody.
"""

from __future__ import annotations

import operator

import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, LayoutError

from mori_ep import formats

GEOMETRY = ("block_num", "rdma_block_num", "warp_per_block")


def shape_of(value: object) -> str:
    """A tensor by dtype and shape, anything else as above."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else described(value)


# ---- numbers and flags ----


def check_flag(name: str, value: object) -> bool:
    """True or False, also as 1 and 0."""
    if type(value) not in (bool, int) or value not in (0, 1):
        raise ArgumentError(f"{name}={described(value)}: True or False is needed")
    return bool(value)


def check_flags(**flags: object) -> None:
    """Several of them."""
    for name, value in flags.items():
        check_flag(name, value)


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number from low to high."""
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ArgumentError(f"{name}={described(value)}: a whole number {allowed} is needed")
    return value


def check_index(name: str, value: object, high: int) -> int:
    """A whole number from 0 to high, of any type that stands for one: an element of a tensor, too."""
    try:
        return check_whole(name, operator.index(value), 0, high)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(
            f"{name} is {described(value)}: a whole number from 0 to {high} is needed"
        ) from None


def check_geometry(*values: object) -> None:
    """Blocks, network blocks and warps a block, as callers may ask for them."""
    for name, value in zip(GEOMETRY, values, strict=True):
        check_whole(f"{name} (-1: as planned)", value, -1)


def check_geometry_options(given: dict[str, int]) -> None:
    """The same by name, none else."""
    for name, value in given.items():
        if name not in GEOMETRY:
            raise ArgumentError(
                f"{name}={described(value)}: there is no such argument, only {', '.join(GEOMETRY)}"
            )
        check_whole(f"{name} (-1: as planned)", value, -1)


def check_dtype(name: str, value: object) -> torch.dtype:
    """A dtype, not its name."""
    if not isinstance(value, torch.dtype):
        raise ArgumentError(
            f"{name}={described(value)}: a torch.dtype is needed, one of {formats.names(formats.CODES)}"
        )
    return value


# ---- tensors ----


def check_tensor(name: str, x: object, device: torch.device) -> torch.Tensor:
    """A dense, contiguous tensor on the right device."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name} is {described(x)}: a tensor is needed")
    if x.layout != torch.strided:
        raise LayoutError(f"{name} is {x.layout}: a dense tensor is needed")
    if x.device != device:
        raise LayoutError(f"{name} is on {x.device}, this op is on {device}: one there is needed")
    if not x.is_contiguous():
        raise LayoutError(f"{name} has strides {x.stride()}: a contiguous tensor is needed (.contiguous())")
    return x


def check_rows(name: str, x: object, device: torch.device) -> int:
    """The number of rows of such a matrix."""
    if isinstance(x, torch.Tensor) and x.dim() != 2:
        raise LayoutError(f"{name} is {tuple(x.shape)}: two dimensions are needed")
    return check_tensor(name, x, device).shape[0]


def check_slots(name: str, x: object, dtype: torch.dtype, n: int, topk: int, device: torch.device) -> None:
    """A matrix of just this dtype and size."""
    check_shaped(name, x, dtype, (n, topk), device)


def check_shaped(
    name: str, x: object, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """A tensor of just this dtype and shape."""
    if isinstance(x, torch.Tensor) and (x.dtype != dtype or tuple(x.shape) != shape):
        raise LayoutError(f"{name} is {x.dtype} {tuple(x.shape)}: {dtype} {shape} is needed")
    check_tensor(name, x, device)
