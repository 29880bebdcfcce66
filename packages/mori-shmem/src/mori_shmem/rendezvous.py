"""From a store to a full mesh of sockets between the ranks of one machine.

  1. Each rank listens on a socket with a random name in Linux's abstract namespace (nothing appears in a
     file system, the name dies with the process) and leaves a card in the store: that name, a secret token,
     its pid and which machine it is on. A rank that sees it may hold too few descriptors for all this says
     so on its card, and the others need not wait for it.
  2. Each rank waits for all cards. At the deadline the ranks without a card are named.
  3. Each rank connects to the ranks below it and accepts those above it. The caller says the token of the
     called, and the kernel says the caller's user id: other users of the machine are turned away.

The result is one connected socket per peer; `mesh.py` speaks over them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import asdict, dataclass

from mori_shmem import descriptors
from mori_shmem.bootstrap import Place
from mori_shmem.deadline import Deadline
from mori_shmem.errors import ArgumentError, DescriptorLimitError, PeerDied, PeerTimeout, TransportInert

_HELLO = struct.Struct("<32sI")  # token, rank of the caller
_POLL_S = (0.001, 0.02)  # first and longest pause between looks into the store


@dataclass(frozen=True)
class Card:
    """What a rank tells the others through the store."""

    address: str  # of its listening socket, without the leading zero byte
    token: str
    pid: int
    host: str  # same text: same kernel and same network namespace
    hostname: str
    world_size: int
    refusal: str = ""  # why this rank will not come


def meet(place: Place, key: str, deadline: Deadline) -> dict[int, socket.socket]:
    """A connected socket for each peer. `key` is this communicator's own part of the store."""
    _check_room(place, key)
    address = f"mori-shmem-{secrets.token_hex(12)}"
    token = secrets.token_hex(16)
    host, hostname = _this_host()
    card = Card(address, token, os.getpid(), host, hostname, place.world_size)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address)
        listener.listen(place.world_size)
        cards = _exchange_cards(place, key, card, deadline)
        _check_cards(place, cards)
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in range(place.rank):
                sockets[peer] = _call(place, peer, cards[peer], deadline)
            _accept_all(place, listener, token, sockets, deadline)
        except BaseException:
            for sock in sockets.values():
                sock.close()
            raise
    return sockets


def _check_room(place: Place, key: str) -> None:
    """Raise, and leave word of it, if this process may not hold what is to come."""
    who = f"rank {place.rank} of {place.world_size}, in init"
    try:
        descriptors.check_room(who, descriptors.needed_by_init(place.world_size))
    except DescriptorLimitError as error:
        _leave_card(place, key, Card("", "", os.getpid(), "", "", place.world_size, refusal=str(error)))
        raise


def _this_host() -> tuple[str, str]:
    """Two processes can share memory and abstract sockets if kernel and network namespace are the same."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}", socket.gethostname()


def _leave_card(place: Place, prefix: str, card: Card) -> None:
    place.store.set(f"{prefix}/{place.rank}", json.dumps(asdict(card)))


def _exchange_cards(place: Place, prefix: str, mine: Card, deadline: Deadline) -> list[Card]:
    """Publish my card and wait for all. Looks with pauses: a blocking wait would hold the store's lock, and
    with it the other threads of this process that make communicators over the same store."""
    keys = [f"{prefix}/{rank}" for rank in range(place.world_size)]
    _leave_card(place, prefix, mine)
    pause_s, longest_s = _POLL_S
    while not place.store.check(keys):
        if deadline.passed():
            missing = [rank for rank, key in enumerate(keys) if not place.store.check([key])]
            if missing:
                raise PeerTimeout(
                    f"rank {place.rank} of {place.world_size}: {ranks_text(missing)} did not come to the "
                    f"rendezvous of init (ranks from {place.source}) within {deadline}. Is every rank "
                    "started, and does each call init as often as the others?",
                    rank=place.rank,
                    peers=missing,
                )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return [Card(**json.loads(place.store.get(key))) for key in keys]


def _check_cards(place: Place, cards: list[Card]) -> None:
    mine = cards[place.rank]
    for rank, card in enumerate(cards):
        if card.refusal:
            raise DescriptorLimitError(f"rank {rank} cannot take part: {card.refusal}")
        if card.world_size != place.world_size:
            raise ArgumentError(
                f"rank {place.rank} was given world_size={place.world_size}, rank {rank} {card.world_size}: "
                "all ranks of a communicator must be given the same"
            )
        if card.host != mine.host:
            raise TransportInert(
                f"rank {rank} runs on {card.hostname}, rank {place.rank} on {mine.hostname} (other kernel or "
                "network namespace): the host backend shares memory and so joins the processes of one "
                "machine only. Make one communicator for the ranks of each machine (group= or store=)"
            )


def _call(place: Place, peer: int, card: Card, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            try:
                sock.settimeout(max(deadline.left_s(), 0.001))
                sock.connect("\0" + card.address)
                break
            except BlockingIOError:  # its backlog is full for the moment
                if deadline.passed():
                    raise _late(place, [peer], deadline) from None
                time.sleep(0.001)
        _check_user(sock, f"rank {peer}")
        sock.sendall(_HELLO.pack(card.token.encode(), place.rank))
        return sock
    except (ConnectionError, TimeoutError) as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise _late(place, [peer], deadline) from error
        raise _gone(place, peer, card.pid) from error
    except BaseException:
        sock.close()
        raise


def _accept_all(
    place: Place, listener: socket.socket, token: str, sockets: dict[int, socket.socket], deadline: Deadline
) -> None:
    """Accept the ranks above mine; meanwhile notice a connected peer that goes away again."""
    above = set(range(place.rank + 1, place.world_size))
    while missing := above - sockets.keys():
        ready = _readable([listener, *sockets.values()], deadline.left_s())
        if not ready:
            raise _late(place, sorted(missing), deadline)
        for peer, sock in list(sockets.items()):
            if sock in ready and _is_closed(sock):
                raise _gone(place, peer, None)
        if listener in ready:
            caller, _ = listener.accept()
            peer = _identify(caller, token, deadline)
            if peer in missing:
                sockets[peer] = caller
            else:
                caller.close()  # a stranger, or a rank that we know already


def _identify(caller: socket.socket, token: str, deadline: Deadline) -> int:
    """The caller's rank if it knows the token and is our user, else -1."""
    try:
        _check_user(caller, "a caller")
        caller.settimeout(max(min(deadline.left_s(), 5.0), 0.001))
        said, rank = _HELLO.unpack(caller.recv(_HELLO.size, socket.MSG_WAITALL))
    except (OSError, struct.error, TransportInert):
        return -1
    return rank if secrets.compare_digest(said, token.encode()) else -1


def _check_user(sock: socket.socket, who: str) -> None:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise TransportInert(
            f"{who} runs as user {uid}, this rank as {os.getuid()}: ranks share one user's memory"
        )


def _readable(sockets: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    poll = select.poll()
    by_fd = {sock.fileno(): sock for sock in sockets}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(max(timeout_s, 0.0) * 1000)]


def _is_closed(sock: socket.socket) -> bool:
    """Whether the other end is closed. A peer that is ahead of us may have sent something already: that is
    fine."""
    with contextlib.suppress(BlockingIOError):
        try:
            return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as error:
            return error.errno == errno.ECONNRESET
    return False


def _late(place: Place, peers: list[int], deadline: Deadline) -> PeerTimeout:
    return PeerTimeout(
        f"rank {place.rank} of {place.world_size}: {ranks_text(peers)} came to the rendezvous of init but "
        f"made no connection within {deadline}",
        rank=place.rank,
        peers=peers,
    )


def _gone(place: Place, peer: int, pid: int | None) -> PeerDied:
    process = "" if pid is None else f" (pid {pid})"
    return PeerDied(
        f"rank {place.rank} of {place.world_size}: rank {peer}{process} came to the rendezvous of init and "
        "is gone: its process ended, or its init failed",
        rank=place.rank,
        peers=[peer],
    )


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """ "rank 2", or "ranks 2, 5 and 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
