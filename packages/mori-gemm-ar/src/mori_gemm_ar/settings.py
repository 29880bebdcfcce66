"""The environment variables of mori-gemm-ar, read when an op is made; mori_shmem.settings has the rules."""

from __future__ import annotations

from mori_shmem.settings import Setting, SettingsTable

from mori_gemm_ar.options import MAX_PULL_BLOCKS

TABLE = SettingsTable("mori-gemm-ar")

PULL_BLOCKS = TABLE.add(
    Setting(
        "MORI_GEMM_AR_PULL_BLOCKS",
        16,
        low=1,
        high=MAX_PULL_BLOCKS,
        argument="pull_blocks",
        doc="number of pieces in which finished rows are pulled (lsa); unset: what the target was tuned to",
    )
)
KERNELS = TABLE.add(
    Setting(
        "MORI_GEMM_AR_KERNELS",
        "own",
        choices=("own", "triton"),
        doc="kernels of an op: the target's own, or the readable ones in Triton, unfused, for split-lsa",
    )
)
DEBUG_REL_L2 = TABLE.add(
    Setting(
        "MORI_GEMM_AR_DEBUG_REL_L2",
        False,
        doc="whether calls of layers are compared with the unfused path, and the relative error logged",
    )
)
SELF_TEST = TABLE.add(
    Setting(
        "MORI_GEMM_AR_SELF_TEST",
        True,
        argument="self_test",
        doc="whether an op proves its transport when it is made",
    )
)
