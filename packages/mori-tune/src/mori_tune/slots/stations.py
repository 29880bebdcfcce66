"""Where ranks live. A station starts and ends the processes of its ranks and passes messages on.

`LocalStation` has them as children on this machine. `AgentStation` talks to an agent on another machine, or
in a container, over a pair of byte streams (the pipes of an ssh command, or a socket under torchrun); the
agent is a LocalStation with those streams for a boss. Both put what happens into one queue:

    Event(crew, rank, {"id": ..., "ok": ..., ...})       an answer
    Event(crew, rank, {"died": "signal 9", "tail": ...})  the process is gone, with its last words
    Event(crew, None, {"lost": "..."})                    the whole station is gone
    Event(crew, None, {"port": ...})                      a free port, for the ranks to meet at

`crew` counts the sets of processes; what an ended set still says is recognised by it and dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Protocol

from mori_tune.slots.children import PATIENCE_S, TAIL_LINES, Child, Event, Events, Nest
from mori_tune.tunable import Place

NOT_FOR_RANKS = ("TORCHELASTIC_", "GROUP_", "ROLE_")  # torchrun's own; a rank is started by us


@dataclass(frozen=True)
class StationPlan:
    """Which ranks a station has, and what it starts them with."""

    op: str
    ranks: tuple[int, ...]
    world_size: int
    backend: str = "auto"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    first_local_rank: int = 0
    show_output: bool = False

    def place(self, rank: int) -> Place:
        local = self.first_local_rank + self.ranks.index(rank)
        return Place(rank, self.world_size, local, self.backend, self.seed, self.options)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StationPlan:
        return cls(**{**values, "ranks": tuple(values["ranks"])})


class Station(Protocol):
    ranks: tuple[int, ...]

    def ask_port(self, crew: int) -> None: ...

    def start(self, crew: int, environ: Mapping[str, str]) -> None: ...

    def send(self, message: Mapping[str, Any]) -> None: ...

    def stop(self) -> None:
        """End this crew's processes, and wait until they are gone."""

    def close(self) -> None: ...


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class LocalStation:
    def __init__(self, plan: StationPlan, events: Events) -> None:
        self.plan = plan
        self.ranks = plan.ranks
        self.events = events
        self.children: list[Child] = []
        self.nest: Nest | None = None

    def ask_port(self, crew: int) -> None:
        self.events.put(Event(crew, None, {"port": free_port()}))

    def start(self, crew: int, environ: Mapping[str, str]) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith(NOT_FOR_RANKS)}
        counts = {"LOCAL_WORLD_SIZE": str(len(self.ranks)), "WORLD_SIZE": str(self.plan.world_size)}
        places = [self.plan.place(rank) for rank in self.ranks]
        if places:
            self.nest = Nest(self.plan.op, places, {"OMP_NUM_THREADS": "1", **base, **environ, **counts})
            self.children = [
                Child(rank, crew, self.events, show=self.plan.show_output) for rank in self.nest.ranks
            ]

    def send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message) + "\n"
        for child in self.children:
            child.send(line)

    def stop(self) -> None:
        if self.nest is not None:
            self.nest.end()
        for child in self.children:
            child.gone()
        self.children.clear()
        self.nest = None

    def close(self) -> None:
        self.stop()


class AgentStation:
    """A station behind two byte streams. `process` is what carries them (ssh, docker), if anything does."""

    def __init__(
        self,
        plan: StationPlan,
        events: Events,
        reads: IO[str],
        writes: IO[str],
        *,
        name: str,
        index: int = 0,
        process: subprocess.Popen[str] | None = None,
        hang_up: Callable[[], None] | None = None,
    ) -> None:
        self.ranks = plan.ranks
        self.events = events
        self.name = name
        self.index = index
        self.reads, self.writes = reads, writes
        self.process = process
        self.hang_up = hang_up or writes.close
        self.closing = False
        self.gone = False
        self.stopped = threading.Event()
        self.tell({"do": "plan", "plan": plan.as_dict()})
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        noise: deque[str] = deque(maxlen=TAIL_LINES)
        with contextlib.suppress(OSError, ValueError):
            for line in self.reads:
                try:
                    body = json.loads(line)
                    crew, rank, content = body["crew"], body["rank"], body["body"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    noise.append(line.rstrip("\n"))  # a login banner, or why the agent could not start
                    continue
                if content.get("stopped"):
                    self.stopped.set()
                else:
                    self.events.put(Event(crew, rank, content))
        if not self.closing:
            code = "" if self.process is None else f", exit status {self.process.wait()}"
            said = "; it said: " + " | ".join(noise) if noise else ""
            self.events.put(Event(-1, None, {"lost": f"{self.name}{code}{said}"}, self.index))
        self.gone = True
        self.stopped.set()

    def tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader reports the loss
            self.writes.write(json.dumps(message) + "\n")
            self.writes.flush()

    def ask_port(self, crew: int) -> None:
        self.tell({"do": "port", "crew": crew})

    def start(self, crew: int, environ: Mapping[str, str]) -> None:
        self.tell({"do": "start", "crew": crew, "environ": dict(environ)})

    def send(self, message: Mapping[str, Any]) -> None:
        self.tell({"do": "send", "message": message})

    def stop(self) -> None:
        self.stopped.clear()
        self.tell({"do": "stop"})
        if not self.gone:
            self.stopped.wait(2 * PATIENCE_S)

    def close(self) -> None:
        """The agent ends its ranks when its input ends: nothing is ever killed by name on another machine."""
        self.closing = True
        with contextlib.suppress(OSError, ValueError):
            self.hang_up()
        if self.process is not None:
            deadline = time.monotonic() + 2 * PATIENCE_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.1, deadline - time.monotonic()))
            if self.process.poll() is None:
                self.process.kill()  # our own ssh or docker client, by its id
                self.process.wait()
