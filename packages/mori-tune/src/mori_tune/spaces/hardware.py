"""What bounds a candidate: the few numbers of a device that the constraints compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mori_tune.device import Device
from mori_tune.errors import SpaceError


@dataclass(frozen=True)
class Hardware:
    compute_units: int
    lanes: int  # threads of a warp
    max_threads: int = 1024  # of a block
    shared_bytes: int = 65536  # of a block
    loader_bytes: int = 1  # what one step of a tile's loader moves; a tile is a whole number of steps

    @property
    def max_warps(self) -> int:
        return self.max_threads // self.lanes


KNOWN = {  # by the prefix of the architecture's name
    "gfx950": Hardware(256, lanes=64, shared_bytes=163_840, loader_bytes=4096),
    "gfx942": Hardware(304, lanes=64, shared_bytes=65_536, loader_bytes=4096),
    "sm_90": Hardware(132, lanes=32, shared_bytes=232_448, loader_bytes=4096),
}
HOST = Hardware(1, lanes=1)


def hardware_of(device: Device) -> Hardware:
    """The numbers of this device; an architecture that nobody has described is refused, not guessed."""
    if device.compute_units < 1:
        raise SpaceError(f"device {device} has {device.compute_units} compute units: wanted at least 1")
    if device.backend == "host":
        return replace(HOST, compute_units=device.compute_units)
    for arch, numbers in KNOWN.items():
        if device.arch == arch or device.arch == f"{arch}a":
            return replace(numbers, compute_units=device.compute_units)
    raise SpaceError(
        f"no hardware numbers for {device.arch}: known are {', '.join(KNOWN)}; add it to hardware.py"
    )


def split_workers(total: int, communicating: int | None = None) -> tuple[int, int]:
    """(communicating, computing) workers of one kernel; by default an eighth communicates.

    Neither side may be empty: a candidate without computing workers is the fastest of all, and wrong.
    """
    wanted = max(1, total // 8) if communicating is None else communicating
    if not 1 <= wanted <= total - 1:
        raise SpaceError(
            f"{wanted} communicating workers of {total} in total leave {total - wanted} to compute: "
            f"wanted 1 to {total - 1}"
        )
    return wanted, total - wanted
