"""The engines that carry rows between nodes: bytes before their word, and ranks that die or do not come."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mori_ep import EpDispatchCombineOp
from mori_ep.internode.engine import Waits
from mori_shmem.deadline import Deadline
from mori_shmem.errors import PeerDied, PeerError, PeerTimeout
from mori_shmem.launch import run_ranks, run_ranks_to_the_end
from nodes import BOTH, NIXL, brought, config_for, join, pair


@pytest.mark.parametrize("engine", BOTH)
def test_an_engine_brings_bytes_before_their_word(engine: str) -> None:
    size, rounds = 1 << 16, 30

    def calls() -> None:
        with join(engine, 1) as comm:
            window = comm.alloc(64 + 2 * size)
            waits = Waits(comm, window.here, window.engine)
            mine = window.here.tensor(64 + 2 * size, torch.uint8)
            other, numbers = 1 - comm.rank, random.Random(1)
            for number in range(1, rounds + 1):  # both ranks know what comes
                nbytes, shift = numbers.choice([0, 1, 7, 4096, size - 64]), numbers.randrange(64)
                at = 64 + size + shift
                mine[64 : 64 + nbytes] = number
                window.engine.put_signal(other, at, 64, nbytes, 8, number)
                waits.for_word(other, 8, number, "the other's bytes")
                assert (mine[at : at + nbytes] == number).all()
                window.engine.quiet(Deadline(comm.timeout_s))
                window.engine.put_signal(other, 0, 0, 0, 16, number)
                waits.for_word(other, 16, number, "the other's answer")
            window.close()
            window.close()

    run_ranks(calls, 2, timeout_s=60)


@pytest.mark.parametrize(("engine", "per_node"), [("gloo", 2), pytest.param("nixl", 1, marks=NIXL)])
def test_a_killed_rank_is_named_by_its_counterpart_and_all_end(engine: str, per_node: int) -> None:
    world = 2 * per_node

    def calls() -> tuple[float, str]:
        comm = join(engine, per_node, timeout_s=60)
        op = EpDispatchCombineOp(config_for(comm), comm)
        pair(op, [replace(brought(r, 0, world), scales=None) for r in range(world)])
        comm.barrier()
        if comm.rank == world - 1:
            time.sleep(0.3)  # the others wait by now, and have nothing left to send
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        try:
            for call in range(1, 100):
                pair(op, [replace(brought(r, call, world), scales=None) for r in range(world)])
        except PeerError as error:
            op.close()
            comm.close()
            return time.monotonic() - began_s, f"{type(error).__name__}: {error}"
        return -1.0, ""

    outcomes = run_ranks_to_the_end(calls, world, timeout_s=90)
    told = [outcome.value for outcome in outcomes[:-1]]
    assert outcomes[-1].error is not None
    for took_s, text in told:
        assert text.startswith(PeerDied.__name__), text
        assert took_s < 40
    assert f"rank {world - 1} on node 1" in told[per_node - 1][1]


@pytest.mark.parametrize("engine", BOTH)
def test_a_rank_that_dies_while_nothing_is_under_way_is_noticed(engine: str) -> None:
    def calls() -> str:
        comm = join(engine, 1, timeout_s=60)
        window = comm.alloc(256)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(PeerDied, match="rank 1 on node 1"):
            Waits(comm, window.here, window.engine).for_word(1, 8, 1, "something")
        assert time.monotonic() - began_s < 40
        return "noticed"

    assert run_ranks_to_the_end(calls, 2, timeout_s=60)[0].value == "noticed"


@pytest.mark.parametrize("engine", BOTH)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(engine: str, tmp_path: Path) -> None:
    def calls() -> str:
        comm = join(engine, 1, timeout_s=1.5)
        op = EpDispatchCombineOp(config_for(comm), comm)
        if comm.rank == 1:
            limit = time.monotonic() + 60
            while not list(tmp_path.iterdir()) and time.monotonic() < limit:
                time.sleep(0.02)
            return ""
        given = brought(0, 0, 2)
        with pytest.raises(PeerTimeout) as caught:
            op.dispatch(given.x, None, None, given.ids)
        assert caught.value.peers == (1,)
        (tmp_path / "noticed").touch()
        return str(caught.value)

    text = run_ranks(calls, 2, timeout_s=60)[0]
    assert "rank 1 on node 1" in text
    assert "header of dispatch 1" in text
    assert "it is 0" in text
