"""What kernels of this target leave in the fault record, in words."""

from __future__ import annotations

import ctypes

import mori_shmem
from mori_shmem.errors import ArgumentError, MoriError, PeerTimeout, UnsupportedShape
from mori_shmem.targets.cuda.fault_record import FIELDS

_OURS = 0xE0000
_OVERFLOW, _DIFFERENT_CALL = 0xE0009, 0xE000A
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


class Faults:
    """The communicator's record, looked at in each call: a load, where nothing has happened."""

    def __init__(self, comm: mori_shmem.Communicator) -> None:
        self._comm = comm
        self._words = (ctypes.c_uint32 * len(FIELDS)).from_address(comm.core.record.address)

    def check(self) -> None:
        """Raise what a kernel of an earlier call has left."""
        if self._words[0]:
            self._raise()

    def _raise(self) -> None:
        found = dict(zip(FIELDS, self._words, strict=True))
        if found["what"] & ~0xFF != _OURS:
            self._comm.check()
            return
        if found["code"] != 1:
            return  # being written
        self._words[0] = 0
        raise error_of(found, self._comm.timeout_s)


def error_of(found: dict[str, int], timeout_s: float) -> MoriError:
    """The error that a record stands for."""
    rank, peer, seen, wanted = (found[name] for name in ("rank", "peer", "seen", "wanted"))
    if found["what"] == _OVERFLOW:
        return UnsupportedShape(
            f"rank {rank} was sent {seen} rows in one dispatch and has room for {wanted}: the rows beyond are lost. "
            "Make the op with a larger max_total_recv_tokens, or 0"
        )
    if found["what"] == _DIFFERENT_CALL:
        return ArgumentError(
            f"rank {peer} made a dispatch of another kind than rank {rank}: hidden size, dtype, scales and whether "
            "there are weights have to be the same on all ranks"
        )
    what = _WAITS.get(found["what"], f"flag {found['what']:#x}")
    return PeerTimeout(
        f"rank {rank} waited more than {timeout_s:g} s for rank {peer}: {what}, number {found['index']}; seen "
        f"{seen}, wanted {wanted}. The rank is late, stuck or dead; MORI_TIMEOUT_S is the limit",
        rank=rank,
        peers=[peer],
        seen=seen,
        wanted=wanted,
    )
