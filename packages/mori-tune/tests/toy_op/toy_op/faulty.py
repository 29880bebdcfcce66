"""A tunable whose candidates misbehave by name, each in a way that sweeps have been lost to."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence

from mori_tune import (
    Candidate,
    Device,
    Format,
    Parameter,
    Place,
    Problem,
    Query,
    Refused,
    Space,
    WrongOutput,
    hardware_of,
    host_device,
)

FORMAT = Format("toy-faulty", "run", ("world_size",), ("kind",), (), "size", ("what",))
TIMES_US = {"slow": 100.0, "quick": 50.0, "zeros": 1.0, "late-zeros": 1.0}


class Faulty:
    name = "toy-faulty"
    package = "toy_op"
    formats = (FORMAT,)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--what", default="slow,raises,dies,hangs,quick", help="the candidates, in order")

    def problems(self, options: argparse.Namespace, device: Device) -> Sequence[Problem]:
        return [Problem({"what": options.what, "size": size}) for size in options.tokens or (1,)]

    def query(self, problem: Problem, phase: str, device: Device) -> Query:
        return Query(FORMAT, device, {"world_size": 2}, {"kind": "x", "size": problem["size"]})

    def space(self, problem: Problem, device: Device) -> Space:
        what = tuple(str(problem["what"]).split(","))
        return Space("faulty", hardware_of(device), (Parameter("what", what),))

    def default(self, problem: Problem, device: Device) -> None:
        return None

    def device(self, backend: str) -> Device:
        inherited = [name for name in os.environ if name.startswith("TORCHELASTIC_")]
        assert not inherited, f"a rank that joins torchrun's own store meets the wrong peers: {inherited}"
        return host_device(
            int(os.environ.get("TOY_UNITS_OF_RANK_1", "2")) if os.environ["RANK"] == "1" else 2
        )

    def open(self, problem: Problem, device: Device, place: Place) -> Session:
        return Session(place)


class Session:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.num_made = 0

    def make(self, by_phase: Mapping[str, Candidate]) -> Trial:
        self.num_made += 1
        what = str(by_phase["run"]["what"])
        alone = what.endswith("-on-1")
        if alone and self.place.rank != 1:
            return Trial("waits", self)  # for rank 1, which never comes
        return Trial(what.removesuffix("-on-1"), self)

    def moved_bytes(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


class Trial:
    def __init__(self, what: str, session: Session) -> None:
        self.what = what
        self.num_checks = 0
        if what == "refused":
            raise Refused("too large for this device")
        if what == "raises":
            print("about to raise")
            raise ValueError("x")
        if what == "spoilt" and session.num_made > 1:
            raise RuntimeError("out of memory, left over from an earlier candidate")
        if what == "dies":
            print("last words of the dying", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if what.endswith("-with-child") and os.fork() == 0:
            time.sleep(600)  # holds every pipe of its parent open
        if what == "dies-with-child":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "hangs-with-child":
            time.sleep(600)
        if what in ("hangs", "waits"):
            time.sleep(600)

    def check(self) -> None:
        self.num_checks += 1
        if self.what == "zeros" or (self.what == "late-zeros" and self.num_checks > 1):
            raise WrongOutput("all zero, relative error 1.0")

    def measure(self) -> Mapping[str, float]:
        if self.what == "rank-1-dies-after" and os.environ["RANK"] == "0":
            time.sleep(0.08)  # rounds long enough for rank 1 to have answered, and died, before
        return {"run": TIMES_US.get(self.what, 80.0)}

    def close(self) -> None:
        if self.what == "rank-1-dies-after" and os.environ["RANK"] == "1":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()


FAULTY = Faulty()
