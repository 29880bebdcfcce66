"""Under torchrun, which has started one process for each rank: rank 0 decides, the others are agents for it.

Every process keeps the rank it was given and tries candidates in a child, since a candidate may kill or
hang the process it runs in. The agents find rank 0 at MASTER_ADDR, on a port near MASTER_PORT (which itself
belongs to torchrun), and are known by a word made from the run's own variables.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import itertools
import socket
import time
from collections.abc import Mapping

from mori_tune.errors import LaunchError
from mori_tune.slots.agent import serve
from mori_tune.slots.children import Events
from mori_tune.slots.stations import AgentStation, LocalStation, Station, StationPlan

NUM_PORTS = 20
MEETING_LIMIT_S = 120.0


def is_under_torchrun(environ: Mapping[str, str]) -> bool:
    return all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def ports(environ: Mapping[str, str]) -> range:
    first = int(environ["MASTER_PORT"]) + 1
    return range(first, min(first + NUM_PORTS, 65536))


def password(environ: Mapping[str, str]) -> str:
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    return hashlib.sha256("|".join(environ.get(name, "") for name in names).encode()).hexdigest()[:32]


def local_rank(environ: Mapping[str, str]) -> int:
    return int(environ.get("LOCAL_RANK", environ["RANK"]))


def gather_agents(
    plan: StationPlan, events: Events, environ: Mapping[str, str], limit_s: float = MEETING_LIMIT_S
) -> list[Station]:
    """On rank 0: a station for each rank, its own first; LaunchError naming the ranks that did not come."""
    world_size = int(environ["WORLD_SIZE"])
    own = StationPlan(**{**plan.__dict__, "ranks": (0,), "first_local_rank": local_rank(environ)})
    stations: dict[int, Station] = {0: LocalStation(own, events)}
    deadline = time.monotonic() + limit_s
    with listen(environ) as listener:
        while len(stations) < world_size:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [r for r in range(world_size) if r not in stations]
                raise LaunchError(f"ranks {missing} did not come within {limit_s:.0f} s") from None
            connection.settimeout(10.0)
            reads = connection.makefile("r")
            try:
                word, rank, local = reads.readline().split()
            except (OSError, ValueError):
                connection.close()
                continue
            known = hmac.compare_digest(word, password(environ))
            if not known or int(rank) in stations or int(rank) not in range(world_size):
                connection.close()  # another run's
                continue
            connection.settimeout(None)
            theirs = StationPlan(**{**plan.__dict__, "ranks": (int(rank),), "first_local_rank": int(local)})
            writes = connection.makefile("w")
            name = f"rank {rank} of torchrun"
            hang_up = functools.partial(connection.shutdown, socket.SHUT_RDWR)
            stations[int(rank)] = AgentStation(theirs, events, reads, writes, name=name, hang_up=hang_up)
    return [stations[rank] for rank in sorted(stations)]


def listen(environ: Mapping[str, str]) -> socket.socket:
    """Reachable from this machine alone where all ranks are on it."""
    address = "127.0.0.1" if environ["MASTER_ADDR"] in ("127.0.0.1", "localhost") else ""
    for port in ports(environ):
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), backlog=128)
    raise LaunchError(f"no free port in {ports(environ)} for the ranks to meet at")


def be_an_agent(environ: Mapping[str, str], limit_s: float = MEETING_LIMIT_S) -> None:
    """On every other rank: serve rank 0 until it is done."""
    deadline = time.monotonic() + limit_s
    hello = f"{password(environ)} {environ['RANK']} {local_rank(environ)}\n"
    while time.monotonic() < deadline:
        for port in ports(environ):
            try:
                connection = socket.create_connection((environ["MASTER_ADDR"], port), timeout=10.0)
            except OSError:
                continue
            with connection, connection.makefile("r") as reads, connection.makefile("w") as writes:
                writes.write(hello)
                writes.flush()
                with contextlib.suppress(OSError):
                    first = reads.readline()
                    connection.settimeout(None)
                    if first:
                        serve(itertools.chain([first], reads), writes)
                        return
        time.sleep(0.2)
    raise LaunchError(f"rank {environ['RANK']}: no rank 0 at {environ['MASTER_ADDR']} ports {ports(environ)}")
