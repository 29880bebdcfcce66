"""`init` and the Communicator: ranks that share windows, signals and copy queues.

What happens in `init`, on each rank:
  1. The settings are read and checked, and this process's place is found (bootstrap.py).
  2. The ranks meet and connect to each other (rendezvous.py, mesh.py), then compare their settings.
  3. The target makes its fabric: control pages are exchanged, engines start (targets/).
Each step has the same deadline. When it fails on one rank, the others learn of it from the closed socket.

After that, `alloc` and `all_gather` go over the mesh, everything else through shared memory. A communicator
that is closed cleanly is seen as "left" by its peers, a process that ends otherwise as "died"; both end the
waits of those who need it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from mori_shmem import descriptors, imports, steps, variables
from mori_shmem.bootstrap import Place, find_place, register
from mori_shmem.core import CoreError, core_error
from mori_shmem.deadline import Deadline
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    DescriptorLimitError,
    LayoutError,
    MoriError,
    PeerDied,
)
from mori_shmem.mesh import Mesh, Message
from mori_shmem.queue import CopyQueue
from mori_shmem.rendezvous import meet
from mori_shmem.settings import Snapshot
from mori_shmem.targets.gpu_fabric import GpuFabric
from mori_shmem.variables import BACKEND, ENGINES, QUEUES, TIMEOUT_S
from mori_shmem.window import Ref, Window, check_ref, check_word
from mori_shmem.wording import forked, queue_limit, raise_faults, worded
from mori_shmem.words import Words

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("mori_shmem")
_TARGETS = {
    "host": "mori_shmem.targets.host",
    "cuda": "mori_shmem.targets.cuda",
    "rocm": "mori_shmem.targets.rocm",
}
_BACKENDS = ("auto", *_TARGETS)
KINDS = ("data", "signals")
_LIVING_S = 1.0  # how long a wait for a living rank goes on where another has died
_DRAIN_S = 1.0  # how long close() lets the queues finish what they hold


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    store: Any = None,
    group: Any = None,
    name: str = "",
    timeout_s: float | None = None,
    num_engines: int | None = None,
    max_queues: int | None = None,
) -> Communicator:
    """Meet the other ranks; returns this rank's Communicator, owned by the caller. Collective.

    backend      "host", "cuda", "rocm"; "auto" is MORI_SHMEM_BACKEND, and without it what this machine has
    rank, world_size, store, group
                 who the ranks are: nothing (torchrun's variables, or torch's default process group where
                 there is one), a process group, or all three of the others
    name         tells communicators of the same ranks apart; a second one needs a name of its own
    timeout_s    limit of this call and, later, of every wait (MORI_TIMEOUT_S, 30 s)
    num_engines  copy-engine threads of this rank (MORI_SHMEM_ENGINES)
    max_queues   queues that may be used to each peer, at most MORI_SHMEM_QUEUES
    """
    values = variables.TABLE.read({TIMEOUT_S: timeout_s, ENGINES: num_engines})
    target = _target(backend_of(backend, values))
    num_queues = _checked_queues(max_queues, values)
    place = find_place(rank, world_size, store, group, name, values[TIMEOUT_S])
    generation = register.enter(place, name)
    try:
        return _connect(target, place, f"{name}/{generation}", values, num_queues)
    except BaseException:
        register.leave(place.identity)
        raise


def backend_of(backend: str, values: Snapshot | None = None) -> str:
    """The backend that an argument means: what "auto" stands for (MORI_SHMEM_BACKEND), on this machine."""
    steps.check_one_of("backend", backend, _BACKENDS)
    if backend == "auto":
        backend = (values or variables.TABLE.read())[BACKEND]
    return _what_is_here() if backend == "auto" else backend


def _target(chosen: str) -> tuple[str, ModuleType]:
    """The target's name and module."""
    return chosen, importlib.import_module(_TARGETS[chosen])


def _what_is_here() -> str:
    """The backend of this machine. Asking torch for GPUs does not touch them."""
    import torch

    if not torch.cuda.is_available():
        return "host"
    return "rocm" if torch.version.hip else "cuda"


def _checked_queues(max_queues: int | None, values: Snapshot) -> int:
    limit = values[QUEUES]
    if max_queues is None:
        return limit
    if type(max_queues) is not int or max_queues < 1:
        raise ArgumentError(f"max_queues={max_queues!r}: a whole number of at least 1 is needed")
    if max_queues > limit:
        raise queue_limit(max_queues, limit, "init")
    return max_queues


def _connect(
    target: tuple[str, ModuleType], place: Place, key: str, values: Snapshot, num_queues: int
) -> Communicator:
    deadline = Deadline(values[TIMEOUT_S])
    with descriptors.limit_named(f"rank {place.rank} of {place.world_size}, in init"):
        mesh = Mesh(place.rank, place.world_size, meet(place, key, deadline))
        return _agree(target, place, mesh, values, num_queues, deadline)


def _agree(
    target: tuple[str, ModuleType],
    place: Place,
    mesh: Mesh,
    values: Snapshot,
    num_queues: int,
    deadline: Deadline,
) -> Communicator:
    """The ranks have met: compare what they were given, and make the fabric."""
    try:

        def all_gather(obj: object) -> list[Any]:
            return [message.value for message in mesh.exchange("settings", obj, deadline)]

        values.check_same(place.rank, all_gather)
        if len(set(given := all_gather((target[0], num_queues)))) > 1:
            raise ArgumentError(f"(backend, max_queues) differ between ranks: {given}, in rank order")
        fabric = target[1].open_fabric(mesh, values, num_queues, deadline)
        return Communicator(target, place, mesh, fabric, values)
    except BaseException:
        mesh.close()
        raise


class Communicator:
    """This rank's end of a group of ranks. Use it as a context manager, or call `close()`."""

    def __init__(
        self,
        target: tuple[str, ModuleType],
        place: Place,
        mesh: Mesh,
        fabric: Any,
        values: Snapshot,
    ) -> None:
        self.backend = target[0]
        self.rank = place.rank
        self.world_size = place.world_size
        self.timeout_s = values[TIMEOUT_S]
        self.settings = values
        self.num_queues = fabric.queues_per_peer
        self.core = fabric  # the target's fabric, for the device-side helpers of the mori packages
        self.target = target[1]
        self._mesh = mesh
        self._pid = os.getpid()
        self._queues: dict[tuple[int, int], CopyQueue] = {}
        self._windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self._num_windows = 0
        self._lock = threading.Lock()
        self._faults: dict[str, Any] = {}  # set by mori_shmem.testing
        self._closer = weakref.finalize(self, _close, self._pid, place, mesh, fabric)
        _live.add(self)

    @property
    def fault_record(self) -> torch.Tensor:
        """The record that waits in kernels write to when they pass their deadline (device/): int32,
        pinned."""
        if self.backend == "host":
            raise ArgumentError("the host backend runs no kernels: it has no fault record")
        record: torch.Tensor = self.core.record.memory
        return record

    # ---- memory ----

    @property
    def device(self) -> torch.device:
        """Where windows live."""
        import torch

        return torch.device(self.target.device_of(self.core))

    def alloc(self, nbytes: int, *, kind: str = "data") -> Window:
        """A zero-filled window of `nbytes` on every rank. Collective; a difference between ranks raises on
        all.

        kind  "data", or "signals" for a window of words that kernels poll: on AMD GPUs that is memory which
              no cache holds. Elsewhere the two are the same.
        """
        self.check_open()
        deadline = Deadline(self.timeout_s)
        part, fault = self._create_part(nbytes, kind)
        offers: list[Message] = []

        def map_window() -> Any:
            fds = [fd for theirs in self._descriptors("alloc", offers) for fd in theirs]
            return self.target.map_window(self.core, part, fds, nbytes, deadline)

        try:
            offers = self._exchange("alloc", (nbytes, kind, fault), deadline, part.fds if part else [])
            self._check_offers([offer.value for offer in offers])
            core = self._all_or_none("alloc", map_window, deadline)
        finally:
            self._give_back(part, offers)
        window = Window(self, core, self._num_windows)
        self._num_windows += 1
        self._windows.add(window)
        return window

    def import_tensor(self, tensor: torch.Tensor) -> Window:
        """The memory of a tensor that torch has allocated, as a window: every rank's tensor is its part, and
        peers put to it and read it in place. Collective; a difference between ranks raises on all.

        Backend rocm, for contiguous tensors in memory that torch has mapped itself
        (PYTORCH_HIP_ALLOC_CONF=expandable_segments:True); elsewhere `alloc` makes windows that tensors can
        view. Nothing is zeroed or copied. The window keeps the tensor; closing it ends the peers' access and
        leaves the tensor as it is.
        """
        self.check_open()
        imports.check_backend(self)
        deadline = Deadline(self.timeout_s)
        part, fault = imports.part_of(self, tensor)
        given = (imports.size_of(tensor), part.place if part else None, fault)
        offers: list[Message] = []

        def map_imported() -> Any:
            fds = self._descriptors("import_tensor", offers)
            return self.target.map_imported(self.core, part, places, fds)

        try:
            offers = self._exchange("import_tensor", given, deadline, part.fds if part else [])
            places = imports.check_offers([offer.value for offer in offers])
            core = self._all_or_none("import_tensor", map_imported, deadline)
        finally:
            self._give_back(part, offers)
        window = Window(self, core, self._num_windows)
        window.keeps = (tensor, part)
        self._num_windows += 1
        self._windows.add(window)
        return window

    def _exchange(
        self, kind: str, value: object, deadline: Deadline, fds: Sequence[int] = ()
    ) -> list[Message]:
        """Collective: everybody's value. Where it ends with a rank's death, so do this rank's kernels."""
        try:
            return self._mesh.exchange(kind, value, deadline, fds)
        except PeerDied as error:
            if isinstance(self.core, GpuFabric):
                self.core.heard_of_death(error.peers)
            raise

    def _descriptors(self, what: str, offers: list[Message]) -> list[list[int]]:
        """What everybody has offered, if it is all here."""
        descriptors.check_all_came(f"rank {self.rank} of {self.world_size}, in {what}", offers)
        return [offer.fds for offer in offers]

    def _give_back(self, part: Any, offers: list[Message]) -> None:
        """Close the descriptors of a window: mappings live without them."""
        if part:
            part.close()
        for fd in (fd for offer in offers for fd in offer.fds):
            os.close(fd)

    def _create_part(self, nbytes: int, kind: str) -> tuple[Any, MoriError | None]:
        """My part, or None and why there is none: the peers must hear of it, or they would wait for me."""
        if type(nbytes) is not int or nbytes < 1:
            return None, LayoutError(f"nbytes={nbytes!r}: a whole number of at least 1 is needed")
        if kind not in KINDS:
            return None, LayoutError(f"kind={kind!r} is not known; allowed: {', '.join(KINDS)}")
        try:
            return self.target.create_part(self.core, nbytes, kind), None
        except CoreError as error:
            return None, worded(error, self, f"alloc({nbytes})")

    def _check_offers(self, offers: list[tuple[int, str, MoriError | None]]) -> None:
        raise_faults("alloc", [fault for _, _, fault in offers])
        if len(set(kinds := [kind for _, kind, _ in offers])) > 1:
            raise LayoutError(f"alloc kinds differ: {', '.join(kinds)}, in rank order")
        sizes = [nbytes for nbytes, _, _ in offers]
        if len(set(sizes)) > 1:
            usual = max(sizes, key=sizes.count)
            odd = "; ".join(f"rank {rank} asked for {n} bytes" for rank, n in enumerate(sizes) if n != usual)
            others = [rank for rank, n in enumerate(sizes) if n == usual]
            raise LayoutError(
                f"alloc sizes differ: {odd}; ranks {others} for {usual}. All ranks must ask for the same"
            )

    def _all_or_none(self, what: str, action: Any, deadline: Deadline) -> Any:
        """Collective: run `action` on every rank; raise on all if it failed on one."""
        result, fault = None, None
        try:
            result = action()
        except CoreError as error:
            fault = worded(error, self, f"{what} (map)")
        except DescriptorLimitError as error:
            fault = error
        faults = [message.value for message in self._exchange(f"{what}/map", fault, deadline)]
        if result is not None and any(faults):
            result.close()
        raise_faults(what, faults)
        return result

    # ---- copy queues ----

    def queue(self, peer: int, index: int = 0) -> CopyQueue:
        """The copy queue (peer, index); the same object each time. `peer` may be this rank."""
        self.check_open()
        if type(peer) is not int or not 0 <= peer < self.world_size:
            raise ArgumentError(f"peer {peer!r}: ranks of this communicator are 0..{self.world_size - 1}")
        if type(index) is not int or not 0 <= index < self.num_queues:
            raise ArgumentError(
                f"queue {index!r} to rank {peer}: this communicator has {self.num_queues} queues to each "
                f"peer, valid are 0..{self.num_queues - 1} (max_queues= of init, up to MORI_SHMEM_QUEUES)"
            )
        with self._lock:
            queue = self._queues.get((peer, index))
            if queue is None:
                try:
                    (core,) = self.core.open_queues(peer, [index])
                except CoreError as error:
                    raise worded(error, self, f"queue({peer}, {index})") from None
                if self._faults:
                    core.set_faults(**self._faults)
                queue = self._queues[peer, index] = CopyQueue(self, core, peer, index)
            return queue

    @property
    def queues(self) -> list[CopyQueue]:
        """The queues that this rank has asked for so far."""
        return list(self._queues.values())

    def encode(self, program_steps: list[steps.Step]) -> Any:
        """The target's form of a put program's steps."""
        program = self.target.new_program(self.core)
        try:
            for verb, arguments in program_steps:
                getattr(program, verb)(*arguments)
        except CoreError as error:
            raise worded(error, self, "a put program") from None
        return program

    # ---- signals ----

    def signal(self, where: Ref, value: int, op: str = "set") -> None:
        """Set or add to a 64-bit word now (release), and wake the rank that owns it."""
        _, arguments = steps.signal(self, where, value, op)
        try:
            self.core.signal(*arguments)
        except CoreError as error:
            raise worded(error, self, "signal") from None

    def read(self, where: Ref) -> int:
        """The word's value (acquire)."""
        check_word(self, where, "read")
        try:
            return int(self.core.read(where.address))
        except CoreError as error:
            raise worded(error, self, "read") from None

    def wait(
        self,
        where: Ref,
        value: int,
        cmp: str = ">=",
        *,
        peer: int | None = None,
        what: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Sleep until the 64-bit word compares (acquire); returns the value seen.

        `peer` is the rank that is expected to write it: if that rank dies or leaves, PeerDied. Without it
        any rank's death raises. While `peer` lives it may still write: a death of another rank is looked for
        once a second, and then PeerDied names the dead. `what` goes into the error: name the thing that is
        waited for. Callers that go on without the dead wait with `words`, for whom they have chosen.
        """
        check_word(self, where, "wait")
        steps.check_value("value", value, 1 << 64)
        steps.check_one_of("cmp", cmp, steps.COMPARISONS)
        if peer is not None and (type(peer) is not int or not 0 <= peer < self.world_size):
            raise ArgumentError(f"peer {peer!r}: ranks of this communicator are 0..{self.world_size - 1}")
        limit = self.checked_timeout(timeout_s)
        deadline = Deadline(self.timeout_s if limit is None else limit)
        wait = functools.partial(self.core.wait, where.address, value, cmp, peer=-1 if peer is None else peer)
        try:
            while True:
                try:
                    return int(wait(timeout_s=max(min(deadline.left_s(), _LIVING_S), 0.0)))
                except CoreError as error:
                    self._raise_unless_early(error, deadline)
        except CoreError as error:
            raise worded(error, self, f"wait for {what}" if what else "wait") from None

    def _raise_unless_early(self, error: CoreError, deadline: Deadline) -> None:
        """A wait has ended with this: go on if that was one of its slices, and no rank has died in it."""
        if error.kind != "timeout" or error.info.get("what") == "kernel":
            raise error
        if dead := [rank for rank, state in enumerate(self.core.peer_states()) if state == "dead"]:
            if isinstance(self.core, GpuFabric):
                self.core.heard_of_death(dead)
            raise core_error("peer_died", **{**error.info, "ranks": dead})
        if deadline.passed():
            waited_s = deadline.timeout_s - deadline.left_s()
            raise core_error("timeout", **{**error.info, "waited_s": waited_s})

    def words(self, refs: Sequence[Ref], peers: Sequence[int]) -> Words:
        """Signals of one purpose, checked once, to be set and awaited together; `peers[i]` writes refs[i]."""
        return Words(self, refs, peers)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks. What a rank stored before is visible to all after."""
        self.check_open()
        try:
            self.core.barrier(self.checked_timeout(timeout_s))
        except CoreError as error:
            raise worded(error, self, "barrier") from None

    def stream_barrier(self, timeout_s: float | None = None) -> None:
        """A barrier in the order of the caller's work. Where that runs on a stream, this returns at once,
        can be captured in a CUDA graph, and a rank that is late is found by `check`; elsewhere it is
        `barrier`.

        The stream barriers of a communicator follow one another on every rank: do not let two run at a time.
        """
        self.check_open()
        try:
            self.target.stream_barrier(self.core, self.checked_timeout(timeout_s))
        except CoreError as error:
            raise worded(error, self, "stream_barrier") from None

    def check(self) -> None:
        """Raise PeerTimeout if a wait inside a kernel of this rank has passed its deadline, and PeerDied from
        the moment on that kernels' waits were ended because a rank had died. Every wait of the host looks at
        the first as well; this is for calls that do not wait."""
        self.check_open()
        try:
            self.target.check(self.core)
        except CoreError as error:
            raise worded(error, self, "a kernel") from None

    def all_gather(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Everybody's object, in rank order. For small host objects; they are pickled."""
        self.check_open()
        limit = self.checked_timeout(timeout_s)
        deadline = Deadline(self.timeout_s if limit is None else limit)
        return [message.value for message in self._exchange("all_gather", obj, deadline)]

    def self_test(self) -> None:
        """Collective: prove that bytes, signals and order work between every pair; else TransportInert on
        all ranks."""
        from mori_shmem.self_test import self_test

        self_test(self)

    # ---- life ----

    @property
    def closed(self) -> bool:
        return not self._closer.alive

    def close(self) -> None:
        """Finish what the queues hold, leave, and free everything. Local; twice is fine; tensors stay
        valid."""
        if os.getpid() != self._pid or not self._closer.alive:
            return
        self._drain()
        self._closer()
        for window in list(self._windows):
            window.close()
        self._queues.clear()

    def _drain(self) -> None:
        """Give queued copies a moment. What cannot move (a queue that waits for a flag) is dropped, and
        said so."""
        deadline = Deadline(_DRAIN_S)
        for queue in self._queues.values():
            if self.target.is_busy(queue.core):
                with contextlib.suppress(CoreError):
                    queue.core.quiet(max(deadline.left_s(), 0.001))
                    continue
                _LOG.warning(
                    "rank %d closes its communicator with work left in queue %d to rank %d: it is dropped",
                    self.rank,
                    queue.index,
                    queue.peer,
                )

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Communicator rank {self.rank} of {self.world_size}, {self.backend}{state}>"

    # ---- for the other modules of the package ----

    def check_open(self) -> None:
        """Raise unless this communicator is usable here and now."""
        if os.getpid() != self._pid:
            raise forked(self._pid, os.getpid())
        if not self._closer.alive:
            raise ClosedError(f"rank {self.rank}: the communicator is closed")

    def checked_timeout(self, timeout_s: float | None) -> float | None:
        """The argument of a wait, refused if it cannot be a time."""
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise ArgumentError(
                f"timeout_s={timeout_s!r}: a number of seconds above 0, or None for {self.timeout_s:g}"
            )
        return timeout_s

    def describe(self, address: int) -> str:
        """An address in words: which window, whose part, how far in."""
        for window in list(self._windows):
            for rank, start in enumerate(window.addresses):
                if start <= address < start + window.nbytes:
                    return f"window {window.number}, rank {rank}'s part, offset {address - start}"
        return f"address {address:#x}"

    def check_ref(self, ref: Ref, nbytes: int, what: str) -> None:
        """Refuse an address that is not `nbytes` inside an open window of this communicator."""
        check_ref(self, ref, nbytes, what)

    def set_faults(self, **faults: Any) -> None:
        """For mori_shmem.testing: how this rank's queues, open ones and later ones, misbehave."""
        with self._lock:
            self._faults = faults
            for queue in self._queues.values():
                queue.core.set_faults(**faults)


def _close(pid: int, place: Place, mesh: Mesh, fabric: Any) -> None:
    """Give everything back. Also runs when a communicator is garbage, and at the interpreter's exit."""
    if os.getpid() != pid:
        return
    fabric.close()
    mesh.close()
    register.leave(place.identity)


_live: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _forget_in_child() -> None:
    for comm in list(_live):
        comm._mesh.forget()
    _live.clear()


os.register_at_fork(after_in_child=_forget_in_child)
