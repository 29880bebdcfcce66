"""Where a wait inside a kernel writes down that its deadline passed; the host turns it into a PeerTimeout.

The record is the `Fault` of device/cuda/signal.cuh: eight 32-bit words in pinned host memory, so that a
look at it is a load and no copy. The first wait that fails owns it (compare-and-swap of `code` 0 -> busy),
fills it in, and publishes it with code 1; waits that come later see a code that is not 0 and end at once,
so that a kernel whose call has failed is not held up once per flag. Taking the record clears it.

An op's kernels write numbers of the op's own into `what`, and the op has words for them: `CallFaults`.

The host may end the kernels' waits as well: `abandon`, when a rank has died. They see a code that is not 0
and write nothing; the record stays so, since that rank does not come back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mori_shmem.core import CoreError, core_error
from mori_shmem.device import queue_words
from mori_shmem.errors import MoriError, PeerDied, PeerTimeout

if TYPE_CHECKING:
    import torch

    from mori_shmem.comm import Communicator

FIELDS = queue_words.RECORD_FIELDS
BARRIER = 0xB0000
_PURPOSES = {  # by `what`; ops use small numbers of their own
    BARRIER: "the device barrier",
    queue_words.QUEUE_ROOM: "room in a copy queue's ring (its engine stands still)",
    queue_words.QUEUE_TURN: "its turn at a copy queue (whoever was before has given up)",
    queue_words.QUEUE_QUIET: "a copy queue to become quiet",
    queue_words.QUEUE_LOCK: "the lock of a copy queue",
}
_PUBLISHED = 1


class FaultRecord:
    """This rank's record. `memory` (or `address`) goes to kernels."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.address: int = memory.data_ptr()
        self._words = (ctypes.c_uint32 * len(FIELDS)).from_address(self.address)
        self.gone: list[int] = []  # the ranks whose death has ended the kernels' waits

    def abandon(self, ranks: Sequence[int]) -> None:
        """End the waits of this rank's kernels, those to come included: `ranks` have died."""
        self.gone = list(ranks)
        if self._words[0] == 0:
            self._words[0] = queue_words.CODE_ABANDONED

    def take(self) -> CoreError | None:
        """What a kernel wrote down since the last look."""
        if self._words[0] != _PUBLISHED:
            return None
        found = dict(zip(FIELDS, self._words, strict=True))
        self._words[0] = queue_words.CODE_ABANDONED if self.gone else 0
        return core_error(
            "timeout",
            what="kernel",
            purpose=_PURPOSES.get(found["what"], f"flag {found['what']}/{found['index']}"),
            peer=found["peer"],
            seen=found["seen"],
            wanted=found["wanted"],
            block=found["block"],
        )


class CallFaults:
    """What an op's kernels left in the communicator's record, as the op's calls see it: a load, where nothing
    has happened.

    ours      `what` of the op's own records, but for the last byte
    error_of  (fields of a record, the deadline in seconds) -> the error that it stands for
    """

    def __init__(
        self, comm: Communicator, ours: int, error_of: Callable[[Mapping[str, int], float], MoriError]
    ) -> None:
        self._comm, self._ours, self._error_of = comm, ours, error_of
        self._words = (ctypes.c_uint32 * len(FIELDS)).from_address(comm.core.record.address)
        self._first = ctypes.c_uint32.from_address(comm.core.record.address)
        self._failed: MoriError | None = None

    def check(self) -> None:
        """Raise what a kernel of an earlier call has left, from then on in every call: ranks find out at
        different calls, so that those after it do not belong together."""
        if self.found():
            self._raise()

    def found(self) -> bool:
        """Whether there is anything to raise."""
        return self._first.value != 0 or self._failed is not None

    def forgive(self) -> None:
        """Go on: whoever was late is masked now."""
        self._failed = None

    def drop(self) -> None:
        """Forget what kernels of calls before have left, raised or not."""
        self._failed = None
        if self._words[0] == _PUBLISHED and self._words[FIELDS.index("what")] & ~0xFF == self._ours:
            self._words[0] = 0

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed
        found = dict(zip(FIELDS, self._words, strict=True))
        if found["what"] & ~0xFF != self._ours:
            self._comm.check()
            return
        if found["code"] != _PUBLISHED:
            return  # being written
        self._words[0] = 0
        self._failed = self._named(self._error_of(found, self._comm.timeout_s))
        raise self._failed

    def _named(self, error: MoriError) -> MoriError:
        """A rank that is late because it has died is said to have."""
        if isinstance(error, PeerTimeout):
            states = self._comm.core.peer_states()
            dead = [rank for rank in error.peers if states[rank] == "dead"]
            if dead:
                return PeerDied(f"rank {dead[0]} has died. {error}", rank=error.rank, peers=dead)
        return error
