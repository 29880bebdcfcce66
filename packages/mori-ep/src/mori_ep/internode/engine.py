"""What carries bytes from one node's window to another's: four verbs.

    put_signal   copy a run of my part of the window to the same window's part of a counterpart on another
                 node, then set a word there. Does not wait. The bytes may be overwritten after `quiet`
    progress     let the engine work, and note who has gone. Every wait calls it: a rank that only waits must
                 still serve those that send to it
    wait         sleep until a word of my part is >= a value, for at most the deadline
    quiet        wait until all puts of mine are done

Words are 64-bit, written by one counterpart for one purpose, and only grow. What a put brought is visible to
whoever has seen its word. Puts are not ordered among each other.

Peers are numbered by node here: a counterpart is "the rank of node n". One that has closed its end has
"left", which concerns only who still waits for it; one whose process or connection ended otherwise has
"died", which ends every wait. Either way a value that has come counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mori_shmem.deadline import Deadline
from mori_shmem.errors import PeerDied, PeerError, PeerTimeout, TransportInert
from mori_shmem.rendezvous import ranks_text

if TYPE_CHECKING:
    import mori_shmem

    from mori_ep.internode.comm import NodesCommunicator

ENGINES = {"nixl": "mori_ep.internode.nixl", "gloo": "mori_ep.internode.gloo"}


class Gone(NamedTuple):
    """Why nothing more will come from a counterpart."""

    how: str
    died: bool


class Engine(Protocol):
    """One per window. Made by `open_engine` of its module; collective."""

    longest_nap_s: float  # how long a wait may sleep before it must call progress again
    gone: dict[int, Gone]  # by node

    def put_signal(self, node: int, to: int, source: int, nbytes: int, word: int, value: int) -> None:
        """`nbytes` at offset `source` of my part to offset `to` there (0: no bytes), then `word` there."""

    def progress(self) -> None: ...

    def ask(self, node: int) -> None:
        """Find out whether a counterpart that is waited for is still there; progress will tell."""

    def quiet(self, deadline: Deadline) -> None:
        """Puts to who has left need not be waited for: it had what it wanted."""

    def close(self) -> None:
        """Tell the counterparts that this rank leaves. Local; twice is fine."""


class Waits:
    """The waits of one window: for words of other nodes and for flags of this one, all with progress."""

    def __init__(self, comm: NodesCommunicator, window: mori_shmem.Window, engine: Engine) -> None:
        self._comm, self._window, self._engine = comm, window, engine
        self._naps = _naps(engine.longest_nap_s)

    def for_word(self, node: int, word: int, value: int, what: str) -> int:
        """Until the word of my part that the counterpart on `node` writes is >= value; what was seen."""
        comm, where = self._comm, self._window.at(word)

        def look(nap_s: float) -> int:
            return comm.node.wait(where, value, timeout_s=nap_s)

        try:
            return self._until(look, node)
        except PeerTimeout as error:
            peer = comm.counterpart(node)
            raise PeerTimeout(
                f"rank {comm.rank} of {comm.world_size}, in wait for {what} from rank {peer} on node {node}: "
                f"waited {comm.timeout_s:g} s (the limit is timeout_s=, or MORI_TIMEOUT_S in the "
                f"environment) for "
                f"a word >= {value}; it is {comm.node.read(where)}. The rank is late, or the network is down",
                rank=comm.rank,
                peers=[peer],
                seen=error.seen,
                wanted=value,
            ) from None

    def for_node(self, words: mori_shmem.words.Words, value: int, what: str) -> None:
        """Until these words, which ranks of this node write, are >= value."""

        def look(nap_s: float) -> int:
            words.wait(value, what=what, timeout_s=nap_s)
            return value

        self._until(look, None)

    def _lost(self, awaited: int | None) -> PeerDied | None:
        """Whom this wait cannot do without."""
        for node, why in list(self._engine.gone.items()):
            if why.died or node == awaited:
                return gone(self._comm, node, why)
        return None

    def _until(self, look: Callable[[float], int], node: int | None) -> int:
        """Call `look` with growing naps, and progress between them."""
        comm, deadline, asked_s = self._comm, Deadline(self._comm.timeout_s), time.monotonic()
        attempt = 0
        while True:
            self._engine.progress()
            lost = self._lost(node)  # noted before the look: what was sent before it left is there
            nap_s = self._naps[min(attempt, len(self._naps) - 1)]
            try:
                return look(min(nap_s, max(deadline.left_s(), 1e-4)))
            except PeerTimeout as error:
                if lost is not None:
                    raise lost from None
                if deadline.passed():
                    raise comm.in_all_ranks(error) from None
            except PeerError as error:
                raise comm.in_all_ranks(error) from None
            attempt += 1
            if node is not None and time.monotonic() - asked_s > 0.5:
                asked_s = time.monotonic()
                self._engine.ask(node)


def _naps(longest_s: float) -> list[float]:
    """From 0.1 ms up, doubling: ranks may be more than cores, and whoever waits gives way."""
    naps, nap_s = [], 1e-4
    while nap_s < longest_s:
        naps.append(nap_s)
        nap_s *= 2
    return [*naps, longest_s]


LEFT = Gone("left (closed this op or its communicator)", died=False)


def broken(error: BaseException) -> Gone:
    """A connection that ended without a goodbye."""
    said = (str(error).strip().splitlines() or [""])[0]
    return Gone(f"died, or its connection broke: {type(error).__name__} {said}".rstrip(), died=True)


def gone(comm: NodesCommunicator, node: int, why: Gone) -> PeerDied:
    peer = comm.counterpart(node)
    return PeerDied(
        f"rank {comm.rank} of {comm.world_size}: rank {peer} on node {node} {why.how}",
        rank=comm.rank,
        peers=[peer],
    )


def not_taken(comm: NodesCommunicator, nodes: Iterable[int], deadline: Deadline) -> PeerTimeout:
    peers = [comm.counterpart(node) for node in sorted(set(nodes))]
    return PeerTimeout(
        f"rank {comm.rank} of {comm.world_size}: puts to {ranks_text(peers)} on other nodes were not taken "
        f"within "
        f"{deadline}: the ranks are late, or the network is down",
        rank=comm.rank,
        peers=peers,
    )


def missing(engine: str, package: str, error: BaseException) -> TransportInert:
    return TransportInert(
        f"engine {engine!r} needs {package}, which does not load here ({error}): install "
        f"mori-ep[internode], or "
        "choose the engine by name: internode.join(engine='gloo'), MORI_EP_INTERNODE_ENGINE=gloo"
    )
