"""What a stream of the CUDA driver is asked to do: one function a call, on raw handles.

The table of mori_shmem.jit.driver serves kernels; this one serves streams, events and memory operations. All
functions take and give plain integers, so that tests can put a recorder in their place. A stream operation
on memory ("memop") is executed by the front end of the GPU: it needs no SM, and neither do the copies.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from mori_shmem.errors import TransportInert
from mori_shmem.jit.driver import DriverError

_NOT_READY = 600  # CUDA_ERROR_NOT_READY: the answer "no" of a query
_NON_BLOCKING, _NO_TIMING = 1, 2
_WAIT_GEQ, _WAIT_EQ = 0, 1
MAX_PITCH_BYTES = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of all devices so far
_HAS_64_BIT_MEMOPS = 122


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        *[(f"src_{name}", kind) for name, kind in (("x", c_size_t), ("y", c_size_t), ("type", c_int))],
        *[(f"src_{name}", c_void_p) for name in ("host", "device", "array")],
        ("src_pitch", c_size_t),
        *[(f"dst_{name}", kind) for name, kind in (("x", c_size_t), ("y", c_size_t), ("type", c_int))],
        *[(f"dst_{name}", c_void_p) for name in ("host", "device", "array")],
        *[(name, c_size_t) for name in ("dst_pitch", "row_bytes", "num_rows")],
    ]


_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_SIGNATURES: dict[str, list[object]] = {
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuStreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamQuery": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuStreamWaitValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuStreamWriteValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuMemcpy2DAsync_v2": [POINTER(_Copy2D), c_void_p],
}


@functools.cache
def _functions() -> dict[str, Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportInert(f"no CUDA driver on this machine ({error}): the cuda target needs one") from None
    library.cuGetErrorString.argtypes = [c_int, POINTER(c_char_p)]
    functions = {"cuGetErrorString": library.cuGetErrorString}
    for name, argument_types in _SIGNATURES.items():
        functions[name] = function = getattr(library, name)
        function.argtypes, function.restype = argument_types, c_int
    return functions


def _call(name: str, *arguments: object) -> None:
    code = _functions()[name](*arguments)
    if code:
        raise _failure(name, code)


def _asks(name: str, handle: int) -> bool:
    code = _functions()[name](handle)
    if code not in (0, _NOT_READY):
        raise _failure(name, code)
    return bool(code == 0)


def _failure(name: str, code: int) -> DriverError:
    words = c_char_p()
    _functions()["cuGetErrorString"](code, byref(words))
    return DriverError(f"{name} failed: {code} ({(words.value or b'unknown error').decode()})")


# ---- devices, streams and events ----


def has_64_bit_memops(device: int) -> bool:
    """Whether words of 64 bits can be waited for and written by a stream."""
    answer = c_int()
    _call("cuDeviceGetAttribute", byref(answer), _HAS_64_BIT_MEMOPS, device)
    return bool(answer.value)


def use_context(device: int) -> None:
    """Make the device's context current in this thread where none is. A new thread has none, and torch gives
    it one only with the first work."""
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    if not context.value:
        _call("cuDevicePrimaryCtxRetain", byref(context), device)
        _call("cuCtxSetCurrent", context)


def new_stream() -> int:
    """A stream of the highest priority that the default stream does not hold up; owned by the caller."""
    handle = c_void_p()
    _call("cuStreamCreateWithPriority", byref(handle), _NON_BLOCKING, -5)  # clamped to the device's range
    return int(handle.value or 0)


def drop_stream(stream: int) -> None:
    """What it holds is still done."""
    _call("cuStreamDestroy_v2", stream)


def is_idle(stream: int) -> bool:
    return _asks("cuStreamQuery", stream)


def new_event() -> int:
    """Owned by the caller."""
    handle = c_void_p()
    _call("cuEventCreate", byref(handle), _NO_TIMING)
    return int(handle.value or 0)


def drop_event(event: int) -> None:
    _call("cuEventDestroy_v2", event)


def record(event: int, stream: int) -> None:
    """The event is now "all that `stream` holds at this moment"."""
    _call("cuEventRecord", event, stream)


def has_happened(event: int) -> bool:
    return _asks("cuEventQuery", event)


def follow(stream: int, event: int) -> None:
    """What comes next on `stream` starts after the event as it is recorded now."""
    _call("cuStreamWaitEvent", stream, event, 0)


# ---- work on a stream ----


def wait_at_least(stream: int, address: int, value: int) -> None:
    """Hold the stream until the signed difference of the 64-bit word and `value` is not negative."""
    _call("cuStreamWaitValue64_v2", stream, address, value, _WAIT_GEQ)


def wait_equal(stream: int, address: int, value: int) -> None:
    _call("cuStreamWaitValue64_v2", stream, address, value, _WAIT_EQ)


def write(stream: int, address: int, value: int) -> None:
    """Set a 64-bit word after everything before it is visible (the driver fences, system scope)."""
    _call("cuStreamWriteValue64_v2", stream, address, value, 0)


def copy(stream: int, dst: int, src: int, nbytes: int) -> None:
    _call("cuMemcpyDtoDAsync_v2", dst, src, nbytes, stream)


def copy_rows(
    stream: int, dst: int, src: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
) -> None:
    shape = _Copy2D(
        src_type=_DEVICE_MEMORY, src_device=src, src_pitch=src_pitch,
        dst_type=_DEVICE_MEMORY, dst_device=dst, dst_pitch=dst_pitch,
        row_bytes=row_bytes, num_rows=num_rows,
    )  # fmt: skip
    _call("cuMemcpy2DAsync_v2", byref(shape), stream)


def fetch(stream: int, host_address: int, address: int, nbytes: int) -> None:
    """Copy to pinned host memory."""
    _call("cuMemcpyDtoHAsync_v2", host_address, address, nbytes, stream)
