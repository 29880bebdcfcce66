"""A window: memory of the same size on every rank, each part reachable from every rank.

    host   rank's part = base + rank * stride    (one reservation of addresses in each process)
    cuda   rank's part = table[rank]             (in device memory; parts lie where the driver put them)

`Window` is the whole of it, `Part` one rank's part as seen from here, `Ref` an address in it that knows its
window: that is what queues and signals take, so that each use can be checked against the window's bounds.
Tensors made from a part are plain load/store memory (LSA); they keep the mapping alive, also after
`close()`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mori_shmem.errors import ArgumentError, ClosedError, LayoutError

if TYPE_CHECKING:
    import torch

    from mori_shmem.comm import Communicator


@dataclass(frozen=True)
class Handle:
    """What a kernel needs to reach every part, by value.

    Where `table` is 0, rank r's part starts at base + r * stride. Else it starts at table[r] (64-bit
    addresses in device memory), `base` is my own part and `stride` is 0.
    """

    base: int
    stride: int
    rank: int
    world_size: int
    table: int = 0


class Ref:
    """`offset_bytes` into one rank's part of a window. `ref + n` is n bytes further on; bounds are checked
    at use."""

    __slots__ = ("address", "offset_bytes", "rank", "window")

    def __init__(self, window: Window, rank: int, offset_bytes: int) -> None:
        self.window = window
        self.rank = rank
        self.offset_bytes = offset_bytes
        self.address = window.addresses[rank] + offset_bytes

    def __add__(self, nbytes: int) -> Ref:
        return Ref(self.window, self.rank, self.offset_bytes + _whole("offset", nbytes))

    def __sub__(self, nbytes: int) -> Ref:
        return Ref(self.window, self.rank, self.offset_bytes - _whole("offset", nbytes))

    def __repr__(self) -> str:
        return f"{self.window}.at({self.offset_bytes}, peer={self.rank})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.window is other.window and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)


class Part:
    """One rank's part of a window, as this process reaches it."""

    def __init__(self, window: Window, rank: int) -> None:
        self._window = window
        self.rank = rank

    def tensor(self, shape: Sequence[int] | int, dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """A contiguous tensor over this memory, from `offset_bytes` on, on the communicator's device. It
        shares the memory; nothing is copied."""
        import torch

        window = self._window
        window.check_open()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(type(size) is not int or size < 0 for size in sizes):
            raise LayoutError(f"shape {sizes}: whole numbers of at least 0 are needed")
        nbytes = math.prod(sizes) * dtype.itemsize
        _check_span(window, offset_bytes, nbytes, f"a tensor {sizes} of {dtype}")
        if offset_bytes % dtype.itemsize:
            raise LayoutError(
                f"offset_bytes={offset_bytes} is no multiple of {dtype.itemsize}, the size of {dtype}"
            )
        if nbytes == 0:
            return torch.empty(sizes, dtype=dtype, device=window.comm.device)
        part: torch.Tensor = window.comm.target.tensor_of(window.core, self.rank, offset_bytes, nbytes)
        return part.view(dtype).view(sizes)

    def at(self, offset_bytes: int) -> Ref:
        """The address `offset_bytes` into this part."""
        return self._window.at(offset_bytes, self.rank)


class Window:
    """Made by `Communicator.alloc`. Closed by `close()`, or with its communicator."""

    def __init__(self, comm: Communicator, core: Any, number: int) -> None:
        self.comm = comm
        self.core = core  # the target's window
        self.nbytes: int = core.nbytes
        self.keeps: Any = None  # whose memory it is, where it was not allocated here
        self.number = number  # the how manieth window of its communicator: equal on all ranks
        self.handle = Handle(core.base, core.stride, core.rank, core.world_size, getattr(core, "table", 0))
        self.addresses: tuple[int, ...] = comm.target.addresses_of(
            core
        )  # of each rank's part, in this process

    def tensor(self, shape: Sequence[int] | int, dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """A tensor over my part."""
        return Part(self, self.handle.rank).tensor(shape, dtype, offset_bytes)

    def peer(self, rank: int) -> Part:
        """The part of a rank (mine, too)."""
        if type(rank) is not int or not 0 <= rank < self.handle.world_size:
            raise ArgumentError(
                f"peer {rank!r}: ranks of this communicator are 0..{self.handle.world_size - 1}"
            )
        return Part(self, rank)

    def at(self, offset_bytes: int, peer: int | None = None) -> Ref:
        """An address in my part, or in the peer's."""
        return Ref(
            self, self.handle.rank if peer is None else self.peer(peer).rank, _whole("offset", offset_bytes)
        )

    def close(self) -> None:
        """Take this rank's view of the window away from queues and signals. Local; tensors made before stay
        valid."""
        self.core.close()
        self.keeps = None

    @property
    def closed(self) -> bool:
        return bool(self.core.closed)

    def check_open(self) -> None:
        if self.core.closed:
            raise ClosedError(f"{self} is closed")
        self.comm.check_open()

    def __repr__(self) -> str:
        return f"window {self.number} ({self.nbytes} bytes)"


def check_ref(comm: Communicator, ref: Ref, nbytes: int, what: str) -> None:
    """Refuse an address that is not `nbytes` inside an open window of this communicator."""
    if type(ref) is not Ref:
        raise ArgumentError(
            f"{what} is {ref!r}: an address in a window is needed, as window.at(offset, peer) gives"
        )
    window = ref.window
    if window.comm is not comm:
        raise ArgumentError(f"{what} lies in {window} of another communicator")
    if not 0 <= ref.offset_bytes <= window.nbytes - nbytes:
        _check_span(window, ref.offset_bytes, nbytes, what)
    if window.core.closed:
        raise ClosedError(f"{what} lies in {window}, which is closed")


def check_word(comm: Communicator, ref: Ref, what: str) -> None:
    """As check_ref, for a signal: eight bytes, aligned."""
    check_ref(comm, ref, 8, what)
    if ref.offset_bytes % 8:
        raise LayoutError(f"{what} at offset {ref.offset_bytes}: signals are 8 bytes, at a multiple of 8")


def _check_span(window: Window, offset_bytes: int, nbytes: int, what: str) -> None:
    _whole("offset", offset_bytes)
    if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > window.nbytes:
        raise LayoutError(
            f"{what}: {nbytes} bytes at offset {offset_bytes} do not fit into {window}; allowed are offsets "
            f"0..{max(window.nbytes - nbytes, 0)}" + (", none at this size" * (nbytes > window.nbytes))
        )


def _whole(what: str, value: object) -> int:
    if type(value) is not int:
        raise ArgumentError(f"{what} {value!r}: a whole number of bytes is needed")
    return value
