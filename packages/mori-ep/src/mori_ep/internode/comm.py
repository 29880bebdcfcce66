"""Which rank is where, and a communicator over several nodes with the face of one over a single node.

Rank r is local rank r % L of node r // L, with L ranks on every node. The ranks of a node have a communicator
of mori_shmem; what all ranks agree on (small objects, when an op is made) goes through the group's store;
rows go through an engine, one for each window.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mori_shmem
from mori_shmem import variables
from mori_shmem.bootstrap import Place, find_place, register
from mori_shmem.comm import backend_of
from mori_shmem.deadline import Deadline
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    LayoutError,
    PeerError,
    PeerTimeout,
    TransportInert,
    UnsupportedShape,
)
from mori_shmem.rendezvous import ranks_text
from mori_shmem.settings import Snapshot

from mori_ep.internode.engine import ENGINES, Engine
from mori_ep.internode.store import PatientStore
from mori_ep.settings import INTERNODE_ENGINE, TABLE

if TYPE_CHECKING:
    import torch


def join(
    *,
    ranks_per_node: int,
    rank: int | None = None,
    world_size: int | None = None,
    store: Any = None,
    group: Any = None,
    backend: str = "host",
    engine: str | None = None,
    interface: str | None = None,
    name: str = "",
    timeout_s: float | None = None,
) -> NodesCommunicator:
    """Meet all ranks of all nodes. Collective. Who they are is said as to `mori_shmem.init`.

    ranks_per_node  L: ranks 0..L-1 are on node 0, and so on; equal everywhere
    backend         where windows live: "host", so far
    engine          "nixl" or "gloo" (MORI_EP_INTERNODE_ENGINE)
    interface       network interface for gloo (MORI_SOCKET_IFNAME; nixl: UCX_NET_DEVICES)
    """
    if backend_of(backend) != "host":
        raise TransportInert(
            f"backend={backend!r} across nodes: windows in GPU memory are not part of this version of "
            "mori-ep; host windows are: backend='host', or MORI_SHMEM_BACKEND=host for ops that choose by "
            "themselves"
        )
    values = variables.TABLE.read({variables.TIMEOUT_S: timeout_s})
    chosen = TABLE.read({INTERNODE_ENGINE: engine})[INTERNODE_ENGINE]
    place = find_place(rank, world_size, store, group, name, values[variables.TIMEOUT_S])
    _check_nodes(place, ranks_per_node)
    generation = register.enter(place, name)
    try:
        key = f"mori_ep/internode/{name}/{generation}"
        return NodesCommunicator(place, key, ranks_per_node, chosen, interface or _named(values), values)
    except BaseException:
        register.leave(place.identity)
        raise


def _check_nodes(place: Place, ranks_per_node: int) -> None:
    if type(ranks_per_node) is not int or ranks_per_node < 1 or place.world_size % ranks_per_node:
        raise UnsupportedShape(
            f"ranks_per_node={ranks_per_node!r} for {place.world_size} ranks: a divisor of that is needed, "
            f"every "
            "node has the same number"
        )


def _named(values: Snapshot) -> str | None:
    """The interface of the environment. Its default is the loopback, for ranks of one machine."""
    given = values.origin(variables.SOCKET_IFNAME) != "default"
    return values[variables.SOCKET_IFNAME] if given else None


class NodesWindow:
    """A window on the ranks of this node, and the engine that reaches its like on the others."""

    def __init__(self, window: mori_shmem.Window, engine: Engine) -> None:
        self.here, self.engine, self.nbytes = window, engine, window.nbytes

    def close(self) -> None:
        self.engine.close()
        self.here.close()


class NodesCommunicator:
    """This rank's end of a group of ranks on several nodes. Use it as a context manager, or call
    `close()`."""

    backend = "internode"

    def __init__(
        self,
        place: Place,
        key: str,
        ranks_per_node: int,
        engine: str,
        interface: str | None,
        values: Snapshot,
    ) -> None:
        self.rank, self.world_size, self.store = place.rank, place.world_size, place.store
        self._store = PatientStore(place.store, place.rank, place.world_size)
        self.ranks_per_node, self.num_nodes = ranks_per_node, place.world_size // ranks_per_node
        self.node_number, self.local_rank = divmod(place.rank, ranks_per_node)
        self.timeout_s: float = values[variables.TIMEOUT_S]
        self.engine, self.interface = engine, interface
        self._identity, self._key = place.identity, key
        self._gathers = self._allocs = 0
        self._windows: list[NodesWindow] = []
        self._closed = False
        self.node = self._meet_node(place)
        try:
            self._compare()
        except BaseException:
            self.node.close()
            raise

    def _meet_node(self, place: Place) -> mori_shmem.Communicator:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        try:
            return mori_shmem.init(
                "host",
                rank=self.local_rank,
                world_size=self.ranks_per_node,
                store=PrefixStore(f"{self._key}/node{self.node_number}", place.store),
                timeout_s=self.timeout_s,
            )
        except PeerError as error:
            raise self.in_all_ranks(error) from None

    def _compare(self) -> None:
        """Collective: everybody was told the same, and where everybody is."""
        given = self.all_gather((self.ranks_per_node, self.engine, _this_host()))
        told = sorted({(per_node, engine) for per_node, engine, _ in given})
        if len(told) > 1:
            raise ArgumentError(f"(ranks_per_node, engine) differ between ranks: {told}")
        machines = {tuple(host) for _, _, host in given}
        self.between_namespaces = len({boot for boot, _ in machines}) < len(machines)

    # ---- who is where ----

    def counterpart(self, node: int) -> int:
        """The rank on a node that this rank talks to."""
        return node * self.ranks_per_node + self.local_rank

    @property
    def node_ranks(self) -> range:
        """The ranks of this node."""
        first = self.node_number * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @property
    def device(self) -> torch.device:
        return self.node.device

    # ---- as of one node ----

    def alloc(self, nbytes: int) -> NodesWindow:
        """A zero-filled window on every rank, joined by an engine. Collective."""
        self.check_open()
        self._allocs += 1
        window = self._here(lambda: self.node.alloc(nbytes))
        sizes = self.all_gather(nbytes)
        if len(set(sizes)) > 1:
            window.close()
            raise LayoutError(f"alloc sizes differ between nodes: {sizes}, in rank order")
        open_engine = importlib.import_module(ENGINES[self.engine]).open_engine
        made = NodesWindow(window, open_engine(self, window, f"{self._key}/window{self._allocs}"))
        self._windows.append(made)
        return made

    def all_gather(self, obj: object) -> list[Any]:
        """Everybody's object, in rank order; pickled. First in the node, then through the store."""
        self.check_open()
        self._gathers += 1
        mine = self._here(lambda: self.node.all_gather(obj))
        prefix = f"{self._key}/gather{self._gathers}"
        deadline = Deadline(self.timeout_s)
        if self.local_rank == 0:
            self._store.set(f"{prefix}/{self.node_number}", pickle.dumps(mine), deadline)
        nodes = self._store.fetch([f"{prefix}/{node}" for node in range(self.num_nodes)], prefix, deadline)
        return [value for text in nodes for value in pickle.loads(text)]

    def barrier(self) -> None:
        self.all_gather(None)

    def exchange_among_counterparts(self, key: str, mine: bytes) -> dict[int, bytes]:
        """By node, what the counterparts gave."""
        deadline = Deadline(self.timeout_s)
        self._store.set(f"{key}/{self.rank}", mine, deadline)
        others = [node for node in range(self.num_nodes) if node != self.node_number]
        found = self._store.fetch([f"{key}/{self.counterpart(node)}" for node in others], key, deadline)
        return dict(zip(others, found, strict=True))

    # ---- errors ----

    def in_all_ranks(self, error: PeerError) -> PeerError:
        """An error of this node's communicator, whose ranks are local, told in the numbers of all."""
        first = self.node_ranks[0]
        peers = [first + peer for peer in error.peers]
        about = f" (about {ranks_text(peers)})" if peers else ""
        text = (
            f"rank {self.rank} of {self.world_size}, on node {self.node_number}{about}: {error} [numbers "
            f"as of "
            f"the node: its rank 0 is rank {first}]"
        )
        if isinstance(error, PeerTimeout):
            return PeerTimeout(text, rank=self.rank, peers=peers, seen=error.seen, wanted=error.wanted)
        return type(error)(text, rank=self.rank, peers=peers)

    def _here(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PeerError as error:
            raise self.in_all_ranks(error) from None

    # ---- life ----

    def check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"rank {self.rank}: this communicator is closed")

    def close(self) -> None:
        """Leave. Local; twice is fine."""
        if self._closed:
            return
        self._closed = True
        for window in self._windows:
            window.close()
        self.node.close()
        register.leave(self._identity)

    def __enter__(self) -> NodesCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _this_host() -> list[Any]:
    """Which kernel and which network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return [file.read().strip(), os.stat("/proc/self/ns/net").st_ino]
