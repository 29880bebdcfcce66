"""What a runner of the cuda target asks of its kernels, without any."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mori_ep.targets import CombineCall, CombineShape, DispatchCall
from mori_ep.targets.cuda.runner import Runner
from mori_shmem.errors import ArgumentError

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
