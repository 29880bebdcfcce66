"""A copy queue of the host on an SDMA engine, in the order of the caller's stream.

    caller's stream   ── produce x ── submit ────────── kernel ── join ── consume
                                         │ writes a ticket          │ waits for `joined`
    the queue                            └─ poll ─ copy ─ signal ───┘

Where the stream holds work, a submission begins with a packet that waits for a ticket, and the stream is
told to write that ticket after its work: the copy sees what the stream has produced, and the caller goes
on. Where the stream is idle there is nothing to wait for. `join` is the other way round.

Nothing of this can be captured in a graph: a replay would not write packets. Kernels that write them
themselves (device/flydsl) can be.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mori_shmem.core import native
from mori_shmem.errors import ArgumentError

if TYPE_CHECKING:
    from mori_shmem.targets.rocm.fabric import Fabric

Step = tuple[str, tuple[Any, ...]]
_COPIES = ("put", "put_2d")
_SIGNAL_EARLY_S = 0.02  # how far a signal overtakes its copies, by order of a test


class _Verbs:
    """The verbs of a put program, handed on as steps."""

    def _take(self, step: Step) -> None:
        raise NotImplementedError

    def put(self, dst: int, src: int, nbytes: int) -> None:
        self._take(("put", (dst, src, nbytes)))

    def put_2d(
        self, dst: int, src: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
    ) -> None:
        self._take(("put_2d", (dst, src, row_bytes, num_rows, dst_pitch, src_pitch)))

    def signal(self, where: int, value: int, op: str = "set") -> None:
        self._take(("signal", (where, value, op)))

    def wait(self, where: int, value: int, cmp: str = ">=") -> None:
        self._take(("wait", (where, value, cmp)))

    def timestamp(self, where: int) -> None:
        self._take(("timestamp", (where,)))


def encode(fabric: Fabric, steps: Sequence[Step]) -> native.RocmProgram:
    """Steps as packets; addresses are checked against the open windows."""
    program = native.RocmProgram(fabric.device)
    for verb, arguments in steps:
        getattr(program, verb)(*arguments)
    return program


class Program(_Verbs):
    """The steps of a put program, and its packets."""

    def __init__(self, fabric: Fabric) -> None:
        self.steps: list[Step] = []
        self.packets = native.RocmProgram(fabric.device)

    def _take(self, step: Step) -> None:
        verb, arguments = step
        getattr(self.packets, verb)(*arguments)
        self.steps.append(step)


class Queue(_Verbs):
    """The queue (peer, index) of a fabric. Submissions of several threads follow one another, never
    mixed."""

    def __init__(self, fabric: Fabric, core: native.RocmQueue, peer: int, index: int) -> None:
        self.peer, self.index = peer, index
        self.core = core
        self._fabric = fabric
        self._lock = threading.Lock()
        self._newest_mark = 0
        self._marked = True  # nothing was submitted after the newest mark
        self._faults: Faults | None = None

    def _take(self, step: Step) -> None:
        self._submit([step], encode(self._fabric, [step]))

    def submit(self, program: Program) -> None:
        self._submit(program.steps, program.packets)

    def _submit(self, steps: Sequence[Step], packets: native.RocmProgram) -> None:
        fabric = self._fabric
        fabric.check_open("queue")
        if fabric.is_capturing():
            raise ArgumentError(
                "a copy queue of the host cannot be captured in a graph: its packets are written once. A "
                "kernel that puts (mori_shmem.device.flydsl) can be"
            )
        with self._lock:
            self._marked = False
            if not self._faults:
                self.core.submit(packets, self._ticket(), fabric.timeout_s)
                return
            at_once, held_back = self._faults.apply(steps)
            self.core.submit(encode(fabric, at_once), self._ticket(), fabric.timeout_s)
            if held_back:
                gate = self._faults.gate(self.core)
                self.core.submit(encode(fabric, held_back), gate, fabric.timeout_s)

    def _ticket(self) -> int:
        """What the packets wait for: 0, or a ticket that the caller's stream writes after its work."""
        device, stream = self._fabric.device, self._fabric.callers_stream()
        if device.is_idle(stream):
            return 0
        ticket = self.core.next_ticket()
        device.write_value(stream, self.core.go, ticket)
        return ticket

    def mark(self) -> int:
        """The newest mark: behind all that was submitted so far."""
        with self._lock:
            if not self._marked:
                self._newest_mark = self.core.mark(self._fabric.timeout_s)
                self._marked = True
            return self._newest_mark

    def join(self) -> None:
        """The caller's stream goes on after all that was submitted."""
        self._fabric.check_open("queue")
        self._fabric.refuse_in_capture("join", "kernels that put have device-side waits")
        if not self.is_busy():
            return
        with self._lock:
            count = self.core.join(self._fabric.timeout_s)
            self._fabric.device.wait_value(self._fabric.callers_stream(), self.core.joined, count)

    def quiet(self, timeout_s: float | None = None) -> None:
        """Return when all that was submitted is done and visible."""
        self._fabric.check_open("queue")
        mark = self.mark()
        self._fabric.await_idle(
            lambda: self.core.reached(mark), timeout_s, what="quiet", peer=self.peer, index=self.index
        )

    def is_busy(self) -> bool:
        """Whether something that was submitted is not done."""
        return not self.core.reached(self.mark())

    def set_faults(self, *, drop_every: int = 0, delay_us: int = 0, reorder: bool = False) -> None:
        """Test hook, as on the host target; a delay holds a whole submission back."""
        with self._lock:
            asked = (drop_every, delay_us, reorder)
            self._faults = Faults(*asked) if any(asked) else None


class Faults:
    """What `Queue.set_faults` asks for, applied to steps."""

    def __init__(self, drop_every: int = 0, delay_us: int = 0, reorder: bool = False) -> None:
        self._drop_every, self._delay_us, self._reorder = drop_every, delay_us, reorder
        self._num_copies = 0

    def apply(self, steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
        """What is submitted at once, and what only behind the gate."""
        kept = [step for step in steps if step[0] not in _COPIES or not self._dropped()]
        if self._reorder:
            return [s for s in kept if s[0] not in _COPIES], [s for s in kept if s[0] in _COPIES]
        return ([], kept) if self._delay_us else (kept, [])

    def _dropped(self) -> bool:
        self._num_copies += 1
        return bool(self._drop_every) and self._num_copies % self._drop_every == 0

    def gate(self, core: native.RocmQueue) -> int:
        """A ticket that is written after the delay."""
        ticket = core.next_ticket()

        def write() -> None:
            ctypes.c_uint64.from_address(core.go).value = ticket

        delay_s = max(self._delay_us * 1e-6, _SIGNAL_EARLY_S if self._reorder else 0.0)
        timer = threading.Timer(delay_s, write)
        timer.daemon = True
        timer.start()
        return ticket
