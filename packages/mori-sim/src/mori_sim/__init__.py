"""A software MI355X node: runs gfx950 code objects and SDMA packets on a CPU.

Programs are started with `mori-sim run -- CMD`; they then find the vendor libraries' names answered by the
simulator. Inside such a program this package places torch tensors in simulated device memory.
"""

from mori_sim.memory import (
    address_of,
    empty,
    full,
    is_device_tensor,
    pending,
    synchronize,
    tensor,
    to_device,
    zeros,
)
from mori_sim.settings import active

__all__ = [
    "active",
    "address_of",
    "empty",
    "full",
    "is_device_tensor",
    "pending",
    "synchronize",
    "tensor",
    "to_device",
    "zeros",
]
