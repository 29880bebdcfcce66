"""The journal of a sweep: every result, on disk before the next visit begins, so that a kill loses one slot.

One file for each sweep, named by a digest of everything that must be equal for its results to count: op,
problem, candidates, device, versions, rounds. The first line is that key, each further line one event. A line
cut off by the kill is dropped. Fed in order to a new Search the events bring it to where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from mori_tune.errors import LaunchError

log = logging.getLogger("mori_tune")


class Journal:
    """Read when made, written to from `open` to `close`; in between a second run of the sweep is refused."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        head = json.dumps(key, sort_keys=True)
        self.path = folder / f"{key['op']}-{hashlib.sha256(head.encode()).hexdigest()[:16]}.jsonl"
        self.head = head.encode() + b"\n"
        self.file: IO[bytes] | None = None
        found = list(read_events(self.path, self.head))
        self.events = [event for event, _ in found]
        self.ends = [end for _, end in found]  # of each event in the file, in bytes
        self.age_s = time.time() - self.path.stat().st_mtime if self.events else 0.0

    def keep(self, number: int) -> None:
        """Only the first `number` events count."""
        del self.events[number:], self.ends[number:]

    def open(self) -> None:
        """Lock the file and cut off what does not count, so that nothing is appended to half a line."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab")  # noqa: SIM115 (open as long as the sweep lasts)
        except OSError as error:
            log.warning("no journal, so this sweep cannot be resumed: %s", error)
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise LaunchError(f"another run is at the same sweep: it holds {self.path}") from None
        self.file.truncate(self.ends[-1] if self.ends else 0)
        if not self.ends:
            self.append(self.head)

    def write(self, event: Mapping[str, Any]) -> None:
        if self.file is not None:
            self.append(json.dumps(event).encode() + b"\n")

    def append(self, line: bytes) -> None:
        assert self.file is not None
        self.file.write(line)
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def done(self) -> None:
        """The sweep has its result; a later one starts anew."""
        if self.file is not None:
            self.path.unlink(missing_ok=True)
        self.close()


def read_events(path: Path, head: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole event and where it ends; none if the file is another sweep's, none after a broken line."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return
    if not lines or lines[0] != head:
        return
    end = len(head)
    for line in lines[1:]:
        try:
            event = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(event, dict):
            return
        end += len(line)
        yield event, end
