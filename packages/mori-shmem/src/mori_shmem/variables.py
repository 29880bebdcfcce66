"""The environment variables of mori-shmem. The rules that they follow are told in `settings.py`."""

from __future__ import annotations

import socket

from mori_shmem.settings import Setting, SettingsTable

TABLE = SettingsTable("mori-shmem")

BACKEND = TABLE.add(
    Setting(
        "MORI_SHMEM_BACKEND",
        "auto",
        choices=("auto", "host", "cuda", "rocm"),
        doc='target that backend="auto" means; auto takes what this machine has',
    )
)
SOCKET_IFNAME = TABLE.add(
    Setting(
        "MORI_SOCKET_IFNAME",
        "lo",
        choices=tuple(name for _, name in socket.if_nameindex()),  # what this machine has
        doc="network interface of torch.distributed's sockets between ranks that run_ranks starts",
    )
)
TIMEOUT_S = TABLE.add(
    Setting(
        "MORI_TIMEOUT_S",
        30.0,
        low=0.01,
        high=86400.0,
        argument="timeout_s",
        doc="limit of every wait for a peer, in seconds",
    )
)
ENGINES = TABLE.add(
    Setting(
        "MORI_SHMEM_ENGINES",
        1,
        low=1,
        high=64,
        argument="num_engines",
        doc="number of copy-engine threads of a rank (host)",
    )
)
QUEUES = TABLE.add(
    Setting(
        "MORI_SHMEM_QUEUES", 8, low=1, high=64, doc="number of copy queues that a rank may open to each peer"
    )
)
RING_BYTES = TABLE.add(
    Setting(
        "MORI_SHMEM_RING_BYTES",
        256 * 1024,
        low=256,
        high=1 << 30,
        power_of_two=True,
        doc="size of a copy queue's packet ring in bytes",
    )
)
SDMA = TABLE.add(
    Setting(
        "MORI_SHMEM_SDMA",
        "auto",
        choices=("auto", "rocr", "hsakmt"),
        doc="how copy queues are asked for on AMD GPUs; auto tries rocr, then hsakmt",
    )
)
