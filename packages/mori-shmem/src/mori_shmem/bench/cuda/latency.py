"""How long small things take between two GPUs, as a ping-pong between the last rank and rank 0. Per round
trip:

kernel       one kernel on each GPU: store a word at the peer, wait for the answer (the SMs' own loads and
stores) signal       queue.signal and queue.wait in a graph: the GPUs' front ends, no kernel at all
put_signal   the same with an 8-byte put before each signal host         comm.signal and comm.wait: the
hosts' threads nccl         send and recv of 8 bytes Words toggle (targets/cuda/lowering.py), or grow in the
kernel and on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mori_bench import Case

from mori_shmem.bench.cuda import clock
from mori_shmem.bench.stage import Stage, nothing
from mori_shmem.program import PutProgram

if TYPE_CHECKING:
    import torch

TURNS = 32
SHAPE = (2, 2)  # bf16: 8 bytes
_KERNEL_WORD, _TOGGLE, _HOST_WORD, _DATA, _LANDED = 0, 64, 128, 256, 512  # where they lie in a part
_TIMEOUT_NS = 5 * 10**9


class _Pair:
    """The two ranks that talk."""

    def __init__(self, stage: Stage) -> None:
        import torch

        self.stage, self.comm = stage, stage.comm
        self.first = stage.is_sender
        self.peer = 0 if stage.is_sender else self.comm.world_size - 1
        self.window = self.comm.alloc(4096)
        self.queue = self.comm.queue(self.peer)
        self.turn = 0
        self.count = torch.zeros(1, dtype=torch.int64, device=self.comm.device)
        self.table = torch.tensor(self.window.addresses, dtype=torch.int64, device=self.comm.device)

    def program(self, *, put: bool) -> PutProgram:
        """One round trip."""
        made = PutProgram()
        for tell in (True, False) if self.first else (False, True):
            if tell:
                if put:
                    made.put(self.window.at(_LANDED, self.peer), self.window.at(_DATA), 8)
                made.signal(self.window.at(_TOGGLE, self.peer), 1)
            else:
                made.wait(self.window.at(_TOGGLE), 1)
                made.signal(self.window.at(_TOGGLE), 0)
        return made

    def through_queue(self, program: PutProgram) -> None:
        for _ in range(TURNS):
            self.queue.submit(program)
        self.queue.join()

    def through_kernel(self, turns: int = TURNS) -> None:
        from mori_shmem.bench.cuda.kernels import ping_pong

        ping_pong[(1,)](
            self.table, self.count, self.comm.fault_record, self.comm.rank, self.peer, int(self.first),
            _TIMEOUT_NS, turns, num_warps=1,
        )  # fmt: skip

    def through_host(self) -> None:
        mine, there = self.window.at(_HOST_WORD), self.window.at(_HOST_WORD, self.peer)
        for _ in range(TURNS):
            self.turn += 1
            if self.first:
                self.comm.signal(there, self.turn)
            self.comm.wait(mine, self.turn, peer=self.peer)
            if not self.first:
                self.comm.signal(there, self.turn)


def run(stage: Stage) -> None:
    """All of them, in turns."""
    import torch
    import torch.distributed as dist

    pair = _Pair(stage)
    talks = (stage.is_sender or stage.is_receiver) and stage.comm.world_size > 1
    message = torch.empty(SHAPE, dtype=torch.bfloat16, device=stage.comm.device)

    def nccl() -> None:
        if pair.first:
            dist.send(message, pair.peer)
            dist.recv(message, pair.peer)
        else:
            dist.recv(message, pair.peer)
            dist.send(message, pair.peer)

    names = ["kernel", "signal", "put_signal", "host", *(["nccl"] if stage.has_nccl else [])]
    cases: dict[str, Case | Callable[[], object]] = dict.fromkeys(names, nothing)
    if talks:
        pair.through_kernel(0)  # compiles and loads: nobody may wait for a kernel that is still to be loaded
        for name, put in (("signal", False), ("put_signal", True)):
            one = clock.graph(functools.partial(pair.through_queue, pair.program(put=put)))
            cases[name] = Case(one.start, one.finish, TURNS)
        one = clock.eager(pair.through_kernel)
        cases["kernel"] = Case(one.start, one.finish, TURNS)
        cases["host"] = Case(pair.through_host, calls=TURNS)
        if stage.has_nccl:
            cases["nccl"] = clock.eager(nccl, TURNS)
    timings = stage.measure(cases)
    for name in names:
        wrong = stage.check(SHAPE, f"round_trip/{name}", functools.partial(_transfer, pair, cases[name]))
        stage.add("round_trip", name, timings[name], {"bytes": 8}, mismatched_rows=wrong)
    stage.comm.barrier()
    pair.window.close()


def _transfer(pair: _Pair, case: object, contents: torch.Tensor) -> torch.Tensor:
    """Run the case once; then eight bytes that a put has carried to rank 0 while it ran, or before its
    signals."""
    import torch

    comm = pair.comm
    if pair.first:
        pair.window.tensor(SHAPE, torch.bfloat16, _DATA).copy_(contents)
        pair.queue.put(pair.window.at(_LANDED, 0), pair.window.at(_DATA), 8)
        pair.queue.join()
    if isinstance(case, Case):
        case.start()
        if case.finish is not None:
            case.finish()
    comm.barrier()
    comm.check()  # a ping-pong that stopped half way
    return pair.window.peer(0).tensor(SHAPE, torch.bfloat16, _LANDED).cpu()
