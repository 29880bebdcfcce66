"""What kernels of this target leave in the fault record, in words."""

from __future__ import annotations

from collections.abc import Mapping

from mori_shmem.errors import MoriError, PeerTimeout, UnsupportedShape

from mori_megamoe.targets.cuda import params

OURS = 0xD0000
_WAITS = {
    params.WAIT_COUNTS: "its counts of call {index}",
    params.WAIT_ROWS: "its rows for expert {index} (rows so far)",
    params.WAIT_PARTIALS: "the weighted rows of its experts, call {index}",
    params.WAIT_SLOT: "slot {index} of its rows, which its copy engine carries",
    params.WAIT_TILE: "a tile to become ready, at place {index} of the queue",
}


def error_of(found: Mapping[str, int], timeout_s: float) -> MoriError:
    """The error that a record stands for."""
    rank, peer, seen, wanted = (found[name] for name in ("rank", "peer", "seen", "wanted"))
    if found["what"] == params.TOO_MANY_ROWS:
        return UnsupportedShape(
            f"rank {peer} would receive {seen} rows (with padding) in one call and has room for {wanted}: "
            "make Stage1 with a larger capacity, or 0 for any routing. No rank has sent or computed anything"
        )
    what = _WAITS.get(found["what"], "flag {what:#x}").format(**found)
    return PeerTimeout(
        f"rank {rank} waited more than {timeout_s:g} s for rank {peer}: {what}; seen {seen}, wanted "
        f"{wanted}. The rank is late, stuck or dead; MORI_TIMEOUT_S is the limit",
        rank=rank,
        peers=[peer],
        seen=seen,
        wanted=wanted,
    )
