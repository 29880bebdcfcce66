"""A repeated launch does what the whole way would, or nothing: with a driver that notes what it is told."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mori_shmem import _core
from mori_shmem.errors import MoriError
from mori_shmem.jit import driver
from mori_shmem.jit.repeated import repeated

DEVICE, STREAM = 3, 0x7FFF_1234_5670
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class Arguments(ctypes.Structure):
    _fields_ = [
        ("before", ctypes.c_uint64),
        *[(x, ctypes.c_uint64) for x in "abc"],
        ("after", ctypes.c_uint64),
    ]


class Call:
    """A kernel of three tensors, of which the second may be None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[int, ...]] = []  # stream, a, b, c
        self.code = 0
        self._launch = LAUNCH(self._note)
        monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=self._launch))
        self.device, self.stream = DEVICE, STREAM
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream + device - DEVICE, raising=False
        )
        self.arguments = Arguments(before=11, after=22)
        function: Any = SimpleNamespace(handle=ctypes.c_void_p(5), shared_bytes=0, name="kernel")
        self.prepared = driver.PreparedLaunch(function, 4, 32, [self.arguments])
        self.fault = ctypes.c_uint32(0)
        self.result = (object(), "views")

    def _note(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        assert (function, extra) == (5, None)
        assert config == ctypes.addressof(self.prepared._config)
        assert arguments == ctypes.addressof(self.prepared._pointers)
        a = self.arguments
        assert (a.before, a.after) == (11, 22)
        self.launched.append((self.prepared._config.stream, a.a, a.b, a.c))
        return self.code

    def of(self, *tensors: torch.Tensor | None, required: int = 0) -> Any:
        base = ctypes.addressof(self.arguments)
        places = [(base + 8, 0), (base + 16, 0), (base + 24, required)][: len(tensors)]
        return repeated(
            self.prepared,
            tensors,
            places,
            self.result,
            fault=ctypes.addressof(self.fault),
            device=DEVICE,
        )


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(monkeypatch)


def a_like(rows: int = 4) -> torch.Tensor:
    return torch.zeros(rows, 8, dtype=torch.bfloat16)


def ids_like() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int32)


def test_tensors_that_are_like_the_ones_before_are_launched_at_their_own_addresses(call: Call) -> None:
    again = call.of(a_like(), None, ids_like())
    for stream in (STREAM, STREAM + 64, STREAM):
        a, ids, call.stream = a_like(), ids_like(), stream
        assert again(a, None, ids) is call.result
        assert call.launched[-1] == (stream, a.data_ptr(), 0, ids.data_ptr())
    call.prepared.launch(99)  # the whole way in between, on another stream
    assert call.launched[-1][0] == 99
    again(a_like(), None, ids_like())
    call.prepared.launch(STREAM + 1)
    assert [launch[0] for launch in call.launched[-2:]] == [STREAM, STREAM + 1]


class Subclass(torch.Tensor):
    pass


def misaligned() -> torch.Tensor:
    return torch.zeros(33, dtype=torch.bfloat16)[1:].view(4, 8)


OTHERS = {
    "None": lambda: None,
    "another number of rows": lambda: a_like(5),
    "another rank": lambda: a_like().flatten(),
    "another dtype": lambda: a_like().half(),
    "columns of a wider one": lambda: torch.zeros(4, 16, dtype=torch.bfloat16)[:, :8],
    "transposed": lambda: torch.zeros(8, 4, dtype=torch.bfloat16).t(),
    "on another device": lambda: a_like().to("meta"),
    "an address that is no multiple of 16": misaligned,
    "a subclass": lambda: a_like().as_subclass(Subclass),
    "no tensor": lambda: [1, 2],
}


@pytest.mark.parametrize("other", list(OTHERS.values()), ids=list(OTHERS))
def test_anything_else_is_left_to_the_whole_way(call: Call, other: Any) -> None:
    again, before = call.of(a_like(), None, ids_like()), bytes(call.arguments)
    assert again(other(), None, ids_like()) is None
    assert call.launched == []
    assert bytes(call.arguments) == before, "nothing was written"


def test_so_are_other_numbers_of_tensors_and_one_where_none_was(call: Call) -> None:
    again = call.of(a_like(), None, ids_like())
    assert again(a_like(), a_like(), ids_like()) is None
    assert again(a_like(), None) is None
    assert again() is None
    assert call.launched == []


def test_so_are_calls_with_something_to_raise_or_on_another_device(call: Call) -> None:
    again = call.of(a_like(), None, ids_like())
    call.fault.value = 1
    assert again(a_like(), None, ids_like()) is None
    call.fault.value, call.device = 0, DEVICE + 1
    assert again(a_like(), None, ids_like()) is None
    assert call.launched == []
    call.device = DEVICE
    assert again(a_like(), None, ids_like()) is call.result


def test_a_launch_that_fails_is_made_again_the_whole_way_which_says_why(call: Call) -> None:
    again = call.of(a_like(), None, ids_like())
    call.code = 700
    assert again(a_like(), None, ids_like()) is None
    assert len(call.launched) == 1


def test_an_address_may_be_required(call: Call) -> None:
    buffer = ids_like()
    again = call.of(a_like(), None, buffer, required=buffer.data_ptr())
    assert again(a_like(), None, buffer) is call.result
    assert again(a_like(), None, ids_like()) is None


def test_what_can_not_be_repeated_has_no_function(call: Call) -> None:
    assert call.of(a_like(0), None, ids_like()) is None
    assert call.of(misaligned(), None, ids_like()) is None
    assert call.of(torch.zeros(4, 16)[:, :8], None, ids_like()) is None
    buffer = ids_like()
    assert call.of(a_like(), None, ids_like(), required=buffer.data_ptr()) is None


def test_nothing_is_kept_alive_by_calls_and_the_function_frees_what_it_held(call: Call) -> None:
    class Result:
        pass

    call.result = Result()  # type: ignore[assignment]
    first, result = a_like(), weakref.ref(call.result)
    again, given = call.of(first, None, ids_like()), weakref.ref(first)
    del first
    for _ in range(1000):
        again(a_like(), None, ids_like())
        again("no tensor", None, None)
    assert given() is None
    call.result = None  # type: ignore[assignment]
    assert result() is not None
    del again
    gc.collect()
    assert result() is None


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises((MoriError, _core.CoreError), match="launch"):
        _core.repeated_launch([], [1, 2], None, None, 0, 0, lambda: 0, lambda device: 0)
