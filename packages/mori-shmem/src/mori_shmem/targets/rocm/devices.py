"""Which GPU a rank uses, and what has to be there before it can.

The device is the one that the process has made current; where that is device 0, as at the start, the one of
LOCAL_RANK. Ranks tell each other the PCI address of theirs, which names a GPU whatever
HIP_VISIBLE_DEVICES hides, so two ranks on one GPU are found.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mori_shmem.core import CoreError, native
from mori_shmem.errors import MoriError, TransportInert

_NO_SDMA = "HSA_ENABLE_SDMA"


def check_environment() -> None:
    """Refuse an environment that turns the copy engines off: this target is made of them."""
    if os.environ.get(_NO_SDMA) == "0":
        raise TransportInert(
            f"{_NO_SDMA}=0 turns the copy engines off, and the rocm backend needs them: unset it"
        )


def open_device(rank: int) -> native.RocmDevice:
    """This rank's GPU, current for HIP calls of this thread from now on."""
    count = native.rocm_device_count()
    if not count:
        raise TransportInert("the rocm backend needs a GPU, and HIP shows none (HIP_VISIBLE_DEVICES?)")
    ordinal = native.rocm_current_device() or int(os.environ.get("LOCAL_RANK", rank)) % count
    native.rocm_set_device(ordinal)
    return native.RocmDevice(ordinal)


def check_devices(rank: int, bus_ids: Sequence[str]) -> None:
    """Each rank needs a GPU of its own."""
    shared = sorted(r for r, bus_id in enumerate(bus_ids) if bus_ids.count(bus_id) > 1)
    if shared:
        raise TransportInert(
            f"rank {rank}: ranks {shared} share GPUs ({bus_ids[shared[0]]}). Make the device of LOCAL_RANK "
            "current before init, and start no more ranks than there are GPUs"
        )


def cannot_start(rank: int, error: CoreError) -> MoriError:
    """What the core reported while the transport was started, as an error of ours."""
    info = error.info
    if error.kind == "missing_library":
        return TransportInert(
            f"rank {rank}: the rocm backend needs {info['library']}, which cannot be loaded: "
            f"{info['tried']}. Install ROCm, or set ROCM_PATH; without AMD GPUs run below `mori-sim run`"
        )
    facts = ", ".join(f"{name} {value}" for name, value in info.items())
    return TransportInert(f"rank {rank}: the rocm transport cannot start: {error.kind}: {facts}")
