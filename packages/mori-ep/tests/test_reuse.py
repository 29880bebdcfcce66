"""What is written twice: headers and blocks by parity, blocks under a queue, the registered buffer. In each
test one rank is held exactly where the next write would hurt it, so that nothing depends on luck."""

from __future__ import annotations

import threading
import time
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
from mori_ep.reference import RankInput

HIDDEN, TOPK, EXPERTS = 64, 2, 4


def made(comm: mori_shmem.Communicator, kind: str) -> EpDispatchCombineOp:
    config = EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=EXPERTS,
        data_type=torch.bfloat16,
        hidden_dim=HIDDEN,
        num_experts_per_token=TOPK,
        max_num_inp_token_per_rank=16,
        kernel_type=EpDispatchCombineKernelType[kind],
    )
    return EpDispatchCombineOp(config, comm)


def brought(rank: int, turn: int, tokens: int) -> RankInput:
    """Every token goes to both ranks; its row says whose it is and of which turn."""
    ids = torch.tensor([[0, EXPERTS - 1]], dtype=torch.int32).repeat(tokens, 1)
    return RankInput(torch.full((tokens, HIDDEN), 10.0 * turn + rank).bfloat16(), ids)


def received(turn: int, tokens: tuple[int, int]) -> torch.Tensor:
    """What both ranks get then."""
    return torch.cat([brought(rank, turn, n).x for rank, n in enumerate(tokens)])


class Gate:
    """Holds back all that this rank's first queue to a peer is given from `close` on, for a while."""

    def __init__(self, comm: mori_shmem.Communicator, peer: int) -> None:
        self._comm, self._queue, self._turn = comm, comm.queue(peer, 0), 0
        self._window = comm.alloc(256)

    def close(self, seconds: float = 0.3) -> None:
        self._turn += 1
        where, value = self._window.at(0), self._turn
        self._queue.wait(where, value)
        threading.Timer(seconds, lambda: self._comm.signal(where, value)).start()


@pytest.mark.parametrize("kind", ["IntraNodeLL", "AsyncLL"])
def test_P20_a_header_is_read_before_the_next_but_one_takes_its_place(kind: str) -> None:
    """Rank 1 has entered a dispatch, which lets rank 0 finish it and send the next, and then is slow to read
    the headers and blocks of the first. The next has other counts."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, kind) as op:
            flags: Any = op._runner._flags  # type: ignore[attr-defined]
            wait = flags.wait

            def slowly(name: str, call: int, of: str) -> None:
                wait(name, call, of)
                if name == "entered" and comm.rank == 1:
                    time.sleep(0.2)

            flags.wait = slowly
            for turn, tokens in enumerate(((5, 3), (2, 7), (4, 4))):
                given = brought(comm.rank, turn, tokens[comm.rank])
                rows, *_, count = op.dispatch(given.x, None, None, given.ids)
                assert int(count) == sum(tokens)
                assert torch.equal(rows[: int(count)], received(turn, tokens)), turn

    mori_shmem.run_ranks(rank, 2)


def test_P8_rows_are_not_packed_over_those_that_a_queue_has_yet_to_carry() -> None:
    """Rank 0's queue stands still while it dispatches, and goes on to the next."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, "AsyncLL") as op:
            gate = Gate(comm, 1 - comm.rank)
            for turn in range(4):
                if comm.rank == 0 and turn % 2 == 0:
                    gate.close()
                given = brought(comm.rank, turn, 6)
                rows, *_, count = op.dispatch(given.x, None, None, given.ids)
                assert torch.equal(rows[: int(count)], received(turn, (6, 6))), turn

    mori_shmem.run_ranks(rank, 2)


def test_P8_the_registered_buffer_is_free_once_a_combine_of_several_has_returned() -> None:
    """Rank 0's queue stands still while it combines the first of two open dispatches from the registered
    buffer, which it then fills with the answers to the second."""

    def rank() -> None:
        with mori_shmem.init() as comm, made(comm, "AsyncLL") as op:
            gate = Gate(comm, 1 - comm.rank)
            y = op.get_registered_combine_input_buffer(torch.bfloat16)
            opened = []
            for turn in range(2):
                given = brought(comm.rank, turn, 6)
                rows, *_, count, handle = op.dispatch(given.x, None, None, given.ids, return_routing=True)
                opened.append((given, rows[: int(count)].clone(), handle))
            for turn, (given, rows, handle) in enumerate(opened):
                y[: len(rows)] = rows
                if comm.rank == 0 and turn == 0:
                    gate.close()
                out, _ = op.combine(y, None, given.ids, use_external_inp_buf=0, routing=handle)
                assert torch.equal(out[:6], 2 * given.x), turn

    mori_shmem.run_ranks(rank, 2)
