"""The CUDA driver: modules, tensor maps, prepared launches, and the stream memory operations.

One table of entry points, filled when first used; a machine without a driver gets an answer, not a crash. A
launch
happens in two steps: `PreparedLaunch(...)` builds grid, block and argument buffers once; `launch(stream)`
is a single
call into the driver. What changes between calls is patched in the argument structs themselves (they are
ctypes objects).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

from mori_shmem.errors import MoriError


class DriverError(MoriError):
    """A driver call failed: the call's name, its code and the driver's own words."""


_SIGNATURES: dict[str, list[type]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [c_void_p],
    "cuModuleLoadData": [c_void_p, ctypes.c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, ctypes.c_char_p],
    "cuModuleGetGlobal_v2": [c_void_p, c_void_p, c_void_p, ctypes.c_char_p],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
    "cuOccupancyMaxActiveClusters": [c_void_p, c_void_p, c_void_p],
    "cuTensorMapEncodeTiled": [
        *[c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
        *[c_int, c_int, c_int, c_int],
    ],
    "cuStreamWaitValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint],
    "cuStreamWriteValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint],
    "cuMemsetD32Async": [c_uint64, c_uint32, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
}
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WAIT_GEQ = 0


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise DriverError(f"no CUDA driver on this machine ({e}): the cuda target needs one to run") from None
    lib.cuGetErrorString.argtypes = [c_int, c_void_p]
    for name, argtypes in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = argtypes, c_int
    _check(lib, "cuInit", lib.cuInit(0))
    return lib


def _check(lib: ctypes.CDLL, name: str, code: int) -> None:
    if code:
        words = ctypes.c_char_p()
        lib.cuGetErrorString(code, ctypes.byref(words))
        raise DriverError(f"{name} failed: {code} ({(words.value or b'unknown error').decode()})")


def call(name: str, *args: object) -> None:
    """Call a driver function of the table; raises DriverError when it fails."""
    lib = _library()
    _check(lib, name, getattr(lib, name)(*args))


class Module:
    """A loaded cubin. The current context must be the device's (torch makes it with the first tensor)."""

    def __init__(self, cubin: bytes) -> None:
        self._handle = c_void_p()
        call("cuModuleLoadData", ctypes.byref(self._handle), cubin)

    def function(self, name: str, shared_bytes: int = 0) -> Function:
        return Function(self, name, shared_bytes)

    def constant(self, name: str) -> int:
        """The value of a `__device__ const unsigned` of the module."""
        address, nbytes, value = c_uint64(), c_size_t(), c_uint32()
        call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(nbytes), self._handle, name.encode())
        call("cuMemcpyDtoH_v2", ctypes.byref(value), address, 4)
        return value.value


class Function:
    def __init__(self, module: Module, name: str, shared_bytes: int) -> None:
        self.module, self.name, self.shared_bytes = module, name, shared_bytes  # keeps the module loaded
        self.handle = c_void_p()
        call("cuModuleGetFunction", ctypes.byref(self.handle), module._handle, name.encode())
        if shared_bytes > 48 << 10:
            call("cuFuncSetAttribute", self.handle, _MAX_DYNAMIC_SHARED, shared_bytes)


class PreparedLaunch:
    """`args` are ctypes objects, kept alive here; changing them changes the next launch."""

    def __init__(self, function: Function, grid: int, block: int, args: Sequence[ctypes._CData]) -> None:
        self.args = list(args)
        self._function = function
        self._pointers = (c_void_p * len(self.args))(*[ctypes.addressof(a) for a in self.args])
        self._launch = _library().cuLaunchKernel
        self._fixed = (function.handle, grid, 1, 1, block, 1, 1, function.shared_bytes)

    def launch(self, stream: int) -> None:
        """Enqueue on `stream` (a raw handle)."""
        code = self._launch(*self._fixed, stream, self._pointers, None)
        if code:
            _check(_library(), f"cuLaunchKernel({self._function.name})", code)


class TensorMap(ctypes.Structure):
    """The opaque 128 bytes of a CUtensorMap, as a kernel argument or inside one (64-byte aligned there)."""

    _fields_ = [("words", c_uint64 * 16)]


_FORMATS = {"u8": (0, 1), "bf16": (9, 2), "f32": (7, 4)}


def tensor_map(
    address: int, kind: str, *, columns: int, rows: int, pitch_bytes: int, box_columns: int, box_rows: int
) -> TensorMap:
    """A row-major [rows, columns] tensor read or written in boxes with the 128-byte swizzle.

    Outside the tensor loads give zero and stores do nothing. Address and pitch are multiples of 16 bytes.
    """
    code, item_bytes = _FORMATS[kind]
    if address % 16 or pitch_bytes % 16 or box_columns * item_bytes > 128:
        raise ValueError(
            f"tensor map: address {address:#x} and pitch {pitch_bytes} must be multiples of 16, "
            f"the box's {box_columns * item_bytes} bytes a row at most 128"
        )
    raw = (ctypes.c_uint8 * 192)()
    at = (ctypes.addressof(raw) + 63) & ~63
    call(
        "cuTensorMapEncodeTiled",
        *[at, code, 2, address, (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(pitch_bytes)],
        *[
            (c_uint32 * 2)(box_columns, box_rows),
            (c_uint32 * 2)(1, 1),
            0,
            3,
            2,
            0,
        ],  # 128-byte swizzle and L2 lines
    )
    made = TensorMap()
    ctypes.memmove(ctypes.addressof(made), at, 128)
    return made


def stream_wait(stream: int, flag: int, value: int) -> None:
    """What follows on the stream starts once the 32-bit word at `flag` is >= value (cyclically)."""
    call("cuStreamWaitValue32_v2", stream, flag, value, _WAIT_GEQ)


def stream_write(stream: int, flag: int, value: int) -> None:
    """Write the word after all earlier work of the stream, and after what that work wrote is visible."""
    call("cuStreamWriteValue32_v2", stream, flag, value, 0)


def stream_copy(stream: int, dst: int, src: int, nbytes: int) -> None:
    """A copy by a copy engine; peers' mapped memory is fine on either side."""
    call("cuMemcpyDtoDAsync_v2", dst, src, nbytes, stream)


def stream_fill(stream: int, address: int, value: int, count: int) -> None:
    """`count` 32-bit words become `value`."""
    call("cuMemsetD32Async", address, value, count, stream)
