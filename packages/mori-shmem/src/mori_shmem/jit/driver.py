"""The CUDA driver: modules, tensor maps, prepared launches, graphs, and the stream memory operations.

One table of entry points, filled when first used; a machine without a driver gets an answer, not a crash. A
launch happens in two steps: `PreparedLaunch(...)` builds grid, block and argument buffers once;
`launch(stream)` is a single call into the driver. What changes between calls is patched in the argument
structs themselves (they are ctypes objects). Several operations that belong together become one with
`Graph`: recorded once, launched by one call, and the arguments of its kernels can still be changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import TypeVar

from mori_shmem.errors import MoriError


class DriverError(MoriError):
    """A driver call failed: the call's name, its code and the driver's own words."""


_SIGNATURES: dict[str, list[type] | None] = {  # None: called with ctypes objects only, taken as they are
    "cuInit": [c_uint],
    "cuDriverGetVersion": [c_void_p],
    "cuModuleLoadData": [c_void_p, ctypes.c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, ctypes.c_char_p],
    "cuModuleGetGlobal_v2": [c_void_p, c_void_p, c_void_p, ctypes.c_char_p],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuFuncLoad": [c_void_p],
    "cuLaunchKernelEx": None,  # the conversions of four arguments cost nearly half of a call
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamGetCaptureInfo_v2": [c_void_p, *[c_void_p] * 5],
    "cuStreamEndCapture": [c_void_p, c_void_p],
    "cuGraphInstantiateWithFlags": [c_void_p, c_void_p, c_uint64],
    "cuGraphExecKernelNodeSetParams_v2": [c_void_p, c_void_p, c_void_p],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuGraphDestroy": [c_void_p],
    "cuOccupancyMaxActiveClusters": [c_void_p, c_void_p, c_void_p],
    "cuTensorMapEncodeTiled": [
        *[c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
        *[c_int, c_int, c_int, c_int],
    ],
    "cuTensorMapReplaceAddress": [c_void_p, c_void_p],
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
    """A kernel, loaded: nothing is left to do at its first launch, which would wait for other streams."""

    def __init__(self, module: Module, name: str, shared_bytes: int) -> None:
        self.module, self.name, self.shared_bytes = module, name, shared_bytes  # keeps the module loaded
        self.handle = c_void_p()
        call("cuModuleGetFunction", byref(self.handle), module._handle, name.encode())
        if shared_bytes > 48 << 10:
            call("cuFuncSetAttribute", self.handle, _MAX_DYNAMIC_SHARED, shared_bytes)
        call("cuFuncLoad", self.handle)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[(f"{what}_{axis}", c_uint) for what in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    ]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", c_void_p),
        *[(f"{what}_{axis}", c_uint) for what in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", c_uint),
        *[(name, c_void_p) for name in ("arguments", "extra", "kernel", "context")],
    ]


class PreparedLaunch:
    """`args` are ctypes objects, kept alive here; changing them changes the next launch."""

    def __init__(self, function: Function, grid: int, block: int, args: Sequence[ctypes._CData]) -> None:
        self.args = list(args)
        self._function = function
        self._pointers = (c_void_p * len(self.args))(*[ctypes.addressof(a) for a in self.args])
        shared = function.shared_bytes
        self._config = _LaunchConfig(grid, 1, 1, block, 1, 1, shared)
        self._launch = _library().cuLaunchKernelEx
        self._fixed = (byref(self._config), function.handle, self._pointers, None)
        self._stream: int | None = None  # of the launch before
        pointers = ctypes.addressof(self._pointers)
        self.node = _KernelNode(function.handle, grid, 1, 1, block, 1, 1, shared, pointers)

    def launch(self, stream: int) -> None:
        """Enqueue on `stream` (a raw handle)."""
        if stream != self._stream:
            self._config.stream = self._stream = stream
        code = self._launch(*self._fixed)
        if code:
            _check(_library(), f"cuLaunchKernelEx({self._function.name})", code)

    def addresses(self) -> list[int]:
        """For who launches it in C: cuLaunchKernelEx, its configuration, the function, the arguments, and
        where the stream is in the configuration. They are good as long as this object is there."""
        self._stream = None  # unknown from now on
        config = ctypes.addressof(self._config)
        function = self._function.handle.value or 0
        stream = config + _LaunchConfig.stream.offset
        return [
            *(ctypes.cast(self._launch, c_void_p).value or 0, config, function),
            *(ctypes.addressof(self._pointers), stream),
        ]


_THREAD_LOCAL = 1  # other threads may go on allocating while this one records


class Graph:
    """Stream operations, recorded once and launched as one. Launches of one graph follow one another."""

    def __init__(self, record: Callable[[int], None], stream: int) -> None:
        """`record(stream)` enqueues the operations; side streams it forks have to be joined again. `stream`
        is idle and only used to record; nothing runs on it."""
        self._exec, graph = c_void_p(), c_void_p()
        call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        try:
            record(stream)
        finally:
            call("cuStreamEndCapture", stream, byref(graph))
        try:
            call("cuGraphInstantiateWithFlags", byref(self._exec), graph, 0)
        finally:
            self._graph = graph  # its nodes are the names by which arguments are changed
        self._launch = _library().cuGraphLaunch

    def set_arguments(self, node: int, launch: PreparedLaunch) -> None:
        """The kernel at `node` gets the arguments of `launch` as they are now."""
        call("cuGraphExecKernelNodeSetParams_v2", self._exec, node, byref(launch.node))

    def launch(self, stream: int) -> None:
        """Enqueue all of it."""
        code = self._launch(self._exec, stream)
        if code:
            _check(_library(), "cuGraphLaunch", code)

    def close(self) -> None:
        """Launches under way still end."""
        if self._exec:
            call("cuGraphExecDestroy", self._exec)
            call("cuGraphDestroy", self._graph)
            self._exec = c_void_p()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the process's end the driver may be gone before this
            self.close()


def newest_node(stream: int) -> int:
    """The node of the graph being recorded that the next operation on `stream` will follow."""
    status, number, graph, nodes, count = c_int(), c_uint64(), c_void_p(), c_void_p(), c_size_t()
    outputs = (byref(x) for x in (status, number, graph, nodes, count))
    call("cuStreamGetCaptureInfo_v2", stream, *outputs)
    if count.value != 1 or not nodes.value:
        raise DriverError(f"{count.value} nodes come before the next one of this stream: wanted one")
    return int(c_uint64.from_address(nodes.value).value)


class TensorMap(ctypes.Structure):
    """The opaque 128 bytes of a CUtensorMap, as a kernel argument or inside one (64-byte aligned there)."""

    _fields_ = [("words", c_uint64 * 16)]


_Struct = TypeVar("_Struct", bound=ctypes.Structure)
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


def aligned(kind: type[_Struct]) -> _Struct:
    """A zeroed struct at a multiple of 64 bytes, where ctypes puts them anywhere."""
    raw = (ctypes.c_uint8 * (ctypes.sizeof(kind) + 63))()
    return kind.from_buffer(raw, -ctypes.addressof(raw) % 64)


def point_at(tensor: TensorMap, address: int) -> None:
    """The same tensor at another address, a multiple of 16. `tensor` lies in an `aligned` struct."""
    call("cuTensorMapReplaceAddress", ctypes.addressof(tensor), address)


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
