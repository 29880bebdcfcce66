"""`mori-sim run --torch-cuda`: programs that ask torch for "cuda" run unchanged on the CPU torch.

Torch's functions are intercepted in the main thread. What is asked for on "cuda" is made in simulated device
memory, as is every result of an operation on such tensors; their `device` and `is_cuda` say so. Before torch
touches memory, everything launched is waited for: results are there, as stream order would have it.
`torch.cuda` answers for the node: devices, streams, events and synchronisation go to the HIP library.

Not intercepted: other threads, tensors made by extensions, and in-place operators that mix "cuda" with "cpu"
tensors (torch itself would refuse those; here they work).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mori_sim import _core
from mori_sim.memory import empty

hip = ctypes.CDLL("libamdhip64.so.7")


def getter(name: str) -> Any:
    """What __torch_function__ is handed for a property; compare with ==, each look makes a new wrapper."""
    return getattr(torch.Tensor, name).__get__


# Questions about a tensor that never look at its bytes: no reason to wait for kernels.
METADATA = {
    torch.Tensor.data_ptr,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_contiguous,
    torch.Tensor.dim,
    torch.Tensor.storage_offset,
    getter("shape"),
    getter("dtype"),
    getter("layout"),
    getter("requires_grad"),
    getter("ndim"),
}
DEVICE = getter("device")
IS_CUDA = getter("is_cuda")
TO_CPU = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item}


def call(name: str, *arguments: Any) -> None:
    code = getattr(hip, name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} failed with {code}")


def device_of(memory: torch.Tensor) -> int | None:
    """The device whose memory holds the tensor; None for ordinary memory."""
    address = memory.data_ptr()
    return _core.device_of(address) if address else None


def cuda_index(value: Any) -> int | None:
    """The device meant by "cuda", "cuda:1" or a torch.device of that type; None for anything else."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return current_device() if value.index is None else value.index
    return None


def is_cpu(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cpu")) or (
        isinstance(value, torch.device) and value.type == "cpu"
    )


def moved(value: Any, device: int | None) -> Any:
    """The tensors of a result in memory of `device`, or in ordinary memory for None."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(moved(v, device) for v in value)
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.numel() == 0:
        return value
    here = device_of(value)
    if here == device or (here is not None and device is not None):
        return value
    if device is None:
        return value.clone()
    return empty(*value.shape, dtype=value.dtype, device=device).copy_(value.detach())


class SimulatedCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (DEVICE, IS_CUDA):
            here = device_of(args[0])
            if func == IS_CUDA:
                return here is not None
            return args[0].device if here is None else torch.device("cuda", here)
        if func in METADATA or func is torch.device:
            return func(*args, **kwargs)
        if _core.pending():
            _core.synchronize()
        if func is torch.Tensor.cuda:
            index = args[1] if len(args) > 1 else kwargs.get("device")
            wanted = index if isinstance(index, int) else cuda_index(index or "cuda")
            return moved(args[0], wanted)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        asked = next((i for i in map(cuda_index, [*args, *kwargs.values()]) if i is not None), None)
        to_cpu = func in TO_CPU or (asked is None and any(map(is_cpu, [*args, *kwargs.values()])))
        args = tuple("cpu" if cuda_index(a) is not None else a for a in args)
        kwargs = {k: "cpu" if cuda_index(v) is not None else v for k, v in kwargs.items()}
        if kwargs.pop("pin_memory", None):
            asked = None
        result = func(*args, **kwargs)
        if to_cpu:
            return moved(result, None)
        if asked is None:
            asked = next((d for d in map(device_of, tensors) if d is not None), None)
            if asked is None:
                return result
        return moved(result, asked)


# ---- torch.cuda
def current_device() -> int:
    device = c_int()
    call("hipGetDevice", byref(device))
    return device.value


def set_device(device: Any) -> None:
    call("hipSetDevice", device if isinstance(device, int) else cuda_index(device) or 0)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None, **_: Any) -> None:
        if handle is None:
            made = c_void_p()
            call("hipStreamCreateWithFlags", byref(made), c_uint(1))
            handle = made.value or 0
        self.cuda_stream = handle

    def synchronize(self) -> None:
        call("hipStreamSynchronize", c_void_p(self.cuda_stream))

    def query(self) -> bool:
        return bool(hip.hipStreamQuery(c_void_p(self.cuda_stream)) == 0)

    def wait_event(self, event: Event) -> None:
        call("hipStreamWaitEvent", c_void_p(self.cuda_stream), event.handle, c_uint(0))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> Stream:
        STACK.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        STACK.pop()


STACK: list[Stream] = []


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.handle = c_void_p()
        call("hipEventCreateWithFlags", byref(self.handle), c_uint(0))

    def record(self, stream: Stream | None = None) -> None:
        call("hipEventRecord", self.handle, c_void_p((stream or current_stream()).cuda_stream))

    def synchronize(self) -> None:
        call("hipEventSynchronize", self.handle)

    def query(self) -> bool:
        return bool(hip.hipEventQuery(self.handle) == 0)

    def elapsed_time(self, end: Event) -> float:
        ms = c_float()
        call("hipEventElapsedTime", byref(ms), self.handle, end.handle)
        return ms.value


def current_stream(device: Any = None) -> Stream:
    return STACK[-1] if STACK else Stream(handle=0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    free, total = c_size_t(), c_size_t()
    call("hipMemGetInfo", byref(free), byref(total))
    return free.value, total.value


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="AMD Instinct MI355X (mori-sim)",
        gcnArchName="gfx950:sramecc+:xnack-",
        multi_processor_count=256,
        warp_size=64,
        total_memory=mem_get_info()[1],
        major=9,
        minor=5,
    )


def install() -> None:
    """Once, after torch has been imported and before anything else uses it."""
    nothing = lambda *_, **__: None  # noqa: E731
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _core.device_count,
        "current_device": current_device,
        "set_device": set_device,
        "synchronize": lambda device=None: _core.synchronize(),
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(handle=0),
        "stream": lambda stream: stream,
        "Stream": Stream,
        "Event": Event,
        "mem_get_info": mem_get_info,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties().name,
        "get_device_capability": lambda device=None: (9, 5),
        "empty_cache": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "init": nothing,
        "_lazy_init": nothing,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.hip = "7.1.25424"
    mode: Any = SimulatedCuda()
    mode.__enter__()
