"""The ranks of one crew on this machine, as their station sees them: children of one nest (nest.py).

Nest    starts them all, ends them all, and hears how each has ended
Child   one rank: its commands, its answers, and the last lines of its output
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from mori_tune.tunable import Place

TAIL_LINES = 30
LONGEST_LINE = 4096
PATIENCE_S = 5.0  # for a killed process to be gone


@dataclass(frozen=True)
class Event:
    crew: int
    rank: int | None
    body: Mapping[str, Any]
    station: int = 0


Events = SimpleQueue[Event]


class Forked:
    """A rank's process: a child of the nest, which says its id and how it ended."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.pid: int | None = None  # until it is forked
        self.code: int | None = None
        self.ended = threading.Event()
        for_rank = [os.pipe(), os.pipe(), os.pipe()]
        (commands, stdin), (stdout, output), (answers, replies) = for_rank
        self.fds = (commands, output, replies)  # the nest's ends
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout, "r", errors="replace")
        self.replies = os.fdopen(answers, "r", errors="replace")

    def kill(self) -> None:
        """The process and whatever it started, by the session that it leads."""
        if self.pid is None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)  # also where the rank has ended, and left a child
        except ProcessLookupError:
            if not self.ended.is_set():  # it has yet to lead a session
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)


class Nest:
    """Starts the ranks with this environment, but for what tells them apart."""

    def __init__(self, op: str, places: Sequence[Place], environ: Mapping[str, str]) -> None:
        self.ranks = [Forked(place) for place in places]
        asked = [
            {
                "place": asdict(rank.place),
                "environ": {"RANK": str(rank.place.rank), "LOCAL_RANK": str(rank.place.local_rank)},
                "fds": rank.fds,
            }
            for rank in self.ranks
        ]
        told, tells = os.pipe()
        handed_over = [fd for rank in self.ranks for fd in rank.fds]
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mori_tune.slots.nest"),
                    *(op, str(os.getpid()), str(tells), json.dumps(asked)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self.ranks[0].fds[1],
                stderr=subprocess.STDOUT,
                pass_fds=[tells, *handed_over],
                env=environ,
                start_new_session=True,  # Ctrl-C does not reach it first
            )
        finally:
            for fd in (tells, *handed_over):
                os.close(fd)
        self.listener = threading.Thread(target=self.listen, args=(told,), daemon=True)
        self.listener.start()

    def listen(self, told: int) -> None:
        by_number = {rank.place.rank: rank for rank in self.ranks}
        with os.fdopen(told) as lines:
            for line in lines:
                body = json.loads(line)
                rank = by_number[body["rank"]]
                if "pid" in body:
                    rank.pid = body["pid"]
                else:
                    rank.code = body["code"]
                    rank.ended.set()
        code = self.process.wait()
        for rank in self.ranks:
            if not rank.ended.is_set():  # the nest is gone, and its ranks with it
                rank.code = code or -signal.SIGKILL
                rank.ended.set()

    def end(self) -> None:
        """All ranks and what they started; the nest reaps them, unless it has yet to fork them."""
        if any(rank.pid is None for rank in self.ranks):
            self.process.kill()
        for rank in self.ranks:
            rank.kill()
        self.listener.join(PATIENCE_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Child:
    """One rank's process, with the threads that read its answers and its output."""

    def __init__(self, process: Forked, crew: int, events: Events, *, show: bool) -> None:
        self.process = process
        self.rank = process.place.rank
        self.crew = crew
        self.events = events
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.show = show
        self.output = threading.Thread(target=self.read_output, daemon=True)
        self.output.start()
        self.reader = threading.Thread(target=self.read_replies, daemon=True)
        self.reader.start()
        self.waiter = threading.Thread(target=self.report_death, daemon=True)
        self.waiter.start()

    def read_output(self) -> None:
        for line in iter(lambda: self.process.stdout.readline(LONGEST_LINE), ""):
            self.tail.append(line.rstrip("\n"))
            if self.show:
                print(f"[rank {self.rank}] {line}", end="", file=sys.stderr)

    def read_replies(self) -> None:
        for line in self.process.replies:
            try:
                body = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by the process's end, which is reported below
            self.events.put(Event(self.crew, self.rank, body))

    def report_death(self) -> None:
        """By waiting for the process, not for its pipes: a child that it left behind may hold those open."""
        self.process.ended.wait()
        assert self.process.code is not None
        self.reader.join(0.5)
        self.output.join(0.5)
        self.events.put(
            Event(
                self.crew, self.rank, {"died": how_it_ended(self.process.code), "tail": "\n".join(self.tail)}
            )
        )

    def send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # its death is reported by the reader
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def gone(self) -> None:
        self.waiter.join(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.replies):
            with contextlib.suppress(OSError):
                stream.close()


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"died by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"died by signal {-code}"
