"""The environment variables of mori-megamoe, read when a layer is made; mori_shmem.settings has the rules."""

from __future__ import annotations

from mori_shmem.settings import Setting, SettingsTable

TABLE = SettingsTable("mori-megamoe")

PAIRS = TABLE.add(
    Setting(
        "MORI_MEGAMOE_PAIRS",
        True,
        doc="whether each launch picks the pairs of experts that share rows in the next; off: those of "
        "fanout_masks stay, which without it are none",
    )
)
COMBINE_MASK = TABLE.add(
    Setting(
        "MORI_MEGAMOE_COMBINE_MASK",
        True,
        doc="whether ids may name no expert, where a call does not say (mask_invalid_slots)",
    )
)
BODY = TABLE.add(
    Setting(
        "MORI_MEGAMOE_BODY",
        "R",
        choices=("R", "A"),
        doc="what the GEMMs of the cuda target multiply. R: fp8, summed in fp32 every 128 values, relative "
        "error about 5e-5. A: bf16, exact products, slower, twice the bytes on the wire. Weights whose "
        "scales in a row are more than 2^11 apart need A",
    )
)
POISON = TABLE.add(
    Setting(
        "MORI_MEGAMOE_POISON",
        False,
        doc="whether every launch first fills what others will write with NaN codes, for finding errors",
    )
)
