"""What a runner of the cuda target asks of its kernels, without any."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mori_ep.targets import CombineCall, CombineShape, DispatchCall
from mori_ep.targets.cuda.masks import Masks
from mori_ep.targets.cuda.runner import Runner
from mori_shmem.errors import ArgumentError, PeerDied, PeerError, PeerTimeout

BF16 = torch.bfloat16


def test_nobody_fills_the_registered_buffer_while_peers_read_it() -> None:
    """`guard` with every combine of that buffer, however many dispatches came before; and no such combine
    while rows that were copied there may be read."""
    guards: list[bool] = []

    def note(*given: object) -> None:
        guard = given[5]  # after stream, rows, weights, num_tokens, maps
        assert isinstance(guard, bool)
        guards.append(guard)

    registered, copied = (
        SimpleNamespace(shape=CombineShape(512, BF16, False, registered), launch=note)
        for registered in (True, False)
    )
    runner: Any = SimpleNamespace(_stream=lambda: 0, _maps=None, _copied_in=False)
    rows = torch.empty(0, 512, dtype=BF16)
    combine = functools.partial(Runner.combine, runner, call=CombineCall(rows, None, 0))
    given = DispatchCall(rows, None, None, torch.empty(0, 4, dtype=torch.int32))
    dispatch = functools.partial(Runner.dispatch, runner, SimpleNamespace(launch=lambda *_: 0), given)
    for dispatches in (1, 0, 2, 1):
        for _ in range(dispatches):
            dispatch()
        combine(registered)
    assert guards == [True] * 4
    combine(copied)
    with pytest.raises(ArgumentError, match="may still read them there"):
        combine(registered)
    combine(copied)
    dispatch()
    combine(registered)
    assert guards[4:] == [False, False, True]


def test_a_failed_wait_masks_the_dead_and_one_of_before_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 was awaited, since it had stopped because rank 1 has died."""
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("drained"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    found: list[PeerError] = []

    def check() -> None:
        if found:
            raise found.pop()

    states = [torch.zeros(64, dtype=torch.int32) for _ in range(2)]
    core = SimpleNamespace(peer_states=lambda: ["alive", "dead", "alive"])
    comm: Any = SimpleNamespace(rank=0, world_size=3, core=core)
    launch = SimpleNamespace(set_alive=lambda ranks: waited.append(f"{ranks:03b}"))
    forgiven = SimpleNamespace(check=check, forgive=lambda: waited.append("forgiven"))
    runner: Any = SimpleNamespace(
        _faults=forgiven,
        _masks=Masks(comm, states),
        _config=SimpleNamespace(elastic=True),
        _launches=[launch],
        _device=0,
    )
    runner._begin_again = functools.partial(Runner._begin_again, runner)
    runner._leave_out = functools.partial(Runner._leave_out, runner)
    late = PeerTimeout("waited for rank 2", rank=0, peers=[2])
    found.append(late)
    with pytest.raises(PeerDied, match="rank 1 died: waited for rank 2") as named:
        Runner._check(runner)
    assert named.value.__cause__ is late
    assert waited == ["forgiven", "101", "drained"]
    assert Runner.masked(runner) == [False, True, False]
    found.append(PeerTimeout("of a call of before", rank=0, peers=[1]))
    Runner._check(runner)
    assert waited[3:] == ["forgiven"]
    found.append(PeerTimeout("its own blocks", rank=0, peers=[0]))
    with pytest.raises(PeerTimeout, match="its own blocks"):
        Runner._check(runner)
    assert waited[4:] == []
    runner._config.elastic = False
    found.append(late)
    with pytest.raises(PeerTimeout, match="rank 2"):
        Runner._check(runner)
    assert Runner.masked(runner) == [False, True, False]


def test_who_takes_all_in_again_drops_what_kernels_have_left_behind_the_last_of_them() -> None:
    """The masks wait for the calls under way; what those leave is dropped, and only then is begun."""
    did: list[str] = []
    runner: Any = SimpleNamespace(
        _masks=SimpleNamespace(take_all_in=lambda: did.append("met"), alive=7),
        _faults=SimpleNamespace(drop=lambda: did.append("dropped"), forgive=lambda: did.append("forgiven")),
        _launches=[SimpleNamespace(set_alive=lambda ranks: did.append(f"{ranks:03b}"))],
    )
    runner._begin_again = functools.partial(Runner._begin_again, runner)
    Runner.take_all_in(runner)
    assert did == ["met", "dropped", "forgiven", "111"]
