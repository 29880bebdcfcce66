"""What kernels of this target leave in the fault record, in words."""

from __future__ import annotations

from collections.abc import Mapping

from mori_shmem.errors import (
    ArgumentError,
    CollectiveMismatch,
    MoriError,
    PeerTimeout,
    UnsupportedShape,
)

from mori_ep.signs import difference

OURS = 0xE0000
_OVERFLOW, _DIFFERENT_CALL, _TOO_FEW_ROWS, _DIFFERENT_COMBINE = 0xE0009, 0xE000A, 0xE000B, 0xE000C
_WAITS = {  # WAIT_* of protocol.cuh
    0xE0001: "the header of a dispatch",
    0xE0002: "the rows of a dispatch (tokens stored so far)",
    0xE0003: "a row of a dispatch, as packets",
    0xE0004: "its own blocks to meet",
    0xE0005: "the beginning of a combine",
    0xE0006: "rows to read in a combine",
    0xE0007: "the end of reading in a combine",
    0xE0008: "a row of a combine, as packets",
}


def error_of(found: Mapping[str, int], timeout_s: float) -> MoriError:
    """The error that a record stands for."""
    rank, peer, seen, wanted = (found[name] for name in ("rank", "peer", "seen", "wanted"))
    if found["what"] == _OVERFLOW:
        return UnsupportedShape(
            f"rank {peer} sends {seen} rows to rank {found['index']} in one dispatch, which has room for "
            f"{wanted} of each rank: make the op with a larger max_total_recv_tokens, or 0"
        )
    if found["what"] == _DIFFERENT_CALL:
        return CollectiveMismatch(
            f"rank {peer} made a dispatch of another kind than rank {rank}: hidden size, dtype, scales and "
            "whether there are weights have to be the same on all ranks"
        )
    if found["what"] == _DIFFERENT_COMBINE:
        first, second = sorted([(found["index"], wanted), (peer, seen)])
        return CollectiveMismatch(f"combine: {difference(first, second)}")
    if found["what"] == _TOO_FEW_ROWS:
        return ArgumentError(
            f"rank {rank} combined an input of {seen} rows (or weights of so many), and its dispatch had "
            f"received {wanted}: all rows are needed, in dispatch's order"
        )
    what = _WAITS.get(found["what"], f"flag {found['what']:#x}")
    return PeerTimeout(
        f"rank {rank} waited more than {timeout_s:g} s for rank {peer}: {what}, number "
        f"{found['index']}; seen {seen}, wanted {wanted}. The rank is late, stuck or dead; "
        "MORI_TIMEOUT_S is the limit",
        rank=rank,
        peers=[peer],
        seen=seen,
        wanted=wanted,
    )
