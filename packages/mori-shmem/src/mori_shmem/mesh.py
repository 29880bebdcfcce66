"""Small messages between all ranks over one socket per pair: how ranks agree on things and hand over
descriptors. A receiver that may hold no more of them gets fewer than were sent (descriptors.py).

There is one operation, `exchange`: every rank gives one object (and descriptors), every rank gets all of
them. It is collective, so each message is tagged with what it is for and a running number; ranks that meet
in different calls are told so instead of waiting for each other.

On the wire: 16 bytes of header (length of the pickle, number of descriptors, leaving or not), the pickle,
and the descriptors attached to the header. A rank that closes says so; a socket that ends without that
word, or a readable pidfd, means that the peer's process died.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from mori_shmem import descriptors
from mori_shmem.deadline import Deadline
from mori_shmem.errors import ClosedError, CollectiveMismatch, MoriError, PeerDied, PeerTimeout
from mori_shmem.rendezvous import ranks_text

_HEADER = struct.Struct("<QII")  # bytes of the pickle, number of descriptors, 1 for "I am leaving"
_MAX_FDS = 250  # the kernel passes at most 253
_CROWDED_S = 0.001  # pause while too many descriptors of this user are under way; receivers take them out


class Message(NamedTuple):
    """What one rank gave in an exchange."""

    value: Any
    fds: list[int]  # owned by the receiver
    num_fds: int  # so many were sent: `descriptors.check_all_came`


class Mesh:
    """The sockets of one rank to its peers."""

    def __init__(self, rank: int, world_size: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._sockets = sockets
        self._lock = threading.Lock()
        self.pidfds: dict[int, int] = {}  # of the peers' processes, once known; owned by this mesh
        self._gone: dict[int, str] = {}  # peers that can take part in nothing any more, and why
        self._sequence = 0
        self._torn = False  # an exchange ended in the middle of a message: the next bytes make no sense
        self._closed = False
        for sock in sockets.values():
            sock.setblocking(False)

    def exchange(
        self, kind: str, value: object, deadline: Deadline, fds: Sequence[int] = ()
    ) -> list[Message]:
        """Collective: everybody's value and descriptors, in rank order. `kind` must be equal on all ranks."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{kind}: the communicator is closed")
            self._raise_if_gone(kind)
            if self._torn:
                raise CollectiveMismatch(
                    f"rank {self.rank}, in {kind}: an earlier collective call was broken off in the middle "
                    "of a message; make a new communicator"
                )
            self._sequence += 1
            tag = (kind, self._sequence)
            flows = {peer: _Flow(sock) for peer, sock in self._sockets.items()}
            try:
                data = pickle.dumps((tag, value))
                for flow in flows.values():
                    flow.send(data, fds)
                self._run(kind, flows, deadline)
                return self._in_rank_order(tag, value, fds, flows)
            except BaseException:
                self._torn = self._torn or any(flow.is_torn for flow in flows.values())
                for flow in flows.values():
                    flow.drop_fds()
                raise

    def _run(self, kind: str, flows: dict[int, _Flow], deadline: Deadline) -> None:
        """Move bytes until every flow is done, all at once: no order of ranks in which two could wait for
        each other."""
        poll = select.poll()
        by_fd = {}
        for peer, flow in flows.items():
            by_fd[flow.sock.fileno()] = flow
            poll.register(flow.sock, select.POLLIN | select.POLLOUT)
            if peer in self.pidfds:  # a child that the peer forked may hold its socket open
                by_fd[self.pidfds[peer]] = flow
                poll.register(self.pidfds[peer], select.POLLIN)
        while not all(flow.done for flow in flows.values()):
            ready = poll.poll(max(deadline.left_s(), 0.0) * 1000 + 1)
            for fd, events in ready:
                flow = by_fd[fd]
                flow.advance(events)
                if fd != flow.sock.fileno():
                    flow.ended = True
                    poll.unregister(fd)
                elif flow.done:
                    poll.unregister(fd)
                elif flow.sent:
                    poll.modify(fd, select.POLLIN)
            for peer, flow in flows.items():
                if not flow.received and (flow.left or flow.ended):
                    self._gone[peer] = "left (closed the communicator)" if flow.left else "died"
            self._raise_if_gone(kind)
            crowded = any(flow.crowded for flow in flows.values())  # a socket that is ready all the time
            if (crowded or not ready) and deadline.passed():
                raise self._late(kind, flows, deadline)

    def _raise_if_gone(self, kind: str) -> None:
        if self._gone:
            how = "died" if "died" in self._gone.values() else next(iter(self._gone.values()))
            peers = sorted(peer for peer in self._gone if self._gone[peer] == how)
            raise PeerDied(
                f"rank {self.rank} of {self.world_size}, in {kind}: {ranks_text(peers)} {how}",
                rank=self.rank,
                peers=peers,
            )

    def _late(self, kind: str, flows: dict[int, _Flow], deadline: Deadline) -> MoriError:
        if any(flow.crowded for flow in flows.values()):
            return descriptors.limit_error(
                f"rank {self.rank} of {self.world_size}, in {kind}",
                f"the kernel took no message with descriptors within {deadline}, since too many of this "
                "user's are under way",
            )
        missing = [peer for peer, flow in flows.items() if not flow.received]
        return PeerTimeout(
            f"rank {self.rank} of {self.world_size}, in {kind} (collective {self._sequence}): "
            f"{ranks_text(missing or list(flows))} did not come within {deadline}. It is a collective call: "
            "every rank must make it",
            rank=self.rank,
            peers=missing,
        )

    def _in_rank_order(
        self, tag: tuple[str, int], value: object, fds: Sequence[int], flows: dict[int, _Flow]
    ) -> list[Message]:
        values = {self.rank: value}
        for rank, flow in flows.items():
            their_tag, values[rank] = pickle.loads(flow.body)
            if their_tag != tag:
                raise CollectiveMismatch(
                    f"rank {self.rank} is in {tag[0]} (collective {tag[1]}), rank {rank} in {their_tag[0]} "
                    f"(collective {their_tag[1]}): all ranks must make the same collective calls in the same "
                    "order"
                )
        received = {rank: (flow.fds, flow.num_fds) for rank, flow in flows.items()}
        received[self.rank] = _own_copies(fds), len(fds)
        return [Message(values[rank], *received[rank]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Tell the peers that this rank leaves, and hang up. Twice is fine."""
        with self._lock:
            self._closed = True
            for sock in self._sockets.values():
                with contextlib.suppress(OSError):
                    sock.send(_HEADER.pack(0, 0, 1))
                sock.close()
            for pidfd in self.pidfds.values():
                os.close(pidfd)
            self._sockets, self.pidfds = {}, {}

    def forget(self) -> None:
        """In a forked child: drop our copies of the sockets, so that the parent's end is the end."""
        self._lock = threading.Lock()
        self._closed = True
        for sock in self._sockets.values():
            sock.close()


def _own_copies(fds: Sequence[int]) -> list[int]:
    """As many as this process may have, as of the peers' descriptors."""
    copies: list[int] = []
    with contextlib.suppress(OSError):
        for fd in fds:
            copies.append(os.dup(fd))
    return copies


class _Flow:
    """One message out and one message in, over one socket that never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []
        self.left = False  # the peer said that it leaves
        self.ended = False  # the peer's end is closed
        self.crowded = False  # the last try to send met the kernel's limit of descriptors under way
        self.broken = False  # nothing can be sent any more; what the peer sent before may still be there
        self._header = bytearray()
        self._body = bytearray()
        self._out = memoryview(b"")
        self._out_fds: Sequence[int] = ()
        self._started = False  # some of `_out` is sent

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        self._out = memoryview(_HEADER.pack(len(data), len(fds), 0) + data)
        self._out_fds = fds

    @property
    def sent(self) -> bool:
        return not self._out

    @property
    def received(self) -> bool:
        complete = len(self._header) == _HEADER.size and len(self._body) == self._expected[0]
        return complete and not self.left

    @property
    def is_torn(self) -> bool:
        """Whether a message is under way in either direction."""
        began = bool(self._header) and not self.received
        return began or (not self.sent and self._started)

    @property
    def done(self) -> bool:
        return self.received and (self.sent or self.broken)

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    @property
    def num_fds(self) -> int:
        """How many descriptors the peer sent."""
        return self._expected[1]

    @property
    def _expected(self) -> tuple[int, int, int]:
        return _HEADER.unpack(self._header)

    def advance(self, events: int) -> None:
        """Move what can be moved now."""
        if events & select.POLLOUT and not self.sent:
            self._push()
        if events & ~select.POLLOUT and not self.received:
            self._pull()

    def _push(self) -> None:
        try:
            while self._out:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._out_fds))]
                n = self.sock.sendmsg([self._out[: 1 << 20]], rights if self._out_fds else [])
                self._out, self._out_fds, self._started = self._out[n:], (), True
                self.crowded = False
        except BlockingIOError:
            self.crowded = False
        except OSError as error:
            self.crowded = error.errno == errno.ETOOMANYREFS
            if self.crowded:
                time.sleep(_CROWDED_S)
            else:
                self.broken, self._out = True, memoryview(b"")

    def _pull(self) -> None:
        try:
            while not self.received and not self.left:
                if len(self._header) < _HEADER.size:
                    self._pull_header()
                else:
                    self._add(self._body, self.sock.recv(min(self._expected[0] - len(self._body), 1 << 20)))
        except BlockingIOError:
            pass
        except (EOFError, ConnectionError):
            self.ended = True

    def _pull_header(self) -> None:
        data, fds, _, _ = socket.recv_fds(
            self.sock, _HEADER.size - len(self._header), _MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )
        self.fds += fds
        self._add(self._header, data)
        if len(self._header) == _HEADER.size and self._expected[2]:
            self.left = True

    @staticmethod
    def _add(to: bytearray, data: bytes) -> None:
        if not data:
            raise EOFError
        to += data

    def drop_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []
