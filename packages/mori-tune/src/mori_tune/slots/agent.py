"""The agent: what runs on another machine, or in a container, and has the ranks there as its children.

    python -m mori_tune.slots.agent     plan, start, send, stop on standard input; events on standard output

It ends its ranks and itself when its input ends, so whoever started it cleans up by closing a pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import IO

from mori_tune.slots.children import Event, Events
from mori_tune.slots.stations import LocalStation, StationPlan


def serve(reads: Iterable[str], writes: IO[str]) -> None:
    """The agent: a LocalStation for whoever is at the other end; ends its ranks when that end closes."""
    events: Events = SimpleQueue()
    station: LocalStation | None = None

    def forward() -> None:
        while True:
            event = events.get()
            line = json.dumps({"crew": event.crew, "rank": event.rank, "body": dict(event.body)})
            with contextlib.suppress(OSError, ValueError):
                writes.write(line + "\n")
                writes.flush()

    threading.Thread(target=forward, daemon=True).start()
    try:
        for line in reads:
            message = json.loads(line)
            if message["do"] == "plan":
                station = LocalStation(StationPlan.from_dict(message["plan"]), events)
                continue
            assert station is not None, "the first message is the plan"
            if message["do"] == "port":
                station.ask_port(message["crew"])
            elif message["do"] == "start":
                station.start(message["crew"], message["environ"])
            elif message["do"] == "send":
                station.send(message["message"])
            elif message["do"] == "stop":
                station.stop()
                events.put(Event(-1, None, {"stopped": True}))
    finally:
        if station is not None:
            station.close()


def main() -> None:
    """`python -m mori_tune.slots.stations`: the agent on standard input and output."""
    writes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but messages on the stream
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    serve(sys.stdin, writes)


if __name__ == "__main__":
    main()
