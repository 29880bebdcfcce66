"""One rank's process: it holds the op's session and tries candidates, one at a time, as it is told.

Commands come as JSON lines on standard input, answers go as JSON lines to a descriptor of their own; of what
the op prints the last lines are kept for reports. The process is forked by the nest (nest.py).

    {"id": 1, "do": "describe"}                                   -> device, versions
    {"id": 2, "do": "open", "problem": {...}, "device": {...}}    -> moved bytes
    {"id": 3, "do": "visit", "candidates": {phase: {...}}, "rounds": 10}  -> [{phase: us}, ...]

A visit makes the op, compares its output with the reference, measures, and compares again: a candidate
that is right once and wrong when repeated is wrong. The process ends when its input does, and dies with the
nest, whatever the op is waiting for.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from mori_tune.device import Device
from mori_tune.errors import Refused, TuneError, WrongOutput
from mori_tune.search.samples import worst_of
from mori_tune.spaces.space import Candidate
from mori_tune.tunable import Place, Problem, Session, Tunable, load

PR_SET_PDEATHSIG = 1


class Rank:
    """What one rank remembers between commands."""

    def __init__(self, tunable: Tunable, place: Place) -> None:
        self.tunable = tunable
        self.place = place
        self.session: Session | None = None

    def describe(self, command: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "device": self.tunable.device(self.place.backend).as_dict(),
            "versions": versions(self.tunable),
        }

    def open(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self.session is not None:
            self.session.close()
            self.session = None
        device = Device.from_dict(command["device"])
        self.session = self.tunable.open(Problem(command["problem"]), device, self.place)
        return {}

    def visit(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self.session is None:
            raise TuneError("visit before open")
        by_phase = {phase: Candidate.of(values) for phase, values in command["candidates"].items()}
        trial = self.session.make(by_phase)
        try:
            before = trial.check()
            rounds = [{p: float(us) for p, us in trial.measure().items()} for _ in range(command["rounds"])]
            after = trial.check()
        finally:
            trial.close()
        return {
            "rounds": rounds,
            "moved_bytes": {p: float(b) for p, b in self.session.moved_bytes().items()},
            # An op that only says right or wrong has mismatched nothing.
            "error": worst_of([e for e in (before, after) if e]) or {"mismatched_rows": 0},
        }

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, "body": getattr(self, command["do"])(command)}
        except Refused as error:
            return {"ok": False, "kind": "refused", "text": str(error)}
        except WrongOutput as error:
            return {"ok": False, "kind": "wrong", "text": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"ok": False, "kind": "raised", "text": f"{type(error).__name__}: {error}"}


def versions(tunable: Tunable) -> dict[str, str]:
    """Of what a measurement depends on: as installed, else as the module says that is imported."""
    names = ["mori-tune", tunable.package.replace("_", "-"), "torch", "triton"]
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            module = sys.modules.get(name.replace("-", "_"))
            if module is not None and hasattr(module, "__version__"):
                found[name] = str(module.__version__)
    return found


def die_with(parent: int) -> None:
    """Never outlive the process that started this one, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os._exit(1)


def serve(op: str, place: Place, reply_fd: int) -> None:
    """Answer what comes on standard input until it ends."""
    replies = os.fdopen(reply_fd, "w", buffering=1)
    rank = Rank(load(op), place)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps({"id": command["id"], **rank.answer(command)}), file=replies)
