"""The environment variables of mori-megamoe, read when a layer is made; mori_shmem.settings has the rules."""

from __future__ import annotations

from mori_shmem.settings import Setting, SettingsTable

TABLE = SettingsTable("mori-megamoe")

PAIRS = TABLE.add(
    Setting(
        "MORI_MEGAMOE_PAIRS",
        True,
        doc="whether a token that goes to both of a rank's two busiest experts sends them one row",
    )
)
COMBINE_MASK = TABLE.add(
    Setting(
        "MORI_MEGAMOE_COMBINE_MASK",
        True,
        doc="whether slots whose id names no expert are allowed, where a call does not say (mask_invalid_slots)",
    )
)
POISON = TABLE.add(
    Setting(
        "MORI_MEGAMOE_POISON",
        False,
        doc="whether every launch begins by filling what others will write with NaN codes, to find a row that is "
        "read before it came",
    )
)
