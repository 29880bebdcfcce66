"""The exchange that one would write without this package: torch's all_to_all_single of rows that are packed
already.

It moves the payload of the same rows to the same ranks, and as many rows of combine's dtype back. It does not
route, pack, exchange counts, carry ids, weights or scales, or add anything up: the peer has less to do.
"""

from __future__ import annotations

import os

import mori_shmem
import torch
import torch.distributed as dist

from mori_ep.bench.inputs import Given, Sizes
from mori_ep.config import EpDispatchCombineConfig


class AllToAll:
    """Both exchanges, of one rank's rows."""

    def __init__(
        self, comm: mori_shmem.Communicator, config: EpDispatchCombineConfig, sizes: Sizes, given: Given
    ) -> None:
        owner = torch.div(given.ids.cpu(), config.num_experts_per_rank, rounding_mode="floor")
        to = [(owner == rank).any(1).nonzero().flatten() for rank in range(comm.world_size)]
        self._sent = [len(tokens) for tokens in to]
        self._received = [counts[comm.rank] for counts in comm.all_gather(self._sent)]
        payload = (
            given.x.view(torch.uint8) if given.x.numel() else torch.empty(0, sizes.hidden, dtype=torch.uint8)
        )
        back_bytes = sizes.hidden * sizes.combine_dtype.itemsize
        self._rows = torch.cat([payload[tokens.to(payload.device)] for tokens in to])
        self._arrived = self._rows.new_empty(sum(self._received), self._rows.shape[1])
        self._answers = self._rows.new_zeros(sum(self._received), back_bytes)
        self._back = self._rows.new_empty(sum(self._sent), back_bytes)

    def dispatch(self) -> None:
        dist.all_to_all_single(self._arrived, self._rows, self._received, self._sent)

    def combine(self) -> None:
        dist.all_to_all_single(self._back, self._answers, self._sent, self._received)


def backend_for(comm_backend: str) -> str:
    """Which of torch's backends is the peer."""
    return "nccl" if comm_backend == "cuda" else "gloo"


def start(comm: mori_shmem.Communicator) -> None:
    """The default process group, of the ranks that the environment names."""
    if not dist.is_initialized() and "MASTER_ADDR" in os.environ:
        device = comm.device if comm.device.type == "cuda" else None
        dist.init_process_group(backend_for(comm.backend), device_id=device)


def why_not(comm: mori_shmem.Communicator) -> str | None:
    """The reason why the peer cannot run here, or None. Collective."""
    if comm.world_size == 1:
        return "one rank has nothing to exchange"
    if comm.device.type == "cuda":
        devices = comm.all_gather(
            (os.uname().nodename, str(torch.cuda.get_device_properties(comm.device).uuid))
        )
        if len(set(devices)) < len(devices):
            return "several ranks share a GPU, which NCCL does not allow"
    return None
