"""What the fabrics of all GPUs share: how the host of a rank waits, and when it gives up.

Between processes they lean on the host target: control pages, the host barrier, and the pidfds that tell
when a peer has died are those of a native fabric that owns no memory and no queues.

A wait of the host looks again and again, with pauses that grow to a millisecond. It ends at its deadline,
when a peer it needs has died, or when a kernel of this rank has left a fault record: then the call that the
kernel belongs to has failed, and its error says so. A wait that ends with a peer's death may end the waits
of this rank's kernels as well (`ends_kernels`): what they wait for will never come.
"""

from __future__ import annotations

import contextlib
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mori_shmem.core import CoreError, core_error, native
from mori_shmem.deadline import Deadline
from mori_shmem.errors import ArgumentError, TransportInert
from mori_shmem.targets.fault_record import FaultRecord

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq,
    "!=": operator.ne, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
_PAUSE_S = (20e-6, 1e-3)  # first and longest pause between two looks
_SPIN_S = 100e-6  # looks without a pause
_DEATH_EVERY_S = 0.01  # how often the peers' processes are looked at
_DEATH_GRACE_S = 0.25  # work that needs no peer gets this long to finish after one has died


class GpuFabric(ABC):
    """One communicator's share of a GPU. `control` is the native fabric that it leans on."""

    # Whether a wait of the host that finds a peer dead gives up this rank's kernels. Not where ops go on
    # without a rank that has died: kernels that were given up once stay so.
    ends_kernels = False

    def __init__(self, control: native.Fabric, record: FaultRecord, timeout_s: float) -> None:
        self.rank, self.world_size = control.rank, control.world_size
        self.queues_per_peer = control.queues_per_peer
        self.timeout_s = timeout_s
        self.control, self.record = control, record
        self.closed = False
        self._next_death_look = 0.0
        self._known_dead: list[int] = []

    # ---- what a GPU's fabric has to have ----

    @abstractmethod
    def signal(self, where: int, value: int, op: str = "set") -> None:
        """Store or add, after what the caller's stream holds."""

    @abstractmethod
    def signals_are_out(self) -> bool:
        """Whether all signals that this rank has sent are stored."""

    @abstractmethod
    def look(self, where: int, deadline: Deadline) -> int | None:
        """A word of GPU memory; None if it did not come in time."""

    @abstractmethod
    def await_callers_work(self, timeout_s: float) -> None:
        """Return when what the caller's stream holds now is done."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured in a graph."""

    # ---- signals ----

    def read(self, where: int) -> int:
        self.check_open("communicator")
        self.refuse_in_capture("read", "a kernel can read the word")
        self.await_idle(self.signals_are_out, None, what="read")
        seen = self.look(where, Deadline(self.timeout_s))
        if seen is None:
            raise core_error("timeout", what="read", waited_s=self.timeout_s)
        return seen

    def wait(
        self, where: int, value: int, cmp: str = ">=", *, peer: int = -1, timeout_s: float | None = None
    ) -> int:
        self.check_open("communicator")
        self.refuse_in_capture("wait", "a queue's wait, or a kernel's, can be captured")
        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        compare, seen = _COMPARE[cmp], None
        for _ in self._looks():
            latest = self.look(where, deadline)
            seen = seen if latest is None else latest
            if latest is not None and compare(latest, value):
                return latest
            facts = {
                "what": "signal",
                "address": where,
                "seen": seen,
                "wanted": value,
                "cmp": cmp,
                "peer": peer,
            }
            with self.ending_kernels():
                self._raise_if_gone(peer, facts)
            if deadline.passed():
                raise core_error("timeout", waited_s=deadline.timeout_s, **facts)
        raise AssertionError("looks do not end")

    def signal_all(self, where: Sequence[int], value: int) -> None:
        for word in where:
            self.signal(word, value)

    def wait_all(self, where: Sequence[int], value: int, peers: Sequence[int], timeout_s: float) -> list[int]:
        deadline = Deadline(timeout_s)
        return [
            self.wait(word, value, ">=", peer=peer, timeout_s=max(deadline.left_s(), 0.0))
            for word, peer in zip(where, peers, strict=True)
        ]

    # ---- barriers and other waits of the host ----

    def barrier(self, timeout_s: float | None = None) -> None:
        """All that the caller's stream holds is done on every rank."""
        self.refuse_in_capture("barrier", "stream_barrier() can be captured")
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(limit)
        self.await_callers_work(limit)
        with self.ending_kernels():
            self.control.barrier(max(deadline.left_s(), 0.001))

    def check(self) -> None:
        """Raise what a kernel of this rank has left in the fault record, or that kernels were given up."""
        self._raise_fault()
        if self.record.gone:
            raise core_error("peer_died", ranks=self.record.gone, what="kernel")

    def _raise_fault(self) -> None:
        if (fault := self.record.take()) is not None:
            raise fault

    def give_up_kernels(self) -> list[int]:
        """If ranks have died, end the waits of this rank's kernels: they run to their ends within
        milliseconds, with wrong data, and `check` raises from now on. The ranks."""
        dead = self.dead_ranks()
        if dead:
            self.record.abandon(dead)
        return dead

    @contextlib.contextmanager
    def ending_kernels(self) -> Iterator[None]:
        """What raises in here that a peer has died gives up this rank's kernels first."""
        try:
            yield
        except CoreError as error:
            if error.kind == "peer_died" and self.ends_kernels:
                self.give_up_kernels()
            raise

    def heard_of_death(self, peers: Sequence[int]) -> None:
        """A collective of the host has ended because some of these peers died, or left: kernels too, as in
        `ending_kernels`. A process's sockets close a moment before it counts as dead."""
        if not self.ends_kernels:
            return
        deadline = Deadline(_DEATH_GRACE_S)
        for _ in self._looks():
            states = self._states()
            if self.give_up_kernels() or all(states[p] == "left" for p in peers) or deadline.passed():
                return

    def await_idle(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None,
        *,
        what: str,
        peer: int = -1,
        index: int = -1,
    ) -> None:
        """Return when `ready`: work of ours or of the caller's is done."""
        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        death_seen = False
        for _ in self._looks():
            done = ready()
            self._raise_fault()
            if done:
                return
            facts = {"what": what, "peer": peer, "index": index}
            if not death_seen and self._dead():
                death_seen = True
                grace = min(_DEATH_GRACE_S, max(deadline.left_s(), 0.001))
                deadline = Deadline(grace)
            elif deadline.passed():
                if death_seen:
                    with self.ending_kernels():
                        raise core_error("peer_died", ranks=self._dead(), **facts)
                raise core_error("timeout", waited_s=deadline.timeout_s, **facts)

    def _looks(self) -> Iterator[None]:
        """When to look: at once, then often, then with pauses. For ever."""
        spin_until = time.monotonic() + _SPIN_S
        pause_s, longest_s = _PAUSE_S
        while True:
            yield
            if time.monotonic() > spin_until:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, longest_s)

    def _states(self) -> list[str]:
        return list(self.control.peer_states())

    def dead_ranks(self) -> list[int]:
        """Whose processes have ended without closing the communicator, as of now."""
        return [rank for rank, state in enumerate(self._states()) if state == "dead"]

    def _dead(self) -> list[int]:
        """The same, at most so many milliseconds old: for loops that look often."""
        now = time.monotonic()
        if now >= self._next_death_look:
            self._next_death_look = now + _DEATH_EVERY_S
            self._known_dead = self.dead_ranks()
        return self._known_dead

    def _raise_if_gone(self, peer: int, facts: dict[str, Any]) -> None:
        """With a peer, its death or leaving ends the wait; without one, anybody's death."""
        self._raise_fault()
        dead = self._dead()
        if dead and peer in (-1, *dead):
            raise core_error("peer_died", ranks=dead, **facts)
        if peer not in (-1, self.rank) and self._states()[peer] == "left":
            raise core_error("peer_left", ranks=[peer], **facts)

    def peer_states(self) -> list[str]:
        return self._states()

    # ---- refusals ----

    def refuse_in_capture(self, what: str, instead: str) -> None:
        if self.is_capturing():
            raise ArgumentError(f"{what} is a wait of the host and cannot be captured in a graph: {instead}")

    def check_open(self, what: str) -> None:
        if self.closed:
            raise core_error("closed", what=what)


def prove_peers(fabric: GpuFabric, parts: Sequence[int]) -> None:
    """Collective: write a word into every rank's part (`parts`: where a row of words for this begins), and
    find everybody's in mine. A transport that is not there must not look like one."""
    wanted = [1000 + rank for rank in range(fabric.world_size)]
    fabric.barrier()
    for part in parts:
        fabric.signal(part + 8 * fabric.rank, wanted[fabric.rank])
    fabric.await_idle(fabric.signals_are_out, None, what="read")
    fabric.barrier()
    seen = [fabric.read(parts[fabric.rank] + 8 * rank) for rank in range(fabric.world_size)]
    missing = [rank for rank in range(fabric.world_size) if seen[rank] != wanted[rank]]
    if missing:
        raise TransportInert(
            f"rank {fabric.rank}: a word written by ranks {missing} did not arrive, although the memory is "
            "mapped"
        )
