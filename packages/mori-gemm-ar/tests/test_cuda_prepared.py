"""What a call on the cuda target asks of the driver, seen by a driver that only writes it down."""

from __future__ import annotations

import itertools
from ctypes import c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
from mori_gemm_ar.targets.cuda import launch, prepared
from mori_gemm_ar.targets.cuda.launch import Call, Operands, SideStreams, Way
from mori_gemm_ar.targets.cuda.prepared import Prepared
from mori_gemm_ar.targets.cuda.regions import regions_for
from mori_gemm_ar.targets.cuda.split import _NAMES, Split
from mori_shmem.jit import driver

M, N, K, RANKS = 1000, 320, 256, 2
BASES = [(1 + rank) << 40 for rank in range(RANKS)]
OPERANDS = Operands(*(0x1000 * i for i in range(1, 5)), M, 2, K, K)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The driver's functions by name, in the order in which they were called; kernels by their own names."""
    found: list[str] = []
    handles = itertools.count(1)

    def called(name: str, *arguments: Any) -> None:
        found.append(name)

    def launched(config: Any, function: c_void_p, *rest: Any) -> int:
        found.append(FUNCTIONS[function.value])
        return 0

    def graph(*arguments: Any) -> int:
        found.append("cuGraphLaunch")
        return 0

    library = SimpleNamespace(cuLaunchKernelEx=launched, cuGraphLaunch=graph)
    monkeypatch.setattr(driver, "_library", lambda: library)
    monkeypatch.setattr(driver, "call", called)
    monkeypatch.setattr(driver, "newest_node", lambda stream: 7)
    for name in ("new_stream", "new_event"):
        monkeypatch.setattr(launch.stream_calls, name, lambda: next(handles))
    for name in ("record", "follow"):
        monkeypatch.setattr(launch.stream_calls, name, lambda *a, name=name: found.append(name))
    monkeypatch.setattr(prepared.torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


FUNCTIONS = dict(enumerate(("gemm_allreduce", *_NAMES), 1))


def function(name: str) -> Any:
    handle = next(i for i, known in FUNCTIONS.items() if known == name)
    return SimpleNamespace(handle=c_void_p(handle), shared_bytes=0, name=name)


def call(way: Way, *, ranks: int = RANKS, into: str = "out", queues: Any = None) -> Call:
    regions = regions_for(M, N, RANKS, 128, copies=True, fp8=way.fp8, split=into == "c", scale_groups=3)
    kernel: Any = SimpleNamespace(
        tile_rows=128, fp8=way.fp8, piece_rows=16, function=function("gemm_allreduce")
    )
    return Call(
        *(kernel, (M, N, K), 0, BASES[:ranks], regions, OPERANDS, way),
        grid=132,
        queues=queues,
        fault=1,
        timeout_s=1.0,
        into=into,
    )


def split(**options: Any) -> Split:
    regions = regions_for(M, N, RANKS, 128, copies=False, fp8=True, split=True, scale_groups=3)
    kernels = {name: function(name) for name in _NAMES}
    product = call(Way(), ranks=1, into="c")
    return Split(product, regions, BASES, 0, kernels, fault=1, timeout_s=1.0, **options)


def asked_by(asked: list[str], action: Any) -> list[str]:
    asked.clear()
    action()
    return list(asked)


def test_a_fused_call_is_one_launch_and_moved_operands_two_addresses(asked: list[str]) -> None:
    ready = Prepared(call(Way()), "fused-lsa", SideStreams(1))
    assert asked_by(asked, lambda: ready.launch(5)) == ["gemm_allreduce"]
    assert asked_by(asked, lambda: ready.set_operands(OPERANDS)) == []
    moved = OPERANDS._replace(a=0x9000, b=0xA000, a_scale=0xB000)
    assert asked_by(asked, lambda: ready.set_operands(moved)) == ["cuTensorMapReplaceAddress"] * 2
    narrower = moved._replace(a_pitch=2 * K)
    assert asked_by(asked, lambda: ready.set_operands(narrower)) == ["cuTensorMapEncodeTiled"] * 2


def test_a_call_with_copies_is_recorded_once_and_then_one_launch(asked: list[str]) -> None:
    way = Way("ce", "ce", band_rows=256, lag=None)
    ready = Prepared(call(way, queues=SideStreams(2)), "fused-sdma", SideStreams(1))
    first = asked_by(asked, lambda: ready.launch(5))
    assert first[0] == "cuStreamBeginCapture_v2"
    assert first[-3:] == ["cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch"]
    # Two bands of the peer's slice and two of mine, all queued before the kernel that triggers them.
    transfer = ["cuStreamWaitValue32_v2", "cuMemcpyDtoDAsync_v2", "cuStreamWriteValue32_v2"]
    kernel = first.index("gemm_allreduce")
    assert [name for name in first[:kernel] if name in transfer] == transfer * 4
    assert first[kernel + 1 : -3] == ["record", "follow"] * 2 + ["cuMemsetD32Async"]
    assert asked_by(asked, lambda: ready.launch(5)) == ["cuGraphLaunch"]
    ready.set_operands(OPERANDS._replace(a=0x9000))
    again = asked_by(asked, lambda: ready.launch(5))
    assert again == ["cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"]
    assert asked_by(asked, lambda: ready.launch(5)) == ["cuGraphLaunch"]


def test_in_a_capture_everything_is_enqueued_anew(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Prepared(split(), "split-lsa", SideStreams(1))
    ready.launch(5)
    monkeypatch.setattr(prepared.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert asked_by(asked, lambda: ready.launch(5)) == ["gemm_allreduce", "sum_slice", "pull"]


PUSH = ["cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2", "cuMemsetD32Async"]


@pytest.mark.parametrize(
    ("options", "steps", "phases"),
    [
        ({"one_stage": True}, ["sum_all"], ["reduce"]),
        ({"pulls": True}, ["sum_slice", "pull"], ["reduce", "pull"]),
        ({"pulls": False}, ["sum_slice", "cuMemcpyDtoDAsync_v2", *PUSH], ["reduce", "gather"]),
        (
            {"fp8": True},
            ["sum_slice_quietly", "quantise", "pull_codes"],
            ["reduce", "quantize", "pull"],
        ),
        ({"fp8": True, "fuse_quantize": True}, ["sum_slice_quantised", "pull_codes"], ["reduce", "pull"]),
        (
            {"fp8": True, "fuse_quantize": True, "pulls": False},  # codes and scales are two copies
            ["sum_slice_quantised", *["cuMemcpyDtoDAsync_v2"] * 2, *PUSH, "widen"],
            ["reduce", "gather", "dequantize"],
        ),
    ],
    ids=str,
)
def test_the_steps_of_a_split_call(
    asked: list[str], options: dict[str, Any], steps: list[str], phases: list[str]
) -> None:
    made, marks = split(**options), list[str]()
    assert asked_by(asked, lambda: made.enqueue(5, marks.append)) == ["gemm_allreduce", *steps]
    assert marks == ["gemm", *phases]
