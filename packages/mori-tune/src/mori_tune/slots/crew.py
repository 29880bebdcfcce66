"""A crew: one process for each rank, which try candidates together, and are replaced when one goes wrong.

A question goes to all ranks, and all must answer within the limit. The first rank that fails decides: its
peers, which may now wait for it for ever, get a moment to say their own and are then ended. So a candidate
that raises, dies, hangs or is wrong costs its own slot and a start, never the sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty
from typing import Any

from mori_tune.errors import LaunchError
from mori_tune.search.samples import Failure
from mori_tune.slots.children import Events
from mori_tune.slots.stations import Station

GRACE_S = 1.0  # after the first failure, for the others to say what they saw
START_LIMIT_S = 180.0  # imports, contexts, rendezvous


class CrewFailure(Exception):
    """A question that not every rank answered well; the crew has been ended unless all ranks refused."""

    def __init__(self, failure: Failure, tail: str = "") -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.tail = tail


class Crew:
    def __init__(
        self,
        stations: Sequence[Station],
        events: Events,
        *,
        master_addr: str = "127.0.0.1",
        environ: Mapping[str, str] | None = None,
        start_limit_s: float = START_LIMIT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stations = stations
        self.events = events
        self.master_addr = master_addr
        self.environ = dict(environ or {})
        self.start_limit_s = start_limit_s
        self.now = now
        self.number = 0  # of this set of processes
        self.running = False
        self.proven = False  # compared with another set of processes, and not the slow one
        self.num_asked = 0
        self.dead: dict[int, Mapping[str, Any]] = {}
        self.world_size = sum(len(station.ranks) for station in stations)

    def start(self) -> None:
        """New processes for all ranks; LaunchError if a station is lost."""
        self.stop()
        self.number += 1
        self.proven = False
        self.dead.clear()
        first = next(s for s in self.stations if 0 in s.ranks)
        first.ask_port(self.number)
        port = self.wait_for_port()
        environ = {**self.environ, "MASTER_ADDR": self.master_addr, "MASTER_PORT": str(port)}
        self.running = True
        for station in self.stations:
            station.start(self.number, environ)

    def stop(self) -> None:
        if self.running:
            self.running = False
            for station in self.stations:
                station.stop()

    def close(self) -> None:
        self.running = False
        for station in self.stations:
            station.close()

    def ask(self, question: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order; CrewFailure with the cause if one is missing or bad."""
        self.num_asked += 1
        for station in self.stations:
            station.send({"id": self.num_asked, **question})
        answers = self.collect(self.now() + limit_s)
        failure = judge(answers, self.world_size, limit_s)
        if failure is None:
            return [dict(answers[rank]["body"]) for rank in range(self.world_size)]
        all_refused = len(answers) == self.world_size and all(
            a.get("kind") == "refused" for a in answers.values()
        )
        if not all_refused:
            self.stop()
        raise CrewFailure(failure, str(answers.get(failure.rank or 0, {}).get("tail", "")))

    def collect(self, deadline: float) -> dict[int, Mapping[str, Any]]:
        """What each rank answers to the last question, in the order of arrival; the dead answer at once."""
        answers: dict[int, Mapping[str, Any]] = dict(self.dead)
        failing = bool(answers)
        while len(answers) < self.world_size and (event := self.next_event(deadline)) is not None:
            rank, body = event
            if "died" in body:
                self.dead[rank] = body
            elif body.get("id") != self.num_asked:
                continue
            answers.setdefault(rank, body)
            if not body.get("ok") and not failing:
                failing = True
                deadline = min(deadline, self.now() + GRACE_S)
        return answers

    def next_event(self, deadline: float) -> tuple[int, Mapping[str, Any]] | None:
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - self.now()))
            except Empty:
                return None
            if "lost" in event.body:
                self.stop()
                raise LaunchError(f"lost {event.body['lost']}")
            if event.crew == self.number and event.rank is not None:
                return event.rank, event.body

    def wait_for_port(self) -> int:
        deadline = self.now() + self.start_limit_s
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - self.now()))
            except Empty:
                raise LaunchError(
                    f"no answer from the station of rank 0 in {self.start_limit_s:.0f} s"
                ) from None
            if "lost" in event.body:
                raise LaunchError(f"lost {event.body['lost']}")
            if event.crew == self.number and "port" in event.body:
                return int(event.body["port"])


def judge(answers: Mapping[int, Mapping[str, Any]], world_size: int, limit_s: float) -> Failure | None:
    """The cause: what the first rank to fail said; what its peers say may only be a consequence of it."""
    missing = [rank for rank in range(world_size) if rank not in answers]
    for rank, body in answers.items():
        if not body.get("ok"):
            kind = "died" if "died" in body else str(body.get("kind"))
            return Failure(kind, rank, str(body.get("text", body.get("died"))))
    if missing:
        rest = "all ranks" if len(missing) == world_size else "ranks " + ", ".join(map(str, missing))
        return Failure("hung", missing[0], f"timed out: no answer from {rest} within {limit_s:g} s")
    return None
