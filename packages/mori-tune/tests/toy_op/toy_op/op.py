"""A tunable op that is small and real: `dispatch` copies rows in pieces, `combine` adds two copies in pieces.

How many pieces is the geometry; more pieces cost more Python, so that there is something to find. The
output is compared with a plain copy and a plain sum.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mori_tune import (
    EP_COMBINE,
    EP_DISPATCH,
    Candidate,
    Device,
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

DISPATCH, COMBINE = (replace(f, op="toy") for f in (EP_DISPATCH, EP_COMBINE))


class Toy:
    name = "toy"
    package = "toy_op"
    formats = (DISPATCH, COMBINE)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dtype", default="fp8", choices=["fp8", "bf16"])

    def problems(self, options: argparse.Namespace, device: Device) -> Sequence[Problem]:
        world_size = options.world_size or 2
        fixed = {"dtype": options.dtype, "world_size": world_size}
        return [
            Problem({"tokens": tokens, "hidden": hidden, **fixed})
            for tokens in options.tokens or (4,)
            for hidden in options.hidden or (256,)
        ]

    def query(self, problem: Problem, phase: str, device: Device) -> Query:
        header = {"kernel_type": "Toy", "ep_size": problem["world_size"]}
        key = {"hidden_dim": problem["hidden"], "topk": 8, "num_tokens": problem["tokens"]}
        if phase == "dispatch":
            return Query(DISPATCH, device, header, {"dtype": problem["dtype"], **key})
        return Query(
            COMBINE, device, header, {"dtype": "bf16", "zero_copy": False, "quant_type": "none", **key}
        )

    def space(self, problem: Problem, device: Device) -> Space:
        parameters = (
            Parameter("block_num", (1, 8, 64), (8,)),
            Parameter("rdma_block_num", (0,)),
            Parameter("warp_per_block", (1, 4), (1,)),
        )
        size = lambda values: (values["block_num"] * values["warp_per_block"],)  # noqa: E731
        return Space("toy", hardware_of(device), parameters, grid_size=size)

    def default(self, problem: Problem, device: Device) -> Candidate:
        return Candidate.of({"block_num": 8, "rdma_block_num": 0, "warp_per_block": 4})

    def device(self, backend: str) -> Device:
        return host_device(4)

    def open(self, problem: Problem, device: Device, place: Place) -> Session:
        return Session(problem, place)


class Session:
    def __init__(self, problem: Problem, place: Place) -> None:
        count = int(problem["tokens"]) * int(problem["hidden"])
        self.rows = array("H", ((i * 131 + place.rank) % 251 for i in range(count)))
        self.summed = array("I", (2 * value for value in self.rows))

    def make(self, by_phase: Mapping[str, Candidate]) -> Trial:
        pieces = {p: int(c["block_num"]) * int(c["warp_per_block"]) for p, c in by_phase.items()}
        if any(n < 1 for n in pieces.values()):
            raise Refused(f"pieces {pieces}")
        return Trial(self, pieces)

    def moved_bytes(self) -> Mapping[str, float]:
        return {"dispatch": 2 * len(self.rows), "combine": 4 * len(self.rows)}

    def close(self) -> None:
        self.rows = array("H")


class Trial:
    def __init__(self, session: Session, pieces: Mapping[str, int]) -> None:
        self.session = session
        self.pieces = pieces
        self.copied = array("H", bytes(2 * len(session.rows)))
        self.added = array("I", bytes(4 * len(session.rows)))

    def cuts(self, phase: str) -> list[slice]:
        count, pieces = len(self.session.rows), self.pieces[phase]
        step = max(1, -(-count // pieces))
        return [slice(start, start + step) for start in range(0, count, step)]

    def dispatch(self) -> None:
        for cut in self.cuts("dispatch"):
            self.copied[cut] = self.session.rows[cut]

    def combine(self) -> None:
        for cut in self.cuts("combine"):
            self.added[cut] = array(
                "I", (a + b for a, b in zip(self.copied[cut], self.copied[cut], strict=True))
            )

    def check(self) -> None:
        self.dispatch()
        self.combine()
        if self.copied != self.session.rows or self.added != self.session.summed:
            raise WrongOutput("rows differ from the reference")

    def measure(self) -> Mapping[str, float]:
        times = {}
        for phase, run in (("dispatch", self.dispatch), ("combine", self.combine)):
            began = time.perf_counter_ns()
            run()
            times[phase] = (time.perf_counter_ns() - began) / 1e3
        return times

    def close(self) -> None:
        pass


TOY = Toy()
