"""One op's calls on the cuda target without a GPU: which way they go, and what a repeated call skips."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mori_gemm_ar.options import resolve
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.problem import Problem
from mori_gemm_ar.targets.cuda import runner as module
from mori_gemm_ar.targets.cuda.gemm import Gemm, Partials
from mori_gemm_ar.targets.cuda.launch import Operands
from mori_gemm_ar.targets.cuda.runner import Ready, Runner, layout_for

M_MAX, N, K = 600, 256, 256


class FakePrepared:
    """In place of prepared.Prepared: remembers what it was told."""

    launched: list[tuple[str, int]] = []  # noqa: RUF012

    def __init__(self, call: Any, name: str, recorder: Any) -> None:
        self.call, self.name = call, name

    def set_operands(self, operands: Operands) -> None:
        self.call.operands = operands

    def launch(self, stream: int) -> None:
        self.launched.append((self.name, self.call.operands.a))


def fake_call(kernel: Any, *arguments: Any, **options: Any) -> Any:
    operands = next(x for x in arguments if isinstance(x, Operands))
    return SimpleNamespace(kernel=kernel, operands=operands)


def plan(m: int, **options: Any) -> Plan:
    return Plan(Problem(m, N, K, 2), resolve(**options), 512)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    core = SimpleNamespace(
        check=lambda: None, on_device=contextlib.nullcontext, callers_stream=lambda: 5,
        record=SimpleNamespace(address=1),
    )  # fmt: skip
    comm: Any = SimpleNamespace(
        core=core,
        rank=0,
        world_size=2,
        timeout_s=1.0,
        device=torch.device("cpu"),
        all_gather=lambda x: [x, x],
    )
    properties = SimpleNamespace(uuid="x", multi_processor_count=132)
    monkeypatch.setattr(module.torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(module, "_kernel", lambda *which: SimpleNamespace(which=which))
    monkeypatch.setattr(module, "split_kernels", lambda device: {})
    monkeypatch.setattr(module, "SideStreams", lambda count: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(module, "Prepared", FakePrepared)
    monkeypatch.setattr(module, "Call", fake_call)
    monkeypatch.setattr(
        module, "Split", lambda product, *a, **k: SimpleNamespace(operands=product.operands, **k)
    )
    FakePrepared.launched.clear()

    def build(**options: Any) -> Runner:
        chosen = resolve(**options)
        layout = layout_for(M_MAX, N, 2, chosen)
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)

        def tensor(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
            return memory[offset : offset + 2 * shape[0] * shape[1]].view(dtype).view(shape)

        window: Any = SimpleNamespace(addresses=(1 << 40, 2 << 40), tensor=tensor)
        return Runner(comm, window, layout, chosen, M_MAX)

    return build


def partials(m: int) -> Partials:
    codes = [torch.zeros(rows, K, dtype=torch.uint8).view(torch.float8_e4m3fn) for rows in (m, N)]
    return Gemm(N, K, "blockscale", 0).partials(*codes, torch.ones(2, m).t(), torch.ones(2, 2))


def test_small_calls_of_a_fused_op_go_another_way_and_it_says_so(make: Any) -> None:
    options = {"mode": "fused-lsa", "small_m": "one-stage", "small_m_below": 100}
    runner = make(**options)
    for m in (99, 100, 99):
        out, spans = runner.run(plan(m, **options), 1, partials(m))
        assert (out.shape, spans) == ((m, N), [])
    assert [name for name, _ in FakePrepared.launched] == ["one-stage", "fused-lsa", "one-stage"]
    assert [runner.ran(m) for m in (99, 100, 500)] == ["one-stage", "fused-lsa", "fused-lsa"]


def test_tiles_follow_the_rows_of_a_call_not_of_the_op(make: Any) -> None:
    runner = make(mode="gemm-only")
    rows = [
        runner._prepare(plan(m, mode="gemm-only"), partials(m).operands).call.kernel.which[1]
        for m in (100, 512)
    ]
    assert rows == [128, 256]


def test_a_ready_call_takes_addresses_that_the_kernel_can_read(make: Any) -> None:
    runner = make(mode="fused-lsa")
    p = partials(64)
    ready = runner.ready(plan(64, mode="fused-lsa"), p)
    assert isinstance(ready, Ready)
    assert ready.at(0x1008, 0x2000, 0x3004, 0x4000) is None
    assert ready.at(0x1000, 0x2001, 0x3004, 0x4000) is None
    assert ready.at(0x1000, 0x2000, 0x3004, 0x4004) is None
    # Two calls in the making do not see each other's operands: a second thread is refused only later.
    first, second = ready.at(0x1000, 0x2000, 0x3004, 0x4000), ready.at(0x5000, 0x2000, 0x3004, 0x4000)
    assert first is not None
    assert second is not None
    one, _ = first(1)
    two, _ = second(2)
    assert FakePrepared.launched == [("fused-lsa", 0x1000), ("fused-lsa", 0x5000)]
    assert one is not two
    assert one.data_ptr() == two.data_ptr() == runner.output(64).data_ptr()


def test_operands_that_had_to_be_copied_are_not_taken_as_they_lie(make: Any) -> None:
    runner = make(mode="fused-lsa")
    wide = torch.zeros(64, K + 8, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :K]  # rows at 264 bytes
    b = torch.zeros(N, K, dtype=torch.uint8).view(torch.float8_e4m3fn)
    copied = Gemm(N, K, "blockscale", 0).partials(wide, b, torch.ones(2, 64).t(), torch.ones(2, 2))
    assert runner.ready(plan(64, mode="fused-lsa"), copied) is None
    empty = partials(0)
    assert runner.ready(plan(0, mode="fused-lsa"), empty) is None


def test_shapes_that_are_not_used_are_forgotten(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREPARED_KEPT", 2)
    runner = make(mode="fused-lsa")
    for m in (1, 2, 1, 3):
        runner.run(plan(m, mode="fused-lsa"), 1, partials(m))
    assert list(runner._prepared) == [1, 3]
