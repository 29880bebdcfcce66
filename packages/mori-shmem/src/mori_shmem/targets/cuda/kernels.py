"""The kernels of kernels.ptx, loaded once a device and launched on raw streams."""

from __future__ import annotations

import functools
import threading
from ctypes import c_uint32, c_uint64
from importlib import resources
from typing import Any

from mori_shmem.jit import driver

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "add": (c_uint64, c_uint64),  # where, value
    "delay": (c_uint64,),  # us
    "barrier": (c_uint64, c_uint64, c_uint64, c_uint64, c_uint32, c_uint32),
    "copy": (c_uint64, c_uint64, c_uint64),  # dst, src, pieces of 16 bytes
}


@functools.cache
def kernels_of(device: int) -> Kernels:
    """Loaded once in a process; `device` is current."""
    return Kernels()


class Kernels:
    """The device that is current when this is made keeps them."""

    def __init__(self) -> None:
        module = driver.Module(resources.files(__package__).joinpath("kernels.ptx").read_bytes() + b"\0")
        self._functions = {name: module.function(f"mori_{name}") for name in _ARGUMENTS}
        self._launches: dict[tuple[str, int, int], driver.PreparedLaunch] = {}
        self._lock = threading.Lock()

    def launch(self, name: str, stream: int, *arguments: int, grid: int = 1, block: int = 1) -> None:
        """Enqueue one of them."""
        with self._lock:
            launch = self._launches.get((name, grid, block))
            if launch is None:
                argument_objects = [kind(0) for kind in _ARGUMENTS[name]]
                launch = driver.PreparedLaunch(self._functions[name], grid, block, argument_objects)
                self._launches[name, grid, block] = launch
            for slot, value in zip(launch.args, arguments, strict=True):
                slot.value = value  # type: ignore[attr-defined]
            launch.launch(stream)
