"""Which tensors can become windows, and what their ranks have to agree on (Communicator.import_tensor).

A rank whose tensor cannot be one still takes part, and tells the others why: they would wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mori_shmem.core import CoreError
from mori_shmem.errors import ArgumentError, LayoutError, MoriError
from mori_shmem.wording import raise_faults, worded

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator

GRANULE = 2 << 20  # mappings of device memory are as coarse as this
MOST_PIECES = 250  # descriptors that one message takes
Offer = tuple[
    int, tuple[int, list[int]] | None, MoriError | None
]  # bytes; where they lie in which pieces; why not


def size_of(tensor: Any) -> int:
    """Bytes; 0 of what is no tensor."""
    return int(tensor.numel() * tensor.element_size()) if hasattr(tensor, "element_size") else 0


def check_backend(comm: Communicator) -> None:
    """Refuse where memory of others cannot be shared."""
    if not hasattr(comm.target, "import_part"):
        raise ArgumentError(
            f"import_tensor on backend {comm.backend!r}: memory that torch has allocated can be shared on "
            "rocm alone. Take comm.alloc(nbytes) and view it as window.tensor(shape, dtype)"
        )


def part_of(comm: Communicator, tensor: Any) -> tuple[Any, MoriError | None]:
    """This rank's part, or None and why there is none."""
    if why := _why_not(comm, tensor):
        return None, LayoutError(why)
    try:
        part = comm.target.import_part(comm.core, tensor.data_ptr(), size_of(tensor))
    except CoreError as error:
        if error.kind == "not_importable":
            return None, LayoutError(error.info["why"])
        return None, worded(error, comm, "import_tensor")
    if len(part.fds) > MOST_PIECES:
        fault = f"the tensor lies in {len(part.fds)} allocations, at most {MOST_PIECES} can be shared"
        part.close()
        return None, LayoutError(fault)
    return part, None


def _why_not(comm: Communicator, tensor: Any) -> str:
    """What is wrong with a tensor, or nothing."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} is no tensor"
    if tensor.device != comm.device and tensor.device.type != comm.device.type:
        return f"the tensor is on {tensor.device}, this communicator on {comm.device}"
    if not tensor.is_contiguous():
        return f"strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)}: not contiguous"
    if not size_of(tensor):
        return "the tensor is empty"
    return ""


def check_offers(offers: list[Offer]) -> list[tuple[int, list[int]]]:
    """Everybody's places, if they fit together."""
    raise_faults("import_tensor", [fault for _, _, fault in offers])
    sizes = [nbytes for nbytes, _, _ in offers]
    if len(set(sizes)) > 1:
        raise LayoutError(f"import_tensor: tensors of {sizes} bytes, in rank order: all must be of one size")
    places = [place for _, place, _ in offers if place]
    begins = [lead % GRANULE for lead, _ in places]
    if len(set(begins)) > 1:
        raise LayoutError(
            f"import_tensor: the tensors begin {begins} bytes behind a multiple of {GRANULE}, in rank order: "
            "parts of a window are one stride apart, so this must be the same on all ranks. It is where they "
            "allocate the same sizes in the same order"
        )
    return places
