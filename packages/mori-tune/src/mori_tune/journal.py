"""The journal of a sweep: every result, on disk before the next visit begins, so that a kill loses one slot.

One file for each sweep, named by a digest of everything that must be equal for its results to count: op,
problem, candidates, device, versions, rounds. The first line is that key, each further line one event. A line
cut off by the kill is dropped. Fed in order to a new Search the events bring it to where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Journal:
    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        text = json.dumps(key, sort_keys=True)
        self.path = folder / f"{key['op']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        self.head = text
        self.events = list(read_events(self.path, text))
        self.age_s = time.time() - self.path.stat().st_mtime if self.events else 0.0

    def open(self) -> None:
        """Rewrite what is valid, so that nothing is appended to a line that was cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        lines = [self.head, *(json.dumps(event) for event in self.events)]
        part.write_text("".join(line + "\n" for line in lines))
        os.replace(part, self.path)

    def forget(self) -> None:
        self.events = []
        self.age_s = 0.0

    def write(self, event: Mapping[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self) -> None:
        """The sweep has its result; a later one starts anew."""
        self.path.unlink(missing_ok=True)


def read_events(path: Path, head: str) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    *lines, _cut_off = text.split("\n")  # a whole line ends with a newline
    if not lines or lines[0] != head:
        return
    for line in lines[1:]:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            return
        if not isinstance(event, dict):
            return
        yield event
