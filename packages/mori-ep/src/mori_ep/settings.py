"""The environment variables of mori-ep, read when an op is made; mori_shmem.settings has the rules."""

from __future__ import annotations

from mori_shmem.settings import Setting, SettingsTable

TABLE = SettingsTable("mori-ep")

DISABLE_VIEW_CACHE = TABLE.add(
    Setting(
        "MORI_EP_DISABLE_VIEW_CACHE",
        False,
        doc="whether every call makes the tensors that it returns anew, as a comparison for measurements",
    )
)
CHECK_IDS = TABLE.add(
    Setting(
        "MORI_EP_CHECK_IDS",
        False,
        doc="whether dispatch looks for expert ids that no rank has (-1 stays legal) and refuses them",
    )
)
KERNELS = TABLE.add(
    Setting(
        "MORI_EP_KERNELS",
        "own",
        choices=("own", "triton"),
        doc="kernels of an op: the target's own, or the readable ones in Triton, for IntraNode",
    )
)
INTERNODE_ENGINE = TABLE.add(
    Setting(
        "MORI_EP_INTERNODE_ENGINE",
        "nixl",
        choices=("nixl", "gloo"),
        doc="engine that carries rows between nodes",
    )
)
INTERNODE_LL_TOKENS = TABLE.add(
    Setting(
        "MORI_EP_INTERNODE_LL_TOKENS",
        16,  # 4 nodes of one rank, top-2: compact is mostly 1.1 to 2 times as fast from 32 tokens on
        low=0,
        high=1 << 20,
        doc="number of tokens up to which kernel type InterNode sends a rank's tokens as they lie",
    )
)
FP8_COMBINE_SCALE_DIM = TABLE.add(
    Setting(
        "MORI_FP8_COMBINE_SCALE_DIM",
        0,
        low=0,
        high=1 << 16,
        doc="number of scales per row of the blockwise combine transports; 0: one per 128 elements (fp4: 32)",
    )
)
