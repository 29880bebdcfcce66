"""The op on the cuda target with a driver that does nothing: what a call costs the host in Python.

    python packages/mori-ep/tests/on_cpu/host_cost.py [repetitions]

prints the CPU's microseconds a call, the least and the median of repetitions. All of the path but the driver
and the GPU is as it is: checks, views, arguments, one call through ctypes for each kernel. On a GPU the
driver's own time comes on top (docs/h200-ep.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp, rules
from mori_ep.targets import cuda as target
from mori_ep.targets.cuda import launch as launches
from mori_ep.targets.cuda import runner
from mori_shmem.jit import driver

C_DRIVER = """
struct config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned num_attributes; };
struct { long count, grid, block; void *stream, *function, *params, *extra; } last;
int cuLaunchKernelEx(struct config *config, void *function, void **arguments, void **extra) {
  last.count++, last.grid = config->grid[0], last.block = config->block[0], last.stream = config->stream;
  last.function = function, last.params = arguments[0], last.extra = extra;
  return 0;
}
int cuMemsetD32Async(unsigned long at, unsigned value, unsigned long count, void *stream) { return 0; }
"""


class Last(ctypes.Structure):
    """What the driver was told last, and how often."""

    _fields_ = [
        *[(name, ctypes.c_long) for name in ("count", "grid", "block")],
        *[(name, ctypes.c_void_p) for name in ("stream", "function", "params", "extra")],
    ]


def build() -> ctypes.CDLL:
    """The driver that does nothing but note launches. Needs a C compiler."""
    with tempfile.TemporaryDirectory(prefix="mori-ep-host-cost-") as folder:
        source, made = f"{folder}/driver.c", f"{folder}/driver.so"
        Path(source).write_text(C_DRIVER)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", made, source], check=True)
        library = ctypes.CDLL(made)
    for name in ("cuLaunchKernelEx", "cuMemsetD32Async"):
        getattr(library, name).argtypes = driver._SIGNATURES[name]
    return library


class Communicator:
    """One of two ranks, whose memory is this process's."""

    rank, world_size, backend, timeout_s = 0, 2, "cuda", 30.0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.record = (ctypes.c_uint32 * 64)()
        self.core = SimpleNamespace(record=SimpleNamespace(address=ctypes.addressof(self.record)))

    def all_gather(self, obj: object) -> list[object]:
        return [obj, obj]

    def barrier(self) -> None: ...

    def alloc(self, nbytes: int) -> Any:
        memory = torch.zeros(nbytes + 256, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 256 :][:nbytes]

        def tensor(shape: Any, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
            size = torch.Size(shape).numel() * dtype.itemsize
            return memory[offset : offset + size].view(dtype).view(shape)

        return SimpleNamespace(
            nbytes=nbytes, addresses=(memory.data_ptr(),) * 2, tensor=tensor, close=lambda: None
        )


@contextlib.contextmanager
def made(library: ctypes.CDLL, **changes: Any) -> Iterator[EpDispatchCombineOp]:
    """An op of 256 experts, top-8, hidden 7168, on that driver."""
    function = SimpleNamespace(handle=ctypes.c_void_p(1), shared_bytes=0, name="nothing")
    module = SimpleNamespace(function=lambda name, shared_bytes=0: function)
    given: dict[str, Any] = {
        "data_type": torch.float8_e4m3fn,
        "hidden_dim": 7168,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "max_num_inp_token_per_rank": 128,
        "max_token_type_size": 2,
        "scale_dim": 56,
        "scale_type_size": 4,
        **changes,
    }
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (driver, "_library", lambda: library),
            (launches, "dispatch_module", lambda device: module),
            (launches, "combine_module", lambda device, *kind: module),
            (rules, "device_of", lambda backend, index: rules.host_device()),
            (runner.Runner, "_blocks", lambda self: 132),
            (torch._C, "_cuda_getDevice", lambda: 0),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 7),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        comm: Any = Communicator()
        assert target.Runner is runner.Runner
        yield stack.enter_context(EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **given), comm))


class Pair:
    """The calls of a layer with 8 tokens: fp8 rows there, bf16 rows back from the registered buffer."""

    def __init__(self, op: EpDispatchCombineOp, tokens: int = 8) -> None:
        self._op = op
        self._x = torch.zeros(tokens, 7168, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self._weights, self._scales = torch.ones(tokens, 8), torch.ones(tokens, 56)
        self._ids = torch.zeros(tokens, 8, dtype=torch.int32)
        self._y = op.get_registered_combine_input_buffer(torch.bfloat16)

    def dispatch(self) -> Any:
        return self._op.dispatch(self._x, self._weights, self._scales, self._ids)

    def combine(self) -> Any:
        return self._op.combine(self._y, None, self._ids, use_external_inp_buf=0)

    def both(self) -> None:
        self.dispatch()
        self.combine()


def microseconds(call: Any, repetitions: int) -> list[float]:
    """Of this thread's own time, the mean of 2000 calls in each repetition."""
    found = []
    for _ in range(repetitions):
        began = time.thread_time()
        for _ in range(2000):
            call()
        found.append((time.thread_time() - began) / 2000 * 1e6)
    return found


def main(repetitions: int) -> None:
    with made(build()) as op:
        pair = Pair(op)
        for name in ("dispatch", "combine", "both"):
            found = microseconds(getattr(pair, name), repetitions)
            print(f"{name:10} {min(found):6.2f} {statistics.median(found):6.2f} us")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
