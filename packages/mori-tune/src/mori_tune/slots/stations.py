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
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import IO, Any, Protocol

from mori_tune.tunable import Place

TAIL_LINES = 30
LONGEST_LINE = 4096
PATIENCE_S = 5.0  # for a killed process to be gone
NOT_FOR_RANKS = ("TORCHELASTIC_", "GROUP_", "ROLE_")  # torchrun's own; a rank is started by us


@dataclass(frozen=True)
class Event:
    crew: int
    rank: int | None
    body: Mapping[str, Any]
    station: int = 0


Events = SimpleQueue[Event]


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


class Child:
    """One rank's process, with the threads that read its answers and its output."""

    def __init__(
        self, plan: StationPlan, rank: int, crew: int, environ: Mapping[str, str], events: Events
    ) -> None:
        self.rank = rank
        self.crew = crew
        self.events = events
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.show = plan.show_output
        reads, writes = os.pipe()
        place = json.dumps(asdict(plan.place(rank)))
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "mori_tune.slots.worker",
                    plan.op,
                    str(writes),
                    str(os.getpid()),
                    place,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[writes],
                env=environ,
                start_new_session=True,  # its own children end with it, and Ctrl-C does not reach it first
                text=True,
                errors="replace",
            )
        finally:
            os.close(writes)
        self.replies = os.fdopen(reads, "r", errors="replace")
        self.output = threading.Thread(target=self.read_output, daemon=True)
        self.output.start()
        self.reader = threading.Thread(target=self.read_replies, daemon=True)
        self.reader.start()
        self.waiter = threading.Thread(target=self.report_death, daemon=True)
        self.waiter.start()

    def read_output(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        for line in iter(lambda: stdout.readline(LONGEST_LINE), ""):
            self.tail.append(line.rstrip("\n"))
            if self.show:
                print(f"[rank {self.rank}] {line}", end="", file=sys.stderr)

    def read_replies(self) -> None:
        for line in self.replies:
            try:
                body = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by the process's end, which is reported below
            self.events.put(Event(self.crew, self.rank, body))

    def report_death(self) -> None:
        """By waiting for the process, not for its pipes: a child that it left behind may hold those open."""
        code = self.process.wait()
        self.reader.join(0.5)
        self.output.join(0.5)
        self.events.put(
            Event(self.crew, self.rank, {"died": how_it_ended(code), "tail": "\n".join(self.tail)})
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its death is reported by the reader
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def kill(self) -> None:
        """The process and whatever it started, by the session that was made for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def gone(self) -> None:
        self.waiter.join(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout, self.replies):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"died by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"died by signal {-code}"


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

    def ask_port(self, crew: int) -> None:
        self.events.put(Event(crew, None, {"port": free_port()}))

    def start(self, crew: int, environ: Mapping[str, str]) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith(NOT_FOR_RANKS)}
        for rank in self.ranks:
            place = self.plan.place(rank)
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(place.local_rank),
                "LOCAL_WORLD_SIZE": str(len(self.ranks)),
                "WORLD_SIZE": str(self.plan.world_size),
            }
            full = {"OMP_NUM_THREADS": "1", **base, **environ, **own}
            self.children.append(Child(self.plan, rank, crew, full, self.events))

    def send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message) + "\n"
        for child in self.children:
            child.send(line)

    def stop(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.gone()
        self.children.clear()

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
