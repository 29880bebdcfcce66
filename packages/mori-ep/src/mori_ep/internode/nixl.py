"""The engine for networks that know remote writes: NIXL with its UCX backend.

The window is registered as one region per rank. A put is one transfer whose notification (word, value) leaves
when the transfer has been polled to its end, so every wait must call `progress`; over TCP the receiver must
as well, or the sender stalls. There is no progress thread: with fewer than two cores for each rank it costs
more than it gives.

Between network namespaces of one machine UCX would still choose shared memory, which is not there:
UCX_TLS=tcp.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import struct
import time
from typing import Any

import mori_shmem
from mori_shmem.deadline import Deadline
from mori_shmem.errors import PeerDied

from mori_ep.internode.comm import NodesCommunicator
from mori_ep.internode.engine import LEFT, Gone, broken, gone, missing, not_taken

_LOG = logging.getLogger("mori_ep")
_PACKAGES = (
    "nixl_cu13",
    "nixl_cu12",
)  # the CPU side is the same; a CUDA that is there decides for GPU memory
_WORD = struct.Struct("<qQ")  # offset, value
_ARE_YOU_THERE, _LEAVING = -1, -2  # in the place of an offset
_MEMORY = "DRAM"


def open_engine(comm: NodesCommunicator, window: mori_shmem.Window, key: str) -> NixlEngine:
    """Collective among counterparts."""
    return NixlEngine(comm, window, key, _api())


def _api() -> Any:
    errors: list[ImportError] = []
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            errors.append(error)
    raise missing("nixl", "nixl-cu13 or nixl-cu12", errors[-1])


class NixlEngine:
    """See the module."""

    longest_nap_s = 0.002

    def __init__(self, comm: NodesCommunicator, window: mori_shmem.Window, key: str, api: Any) -> None:
        self._comm, self._window = comm, window
        self._base = window.addresses[comm.local_rank]
        self._posted: list[tuple[int, Any]] = []  # node, transfer
        self.gone: dict[int, Gone] = {}
        self._closed = False
        self._agent = _agent(api, comm, key)
        self._registered = self._agent.register_memory([(self._base, window.nbytes, 0, "")], _MEMORY)
        self._connect(key)

    def _connect(self, key: str) -> None:
        """Everybody's metadata and address, through the group's store."""
        comm = self._comm
        card = pickle.dumps((self._agent.get_agent_metadata(), self._base))
        cards = comm.exchange_among_counterparts(f"{key}/cards", card)
        self._names: dict[int, str] = {}
        self._bases: dict[int, int] = {}
        for node, text in cards.items():
            metadata, base = pickle.loads(text)
            name = self._agent.add_remote_agent(metadata)
            self._names[node] = name.decode() if isinstance(name, bytes) else str(name)
            self._bases[node] = base
        self._nodes = {name: node for node, name in self._names.items()}

    def put_signal(self, node: int, to: int, source: int, nbytes: int, word: int, value: int) -> None:
        note = _WORD.pack(word, value)
        if not nbytes:
            self._notify(node, note)
            return
        transfer = self._new_transfer(node, to, source, nbytes, note)
        if self._state(node, self._agent.transfer, transfer) != "DONE":
            self._posted.append((node, transfer))

    def _new_transfer(self, node: int, to: int, source: int, nbytes: int, note: bytes) -> Any:
        agent = self._agent
        try:
            mine = agent.get_xfer_descs([(self._base + source, nbytes, 0)], _MEMORY)
            theirs = agent.get_xfer_descs([(self._bases[node] + to, nbytes, 0)], _MEMORY)
            return agent.initialize_xfer("WRITE", mine, theirs, self._names[node], note)
        except Exception as error:
            raise self._lost(node, error) from None

    def _notify(self, node: int, note: bytes) -> None:
        try:
            self._agent.send_notif(self._names[node], note)
        except Exception as error:
            raise self._lost(node, error) from None

    def _state(self, node: int, ask: Any, transfer: Any) -> str:
        """What `ask` says of a transfer; PeerDied where that is an error."""
        try:
            state = str(ask(transfer))
        except Exception as error:
            raise self._lost(node, error) from None
        if state not in ("DONE", "PROC"):
            raise self._lost(node, RuntimeError(f"a transfer to it ended as {state}"))
        return state

    def _lost(self, node: int, error: BaseException) -> PeerDied:
        return gone(self._comm, node, self.gone.setdefault(node, broken(error)))

    def progress(self) -> None:
        for name, notes in self._agent.get_new_notifs().items():
            for note in notes:
                self._noted(self._nodes[name.decode() if isinstance(name, bytes) else name], note)
        if self._posted:
            self._posted = [
                (node, transfer)
                for node, transfer in self._posted
                if self._state(node, self._agent.check_xfer_state, transfer) != "DONE"
            ]

    def _noted(self, node: int, note: bytes) -> None:
        word, value = _WORD.unpack(note)
        if word == _LEAVING:
            self.gone[node] = LEFT
            self._posted = [(to, transfer) for to, transfer in self._posted if to != node]
        elif word != _ARE_YOU_THERE:
            self._comm.node.signal(self._window.at(word), value)

    def ask(self, node: int) -> None:
        """Only who sends learns that a process has died."""
        if node not in self.gone:
            self._notify(node, _WORD.pack(_ARE_YOU_THERE, 0))

    def quiet(self, deadline: Deadline) -> None:
        while True:
            self.progress()
            if not self._posted:
                return
            if deadline.passed():
                raise not_taken(self._comm, [node for node, _ in self._posted], deadline)
            time.sleep(0)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for node in self._names:
            if node not in self.gone:
                with contextlib.suppress(Exception):
                    self._agent.send_notif(self._names[node], _WORD.pack(_LEAVING, 0))
        with contextlib.suppress(Exception):
            self._agent.get_new_notifs()  # lets the goodbyes go out
            if not self._posted:
                self._agent.deregister_memory(self._registered)


def _agent(api: Any, comm: NodesCommunicator, key: str) -> Any:
    if comm.between_namespaces and "UCX_TLS" not in os.environ:
        os.environ["UCX_TLS"] = "tcp"
        _LOG.info("the nodes are network namespaces of one machine: UCX_TLS=tcp")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return api.nixl_agent(f"{key}/{comm.rank}", config)
