"""The host's part of a call on the cuda target, with a driver that only counts: what is launched, with which
arguments, and that a second call makes nothing anew."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from typing import Any

import host_cost
import pytest
import torch
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep.targets.cuda.params import BOTH, RECEIVE, SEND
from mori_shmem.errors import ArgumentError, LayoutError
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="the driver that counts needs a C compiler")


@pytest.fixture(scope="module")
def library() -> Iterator[ctypes.CDLL]:
    return host_cost.build()


class Operators(TorchDispatchMode):
    """Counts torch's operators, views included."""

    seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def test_a_second_pair_is_two_launches_and_makes_no_tensor(library: ctypes.CDLL) -> None:
    with host_cost.made(library) as op:
        pair = host_cost.Pair(op)
        first = (*pair.dispatch(), *pair.combine())
        last = host_cost.Last.in_dll(library, "last")
        launched = last.count
        with Operators() as operators:
            second = (*pair.dispatch(), *pair.combine())
        assert last.count == launched + 2
        assert operators.seen == 0
        assert all(a is b for a, b in zip(first, second, strict=True))


def test_every_launch_has_the_arguments_of_its_call(library: ctypes.CDLL) -> None:
    """Other tensors, other numbers of tokens, with and without weights and scales: nothing is left over."""
    last = host_cost.Last.in_dll(library, "last")
    with host_cost.made(library, kernel_type=Kind.AsyncLL) as op:
        for n, weighted in ((8, True), (3, True), (8, False), (0, True), (8, True)):
            x = torch.zeros(n, 7168, dtype=torch.uint8).view(torch.float8_e4m3fn)
            ids = torch.zeros(n, 8, dtype=torch.int32)
            weights = torch.ones(n, 8) if weighted else None
            scales = torch.ones(n, 56) if weighted else None
            op.dispatch_send(x, weights, scales, ids)
            launch = op._runner._last  # type: ignore[attr-defined]
            p = launch.params
            assert (last.stream, last.function, last.extra) == (7, 1, None)
            assert last.params == ctypes.addressof(p)
            assert (last.grid, last.block % 32) == (132, 0)
            assert p.c.tokens == n
            assert p.c.phases == SEND
            assert (p.input.payload or 0, p.input.ids or 0) == (x.data_ptr(), ids.data_ptr())
            wanted = (weights.data_ptr(), scales.data_ptr()) if weighted else (0, 0)
            assert (p.input.weights or 0, p.input.scales or 0) == wanted
            assert not p.replay
            assert p.shape.aligned == 1
            op.dispatch_recv()
            assert p.c.phases == RECEIVE
            y = torch.zeros(16, 7168).bfloat16()
            y_weights = torch.ones(16, 8) if weighted else None
            op.combine(y, y_weights, ids)
            p = op._runner._last.params  # type: ignore[attr-defined]
            assert (p.c.tokens, p.c.phases, p.y, p.y_rows) == (n, BOTH, y.data_ptr(), 16)
            assert (p.weights or 0) == (y_weights.data_ptr() if weighted else 0)
            layout, base = op.layout, op._window.addresses[0]
            for name, region in (("table", "table"), ("source", "out_positions"), ("count", "recv_count")):
                assert getattr(p, name) == base + getattr(layout, region).offset_bytes
            assert p.meta == base + layout.meta.offset_bytes
        with pytest.raises(ArgumentError, match="right after a combine of rows of your own"):
            op.combine(y, None, ids, use_external_inp_buf=0)
        op.dispatch_send(x, weights, scales, ids)
        op.dispatch_recv()
        with pytest.raises(ArgumentError, match="not the registered buffer"):
            op.combine(y, None, ids, use_external_inp_buf=0)
        odd = torch.zeros(7168 * 9, dtype=torch.uint8)[1 : 1 + 7168 * 8].view(8, 7168)
        with pytest.raises(LayoutError, match="input begins at 0x"):
            op.dispatch(odd.view(torch.float8_e4m3fn), None, None, ids)
