"""What kernels of this target leave in the fault record, in words."""

from __future__ import annotations

import ctypes

import mori_shmem
from mori_shmem.errors import MoriError, PeerDied, PeerTimeout, UnsupportedShape
from mori_shmem.targets.fault_record import FIELDS

from mori_megamoe.targets.cuda import params

_OURS = 0xD0000
_WAITS = {
    params.WAIT_COUNTS: "its counts of call {index}",
    params.WAIT_ROWS: "its rows for expert {index} (rows so far)",
    params.WAIT_PARTIALS: "the weighted rows of its experts, call {index}",
    params.WAIT_TILE: "a tile to become ready, at place {index} of the queue",
}


def is_ours(found: dict[str, int]) -> bool:
    """Whether the record was written by a kernel of this package."""
    return found["what"] & ~0xFF == _OURS


def error_of(found: dict[str, int], timeout_s: float) -> MoriError:
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


class Faults:
    """This rank's fault record, as the next call sees it."""

    def __init__(self, comm: mori_shmem.Communicator) -> None:
        self._comm = comm
        self._record = (ctypes.c_uint32 * len(FIELDS)).from_address(comm.core.record.address)
        self._failed: MoriError | None = None

    def raise_found(self) -> None:
        """What a kernel of an earlier call has left; from then on in every call, since ranks find out at
        different ones."""
        if self._record[0] == 1 and self._failed is None:
            found = dict(zip(FIELDS, self._record, strict=True))
            if not is_ours(found):
                self._comm.check()
                return
            self._record[0] = 0
            self._failed = self._named(error_of(found, self._comm.timeout_s))
        if self._failed is not None:
            raise self._failed

    def _named(self, error: MoriError) -> MoriError:
        """A rank that is late because it has died is said to have."""
        if isinstance(error, PeerTimeout):
            states = self._comm.core.peer_states()
            dead = [rank for rank in error.peers if states[rank] == "dead"]
            if dead:
                return PeerDied(f"rank {dead[0]} has died. {error}", rank=error.rank, peers=dead)
        return error
