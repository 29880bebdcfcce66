"""How long small things take between two ranks, as a ping-pong between the last rank and rank 0.

  put_signal          an 8-byte put and a signal through the queue, waited for by the peer: one way
  signal_round_trip   a direct signal there and one back
Beside both: gloo's send and recv of 8 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mori_bench import Case, Timing

from mori_shmem.bench.stage import Stage, nothing
from mori_shmem.program import PutProgram

if TYPE_CHECKING:
    import torch

TURNS = 100
SHAPE = (2, 2)  # bf16: 8 bytes
_DATA, _SIGNAL, _CHECKED, _CHECKED_SIGNAL = 0, 64, 128, 192  # where they lie in a part
_PART_BYTES = 4096


class _Pair:
    """The two ranks that talk; the others only meet the barriers."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.comm = stage, stage.comm
        self.peer = 0 if stage.is_sender else self.comm.world_size - 1
        self.window = self.comm.alloc(_PART_BYTES)
        self.turn = self.checked = 0
        if stage.is_sender or stage.is_receiver:
            self.queue = self.comm.queue(self.peer)
            self.signal_there = self.window.at(_SIGNAL, self.peer)
            self.signal_here = self.window.at(_SIGNAL)
            # The put's addresses never change, so it is written down once; the signal adds 1.
            self.program = PutProgram()
            self.program.put(self.window.at(_DATA + 8, self.peer), self.window.at(_DATA), 8)
            self.program.signal(self.signal_there, 1, op="add")

    def turns(self, tell: Callable[[], object]) -> None:
        """TURNS times there and back."""
        for _ in range(TURNS):
            self.turn += 1
            if self.stage.is_sender:
                tell()
                self.comm.wait(self.signal_here, self.turn, peer=self.peer)
            else:
                self.comm.wait(self.signal_here, self.turn, peer=self.peer)
                tell()

    def put_signal(self) -> None:
        self.turns(lambda: self.queue.submit(self.program))

    def signal(self) -> None:
        self.turns(lambda: self.comm.signal(self.signal_there, 1, op="add"))


def run(stage: Stage) -> None:
    """Both latencies, each beside gloo's."""
    import torch
    import torch.distributed as dist

    pair = _Pair(stage)
    talks = stage.is_sender or stage.is_receiver
    message = torch.empty(SHAPE, dtype=torch.bfloat16)

    def gloo() -> None:
        for _ in range(TURNS):
            if stage.is_sender:
                dist.send(message, pair.peer)
                dist.recv(message, pair.peer)
            elif stage.is_receiver:
                dist.recv(message, pair.peer)
                dist.send(message, pair.peer)

    actions = {"put_signal": pair.put_signal, "signal": pair.signal, "gloo": gloo}
    timings = stage.measure(
        {name: Case(action if talks else nothing, calls=TURNS) for name, action in actions.items()}
    )
    for op, turns, mine in (("put_signal", 0.5, "put_signal"), ("signal_round_trip", 1.0, "signal")):
        for mode, case in (("shmem", mine), ("gloo", "gloo")):
            wrong = stage.check(SHAPE, f"{op}/{mode}", functools.partial(_transfer, stage, pair, case))
            stage.add(op, mode, _scaled(timings[case], turns), {"bytes": 8}, mismatched_rows=wrong)
    stage.comm.barrier()
    pair.window.close()


def _transfer(stage: Stage, pair: _Pair, case: str, contents: torch.Tensor) -> torch.Tensor:
    """Send the eight bytes of `contents` once, the way that was timed; what came, on rank 0."""
    import torch
    import torch.distributed as dist

    here = pair.window.tensor(SHAPE, torch.bfloat16, _CHECKED)
    if case == "gloo":
        came = contents if stage.is_sender else torch.empty(SHAPE, dtype=torch.bfloat16)
        if stage.is_sender:
            dist.send(came, 0)
        elif stage.is_receiver:
            dist.recv(came, pair.peer)
        return came
    if case == "signal":  # the signal's value is the message
        if stage.is_sender:
            value = int(contents.view(-1).view(torch.int64)[0])
            stage.comm.signal(pair.window.at(_CHECKED, 0), value % (1 << 64))
        stage.comm.barrier()
        return here
    if stage.is_sender:
        pair.window.tensor(SHAPE, torch.bfloat16, _CHECKED).copy_(contents)
        pair.queue.put(pair.window.at(_CHECKED, 0), pair.window.at(_CHECKED), 8)
        pair.queue.signal(pair.window.at(_CHECKED_SIGNAL, 0), 1, op="add")
    elif stage.is_receiver:
        pair.checked += 1
        stage.comm.wait(pair.window.at(_CHECKED_SIGNAL), pair.checked, peer=pair.peer)
    return here


def _scaled(timing: Timing, factor: float) -> Timing:
    """The timing of a part of what was timed."""
    per_turn = ("median_us", "min_us", "max_us", "max_rank_time_us", "wall_us", "host_enqueue_us")
    return dataclasses.replace(timing, **{name: getattr(timing, name) * factor for name in per_turn})
