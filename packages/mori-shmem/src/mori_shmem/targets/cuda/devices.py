"""Which GPU a rank uses, and what has to be in the environment before CUDA starts.

CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues that the streams of a process are spread over
(8 if it is not set, 32 at most). Two streams on one of them run one after the other: a stream that waits
for a flag then holds up the other, and if the flag is to come from that other one, for ever. So it is set
to 32 when CUDA has not started in this process, and otherwise counted: more copy queues than there is room
for are refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mori_shmem.errors import QueueLimitError, TransportInert
from mori_shmem.targets.cuda.memory import NO_MULTICAST

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_MOST, _CUDA_DEFAULT = 32, 8
_RESERVED = 4  # the caller's stream, a side stream of his, torch's copies, the stream that reads signals


def prepare_environment() -> int:
    """Set what can still be set; returns the number of hardware queues that this process has."""
    import torch

    os.environ[NO_MULTICAST[0]] = NO_MULTICAST[1]
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ.setdefault(CONNECTIONS, str(_MOST))
    text = os.environ.get(CONNECTIONS, str(_CUDA_DEFAULT))
    return min(int(text), _MOST) if text.isdecimal() and int(text) else _CUDA_DEFAULT


def check_connections(num_queues: int, connections: int) -> None:
    """Refuse a copy queue that would have to share a hardware queue."""
    if num_queues > connections - _RESERVED:
        raise QueueLimitError(
            f"copy queue number {num_queues} of this process: {CONNECTIONS} gives it {connections} hardware "
            f"queues, {_RESERVED} of them for other streams. One more would share a hardware queue, and a "
            f"queue that waits for a flag would hold up the other. Set {CONNECTIONS}={_MOST} before CUDA "
            "starts in this process (init does so if it comes first), or use fewer queues"
        )


def choose_device(rank: int) -> int:
    """The device that the process has made current; before CUDA has started, the one of LOCAL_RANK."""
    import torch

    count = torch.cuda.device_count()
    if not torch.version.cuda or not count:
        raise TransportInert(
            "the cuda backend needs torch with CUDA and a visible GPU: "
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, {count} GPUs"
        )
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % count)
    return torch.cuda.current_device()


def check_devices(rank: int, uuids: Sequence[str]) -> None:
    """Two ranks on one GPU are for tests, and only when asked for."""
    shared = sorted(r for r, uuid in enumerate(uuids) if uuids.count(uuid) > 1)
    if shared and os.environ.get(OVERLAP) != "1":
        raise TransportInert(
            f"rank {rank}: ranks {shared} share GPUs. If that is not meant, call "
            f"torch.cuda.set_device(LOCAL_RANK) "
            f"before init; if it is (tests), set {OVERLAP}=1 on all ranks"
        )
