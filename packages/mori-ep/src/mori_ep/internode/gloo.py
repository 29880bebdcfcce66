"""The engine that is always there: torch.distributed's gloo, point to point over TCP.

Gloo has no one-sided put. A put is two messages: a note (where the bytes go, how many, which word, which
value) and the bytes. One thread per counterpart sleeps in the receive of the next note, receives the bytes to
where the note says, then sets the word and wakes who waits for it. Messages from one rank to another stay in
order, so a note is always followed by its bytes.

A connection that ends without a note that says so means that the counterpart died. A cut network is noticed
at the deadline only.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import mori_shmem
import torch
from mori_shmem.deadline import Deadline
from mori_shmem.errors import PeerTimeout

from mori_ep.internode.comm import NodesCommunicator
from mori_ep.internode.engine import LEFT, Gone, broken, gone, not_taken

_NOTE, _BYTES = 1, 2  # tags
_LEAVING = -1  # in the place of the number of bytes
_FOR_EVER = timedelta(days=365)
_GOODBYE_S = 1.0


def open_engine(comm: NodesCommunicator, window: mori_shmem.Window, key: str) -> GlooEngine:
    """Collective among counterparts."""
    return GlooEngine(comm, window, key)


class GlooEngine:
    """See the module."""

    longest_nap_s = 0.05  # threads of ours do the receiving

    def __init__(self, comm: NodesCommunicator, window: mori_shmem.Window, key: str) -> None:
        self._comm, self._window = comm, window
        self._memory = window.tensor(window.nbytes, torch.uint8)
        self._group = _group(comm, key)
        self._sent: list[tuple[int, Any, torch.Tensor]] = []  # node, its work, what it reads
        self.gone: dict[int, Gone] = {}
        self._closed = False
        self._peers = [node for node in range(comm.num_nodes) if node != comm.node_number]
        self._threads = [
            threading.Thread(target=self._receive, args=(node,), daemon=True, name=f"mori-ep-gloo-{node}")
            for node in self._peers
        ]
        for thread in self._threads:
            thread.start()

    def put_signal(self, node: int, to: int, source: int, nbytes: int, word: int, value: int) -> None:
        self._send(node, torch.tensor([nbytes, to, word, value], dtype=torch.int64), _NOTE)
        if nbytes:
            self._send(node, self._memory[source : source + nbytes], _BYTES)

    def _send(self, node: int, message: torch.Tensor, tag: int) -> None:
        if node in self.gone:
            raise gone(self._comm, node, self.gone[node])
        try:
            self._sent.append((node, self._group.send([message], node, tag), message))
        except RuntimeError as error:
            raise gone(self._comm, node, self.gone.setdefault(node, broken(error))) from None

    def progress(self) -> None:
        """Gloo's own thread moves bytes, ours receive them."""

    def ask(self, node: int) -> None:
        """The thread that receives from it knows."""

    def quiet(self, deadline: Deadline) -> None:
        for node, work, _ in self._sent:
            try:
                work.wait(timedelta(seconds=max(deadline.left_s(), 0.001)))
            except RuntimeError as error:
                if node not in self.gone and deadline.passed():
                    raise not_taken(self._comm, [node], deadline) from None
                why = self.gone.setdefault(node, broken(error))
                if why.died:
                    raise gone(self._comm, node, why) from None
        self._sent.clear()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline, notes = Deadline(_GOODBYE_S), []
        goodbye = torch.tensor([_LEAVING, 0, 0, 0], dtype=torch.int64)
        for node in self._peers:
            if node not in self.gone:
                with contextlib.suppress(RuntimeError):
                    notes.append(self._group.send([goodbye], node, _NOTE))
        for note in notes:
            with contextlib.suppress(RuntimeError):
                note.wait(timedelta(seconds=max(deadline.left_s(), 0.001)))
        for thread in self._threads:
            thread.join(max(deadline.left_s(), 0.001))  # those whose counterpart stays end with the process

    # ---- on the threads ----

    def _receive(self, node: int) -> None:
        note = torch.zeros(4, dtype=torch.int64)
        try:
            while True:
                self._group.recv([note], node, _NOTE).wait(_FOR_EVER)
                nbytes, to, word, value = note.tolist()
                if nbytes == _LEAVING:
                    self.gone[node] = LEFT
                    return
                if nbytes:
                    self._group.recv([self._memory[to : to + nbytes]], node, _BYTES).wait(_FOR_EVER)
                if self._closed:
                    return
                self._comm.node.signal(self._window.at(word), value)
        except Exception as error:  # whatever it is, nothing more will come from there
            self.gone.setdefault(node, broken(error))


def _group(comm: NodesCommunicator, key: str) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=comm.timeout_s)
    if comm.interface:
        options._devices = [ProcessGroupGloo.create_device(interface=comm.interface)]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    store = PrefixStore(f"{key}/{comm.local_rank}", comm.store)
    try:
        return ProcessGroupGloo(store, comm.node_number, comm.num_nodes, options)
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {comm.rank} of {comm.world_size}: gloo did not connect the counterparts of local rank "
            f"{comm.local_rank} within {comm.timeout_s:g} s: {broken(error).how}. If the ranks are on "
            f"several "
            "machines, name the network interface (interface=, or MORI_SOCKET_IFNAME)",
            rank=comm.rank,
        ) from None
