"""A whole tunable in one file: copying a buffer in pieces. Copy it to begin an op's own.

    mori-tune run --op mori_tune.example:COPY --tokens 1024 --hidden 4096

What is tuned is the size of a piece: small ones cost Python, large ones fall out of the caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

from mori_tune.device import Device, host_device
from mori_tune.errors import WrongOutput
from mori_tune.rules.format import Format, Query
from mori_tune.spaces import Candidate, Parameter, Space, hardware_of
from mori_tune.tunable import Place, Problem

FORMAT = Format(
    op="example-copy",
    phase="copy",
    header=("world_size",),
    exact=("dtype",),
    preferred=("hidden",),
    size="tokens",
    params=("piece_bytes",),
)


class Copy:
    name = "example-copy"
    package = "mori_tune"
    formats = (FORMAT,)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        pass  # --tokens and --hidden are all it needs

    def problems(self, options: argparse.Namespace, device: Device) -> Sequence[Problem]:
        ranks = options.world_size or 2
        return [
            Problem({"tokens": tokens, "hidden": hidden, "ranks": ranks})
            for tokens in options.tokens or (1024,)
            for hidden in options.hidden or (4096,)
        ]

    def query(self, problem: Problem, phase: str, device: Device) -> Query:
        key = {"dtype": "uint8", "hidden": problem["hidden"], "tokens": problem["tokens"]}
        return Query(FORMAT, device, {"world_size": problem["ranks"]}, key)

    def space(self, problem: Problem, device: Device) -> Space:
        sizes = tuple(1 << exponent for exponent in range(12, 23))
        parameters = (Parameter("piece_bytes", sizes, quick=sizes[::3]),)
        return Space("example-copy", hardware_of(device), parameters)

    def default(self, problem: Problem, device: Device) -> Candidate:
        return Candidate.of({"piece_bytes": 4096})

    def device(self, backend: str) -> Device:
        return host_device()

    def open(self, problem: Problem, device: Device, place: Place) -> CopySession:
        return CopySession(problem, place)


class CopySession:
    """One rank's buffers, made once for a problem."""

    def __init__(self, problem: Problem, place: Place) -> None:
        nbytes = int(problem["tokens"] or 0) * int(problem["hidden"] or 0)
        self.source = bytes((i * 131 + place.seed) % 251 for i in range(251)) * (nbytes // 251 + 1)
        self.nbytes = nbytes

    def make(self, by_phase: Mapping[str, Candidate]) -> CopyTrial:
        return CopyTrial(self, int(by_phase["copy"]["piece_bytes"]))

    def moved_bytes(self) -> Mapping[str, float]:
        return {"copy": 2 * self.nbytes}

    def close(self) -> None:
        self.source = b""


class CopyTrial:
    """The op with one candidate."""

    def __init__(self, session: CopySession, piece_bytes: int) -> None:
        self.session = session
        self.piece_bytes = piece_bytes
        self.target = bytearray(session.nbytes)

    def run(self) -> None:
        source, target = memoryview(self.session.source), memoryview(self.target)
        for start in range(0, self.session.nbytes, self.piece_bytes):
            end = min(start + self.piece_bytes, self.session.nbytes)
            target[start:end] = source[start:end]

    def check(self) -> None:
        self.target[:] = bytes(self.session.nbytes)  # what an earlier run left must not pass for this one's
        self.run()
        if self.target != self.session.source[: self.session.nbytes]:
            raise WrongOutput("the copy differs from its source")

    def measure(self) -> Mapping[str, float]:
        began = time.perf_counter_ns()
        self.run()
        return {"copy": (time.perf_counter_ns() - began) / 1e3}

    def close(self) -> None:
        self.target = bytearray()


COPY = Copy()
