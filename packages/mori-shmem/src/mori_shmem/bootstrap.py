"""Who am I, and where do I meet the others: from torchrun's variables, a process group, or (rank,
world_size, store).

A `Place` is the answer: a rank, a world size, and a store (torch's key-value store) in which each rank can
leave a card for the others. The store is used for that alone; everything after goes over sockets between
the ranks (`rendezvous.py`). Keys are never used twice: they hold the name of the communicator and how many
times this process has made one of that identity, so a communicator made again meets the peers' new one and
no leftovers.

A process has at most one live communicator of an identity (the same ranks, the same store, the same name). A
second `init` of the same identity raises AlreadyInitialised, whatever its other arguments: two owners of one
object would close it under each other. After `close()`, or with another `name`, `init` makes a new one.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mori_shmem.errors import AlreadyInitialised, ArgumentError, PeerTimeout

_HOW = (
    "start the ranks with torchrun or mori_shmem.run_ranks, or pass rank=, world_size= and store=, or pass "
    "group="
)


@dataclass(frozen=True)
class Place:
    """One rank's place among the ranks of a communicator."""

    rank: int
    world_size: int
    store: Any  # torch.distributed.Store
    identity: Hashable
    source: str  # for messages: where rank and store come from


def find_place(
    rank: int | None, world_size: int | None, store: Any, group: Any, name: str, timeout_s: float
) -> Place:
    """The place that the arguments, or else the environment, give this process."""
    explicit = rank is not None or world_size is not None or store is not None
    if group is not None:
        if explicit:
            raise ArgumentError(
                "group= was given together with rank=, world_size= or store=: give one or the other"
            )
        return _from_group(group, name)
    if explicit:
        return _from_arguments(rank, world_size, store, name)
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return _from_group(dist.group.WORLD, name)
    return _from_variables(name, timeout_s)


def _from_arguments(rank: int | None, world_size: int | None, store: Any, name: str) -> Place:
    if rank is None or world_size is None:
        raise ArgumentError(f"rank={rank}, world_size={world_size}: both are needed; {_HOW}")
    _check_rank(rank, world_size, "rank= and world_size=")
    if store is None:
        if world_size > 1:
            raise ArgumentError(f"world_size={world_size} ranks need store= to meet in; {_HOW}")
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        store = HashStore()
        return Place(rank, world_size, store, ("alone", name), "rank=, world_size=")
    return Place(
        rank, world_size, store, ("store", id(store), rank, world_size, name), "rank=, world_size=, store="
    )


def _from_group(group: Any, name: str) -> Place:
    import torch.distributed as dist
    from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"group={group!r} is no process group that this rank is in (new_group gives other ranks a "
            "placeholder)"
        )
    ranks = dist.get_process_group_ranks(group)
    prefix = f"mori_shmem/group/{group.group_name}/{'-'.join(map(str, ranks))}"
    store = PrefixStore(prefix, distributed_c10d._get_default_store())
    identity = ("group", group.group_name, tuple(ranks), name)
    return Place(dist.get_rank(group), len(ranks), store, identity, f"process group of ranks {ranks}")


def _from_variables(name: str, timeout_s: float) -> Place:
    missing = [v for v in ("RANK", "WORLD_SIZE") if v not in os.environ]
    if missing:
        raise ArgumentError(f"{' and '.join(missing)} not set, so this process is no rank: {_HOW}")
    rank, world_size = _whole_number("RANK"), _whole_number("WORLD_SIZE")
    _check_rank(rank, world_size, "RANK and WORLD_SIZE")
    if world_size == 1 and "MASTER_ADDR" not in os.environ:
        return _from_arguments(rank, world_size, None, name)
    missing = [v for v in ("MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    if missing:
        raise ArgumentError(f"{' and '.join(missing)} not set: the ranks cannot meet; {_HOW}")
    store = _store_of_launcher(rank, os.environ["MASTER_ADDR"], _whole_number("MASTER_PORT"), timeout_s)
    return Place(
        rank, world_size, store, ("environment", rank, world_size, name), "RANK, WORLD_SIZE, MASTER_ADDR"
    )


def _whole_number(variable: str) -> int:
    text = os.environ[variable]
    if not text.isdecimal():
        raise ArgumentError(f"{variable}={text!r} is not a whole number; {_HOW}")
    return int(text)


def _check_rank(rank: int, world_size: int, source: str) -> None:
    whole = type(rank) is int and type(world_size) is int
    if not whole or not 0 <= rank < world_size:
        raise ArgumentError(
            f"{source}: rank {rank!r} of {world_size!r} ranks; rank must be in 0..world_size-1"
        )


def _store_of_launcher(rank: int, host: str, port: int, timeout_s: float) -> Any:
    """The store at MASTER_ADDR: the launcher's own where it keeps one (torchrun, run_ranks), else rank 0's.

    It is kept as long as the process lives: rank 0's serves the others even after its communicator is closed.
    multi_tenant shares it with `torch.distributed.init_process_group` of the same process.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    launcher_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # After a restart by torchrun the store still holds the keys of the attempt before.
    attempt = (
        f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )
    where = (host, port)
    with _stores_lock:
        store = _stores.get(where)
        if store is None:
            try:
                store = TCPStore(
                    host,
                    port,
                    is_master=rank == 0 and not launcher_keeps_it,
                    timeout=timedelta(seconds=timeout_s),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
            except Exception as error:
                raise PeerTimeout(
                    f"rank {rank}: no store at MASTER_ADDR={host}, MASTER_PORT={port} within {timeout_s:g} "
                    f"s: {'the launcher' if launcher_keeps_it else 'rank 0'} has not come to init. The "
                    f"limit is timeout_s= or MORI_TIMEOUT_S. torch says: {error}",
                    rank=rank,
                    peers=() if launcher_keeps_it else (0,),
                ) from error
            _stores[where] = store
    return PrefixStore(f"mori_shmem/env/{attempt}", store)


_stores: dict[tuple[str, int], Any] = {}
_stores_lock = threading.Lock()


class Register:
    """The identities of this process's live communicators, and how many have been made of each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[Hashable, Any] = {}  # identity -> store, kept so that its id() is not used again
        self._made: Counter[Hashable] = Counter()

    def enter(self, place: Place, name: str) -> int:
        """Reserve the identity; returns how many communicators of it were tried before."""
        with self._lock:
            if place.identity in self._live:
                raise AlreadyInitialised(
                    f"rank {place.rank}: a communicator for these ranks ({place.source}), name={name!r}, is "
                    "open in this process. Use that one, close() it first, or give this one another name= "
                    "(on all ranks)"
                )
            self._live[place.identity] = place.store
            self._made[place.identity] += 1
            return self._made[place.identity]

    def leave(self, identity: Hashable) -> None:
        with self._lock:
            self._live.pop(identity, None)


register = Register()


def _forget_in_child() -> None:
    """A forked child starts with no communicator and no store of its own."""
    global _stores_lock
    register.__init__()  # type: ignore[misc]
    _stores_lock = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_forget_in_child)
