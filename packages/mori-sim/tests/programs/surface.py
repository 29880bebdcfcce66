"""The HIP and KMT entry points as a C program uses them, without FlyDSL or torch; `ok NAME` for each."""

import ctypes
import os
import struct
import sys
import threading
import time
from ctypes import byref, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p

import hip

ALL_BITS = c_uint64(2**64 - 1)


def raises(code, name, *arguments):
    got = hip.code_of(name, *arguments)
    assert got == code, f"{name}: {got} instead of {code}"


def devices():
    count, value = c_int(), c_int()
    hip.call("hipGetDeviceCount", byref(count))
    assert count.value == 8
    for device in range(8):
        hip.call("hipSetDevice", device)
        hip.call("hipGetDevice", byref(value))
        assert value.value == device
    hip.call("hipSetDevice", 0)
    raises(101, "hipSetDevice", 8)
    for attribute, want in (
        (63, 256),
        (87, 64),
        (74, 160 << 10),
        (23, 9),
        (10018, 8),
    ):  # CUs, wave, LDS, major, XCDs
        hip.call("hipDeviceGetAttribute", byref(value), attribute, 0)
        assert value.value == want
    properties = ctypes.create_string_buffer(1472)
    hip.call("hipGetDevicePropertiesR0600", properties, 3)
    assert properties.raw[1160:1166] == b"gfx950"
    assert struct.unpack_from("<i", properties.raw, 388)[0] == 256
    assert struct.unpack_from("<Q", properties.raw, 288)[0] == 288 << 30
    bus = {}
    for device in range(8):
        text = ctypes.create_string_buffer(32)
        hip.call("hipDeviceGetPCIBusId", text, 32, device)
        bus[text.value] = device
        hip.call("hipDeviceGetByPCIBusId", byref(value), text)
        assert value.value == device
    assert len(bus) == 8


def memory():
    free, total = c_size_t(), c_size_t()
    hip.call("hipMemGetInfo", byref(free), byref(total))
    before = free.value
    a, b = hip.malloc(1000), hip.malloc(1000, uncached=True)
    hip.call("hipMemGetInfo", byref(free), byref(total))
    assert before - free.value == 2000
    data = bytes(i * 7 % 256 for i in range(1000))
    hip.call("hipMemcpy", c_void_p(a), data, c_size_t(1000), 1)
    hip.call("hipMemcpy", c_void_p(b), c_void_p(a), c_size_t(1000), 3)
    back = ctypes.create_string_buffer(1000)
    hip.call("hipMemcpy", back, c_void_p(b), c_size_t(1000), 2)
    assert back.raw == data
    raises(1, "hipMemcpy", c_void_p(a), c_void_p(b + 1), c_size_t(1000), 3)  # one byte too far
    raises(1, "hipMemset", c_void_p(a + 999), 0, c_size_t(2))
    large, zeroed = hip.malloc(66 << 20), (64 << 20) + 100  # the last page of a large fill is not all of it
    hip.call("hipMemset", c_void_p(large), 7, c_size_t(66 << 20))
    hip.call("hipMemset", c_void_p(large), 0, c_size_t(zeroed))
    hip.synchronize()
    assert bytes(hip.view(large, 66 << 20)) == bytes(zeroed) + b"\7" * ((66 << 20) - zeroed)
    hip.free(large)
    base, nbytes = c_void_p(), c_size_t()
    hip.call("hipMemGetAddressRange", byref(base), byref(nbytes), c_void_p(a + 500))
    assert (base.value, nbytes.value) == (a, 1000)
    attributes = ctypes.create_string_buffer(32)
    hip.call("hipPointerGetAttributes", attributes, c_void_p(b))
    assert struct.unpack_from("<ii", attributes.raw) == (2, 0)
    hip.call("hipMemsetD32Async", c_void_p(a), 0x01020304, c_size_t(250), None)
    hip.synchronize()
    assert bytes(hip.view(a, 1000)) == bytes([4, 3, 2, 1]) * 250
    hip.free(a)
    raises(1, "hipFree", c_void_p(a))
    hip.free(b)
    hip.call("hipMemGetInfo", byref(free), byref(total))
    assert free.value == before
    raises(2, "hipMalloc", byref(base), c_size_t(300 << 30))


def host_memory():
    pinned, alias = c_void_p(), c_void_p()
    hip.call("hipHostMalloc", byref(pinned), c_size_t(64), 0)
    hip.call("hipHostGetDevicePointer", byref(alias), pinned, 0)
    assert alias.value == pinned.value
    hip.call("hipHostFree", pinned)
    own = ctypes.create_string_buffer(256)
    hip.call("hipHostRegister", own, c_size_t(256), 0)
    raises(712, "hipHostRegister", own, c_size_t(256), 0)
    hip.call("hipHostUnregister", own)
    raises(713, "hipHostUnregister", own)


def windows():
    window = hip.Window(hip.GRANULE, 0, 4, 0, uncached=True)
    other = hip.Window(hip.GRANULE, 1, 4, 1, uncached=False)
    fd = other.export()
    window.bring_in(1, fd)
    os.close(fd)
    hip.view(other.at(1, 4096), 5)[:] = b"hello"
    assert bytes(hip.view(window.at(1, 4096), 5)) == b"hello"
    raises(1, "hipMemAddressFree", c_void_p(window.base), c_size_t(4 * hip.GRANULE))  # still mapped
    raises(
        1,
        "hipMemMap",
        c_void_p(window.at(1)),
        c_size_t(hip.GRANULE),
        c_size_t(0),
        window.handles[0],
        c_uint64(0),
    )
    raises(1, "hipMemset", c_void_p(window.at(2)), 0, c_size_t(1))  # reserved, never mapped
    read, write = os.pipe()
    raises(1, "hipMemImportFromShareableHandle", byref(c_void_p()), c_void_p(read), c_int(1))
    os.close(read), os.close(write)
    window.close()
    other.close()


def streams():
    a, flag = hip.malloc(1000), hip.malloc(8, uncached=True)
    hip.view(flag, 8)[:] = bytes(8)
    first, second, event, later = hip.stream(), hip.stream(), hip.event(), hip.event()
    hip.call("hipStreamWaitValue64", first, c_void_p(flag), c_uint64(5), c_uint32(0), ALL_BITS)
    hip.call("hipMemsetAsync", c_void_p(a), 9, c_size_t(1000), first)
    hip.call("hipEventRecord", event, first)
    hip.call("hipStreamWaitEvent", second, event, 0)
    hip.call("hipMemsetAsync", c_void_p(a), 3, c_size_t(500), second)
    hip.call("hipEventRecord", later, second)
    raises(600, "hipStreamQuery", second)
    raises(600, "hipEventQuery", later)
    third = hip.stream()
    hip.call("hipStreamWriteValue64", third, c_void_p(flag), c_uint64(5), c_uint32(0))
    hip.call("hipEventSynchronize", later)
    assert bytes(hip.view(a, 1000)) == b"\3" * 500 + b"\11" * 500
    ms = c_float(-1)
    hip.call("hipEventElapsedTime", byref(ms), event, later)
    assert ms.value >= 0
    called = threading.Event()
    callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: called.set())
    hip.call("hipLaunchHostFunc", third, callback, None)
    hip.call("hipStreamSynchronize", third)
    assert called.is_set()
    raises(400, "hipStreamSynchronize", c_void_p(a))  # no stream at all
    for stream in (first, second, third):
        hip.call("hipStreamDestroy", stream)


def null_stream():
    """Blocking streams and the null stream never overlap; a non-blocking stream stays out of it."""
    flag = hip.malloc(8, uncached=True)
    hip.view(flag, 8)[:] = bytes(8)
    a = hip.malloc(64)
    blocking, free = c_void_p(), hip.stream()
    hip.call("hipStreamCreate", byref(blocking))
    hip.call("hipStreamWaitValue32", blocking, c_void_p(flag), c_uint32(1), c_uint32(0), c_uint32(0xFFFFFFFF))
    hip.call("hipMemsetAsync", c_void_p(a), 1, c_size_t(64), None)  # null stream: behind the wait
    hip.call("hipMemsetAsync", c_void_p(a), 2, c_size_t(64), free)
    hip.call("hipStreamSynchronize", free)
    raises(600, "hipStreamQuery", None)
    assert set(hip.view(a, 64)) == {2}
    hip.call("hipStreamWriteValue32", free, c_void_p(flag), c_uint32(1), c_uint32(0))
    hip.synchronize()
    assert set(hip.view(a, 64)) == {1}


def graphs():
    a, b = hip.malloc(500), hip.malloc(500)
    main, side, event = hip.stream(), hip.stream(), hip.event()
    hip.call("hipStreamBeginCapture", main, 0)
    hip.call("hipMemsetAsync", c_void_p(a), 1, c_size_t(500), main)
    hip.call("hipEventRecord", event, main)
    hip.call("hipStreamWaitEvent", side, event, 0)
    hip.call("hipMemcpyAsync", c_void_p(b), c_void_p(a), c_size_t(500), 3, side)
    hip.call("hipEventRecord", event, side)
    hip.call("hipStreamWaitEvent", main, event, 0)
    hip.call("hipMemsetAsync", c_void_p(a), 2, c_size_t(500), main)
    graph, executable = c_void_p(), c_void_p()
    hip.call("hipStreamEndCapture", main, byref(graph))
    hip.view(a, 500)[:] = bytes(500)
    assert set(hip.view(a, 500)) == {0}  # captured, not run
    hip.call("hipGraphInstantiate", byref(executable), graph, None, None, c_size_t(0))
    for _ in range(5):
        hip.view(b, 500)[:] = bytes(500)
        hip.call("hipGraphLaunch", executable, main)
        hip.call("hipStreamSynchronize", main)
        assert set(hip.view(b, 500)) == {1}
        assert set(hip.view(a, 500)) == {2}
    hip.call("hipGraphExecDestroy", executable)
    hip.call("hipGraphDestroy", graph)


def ipc():
    ready, done = os.pipe(), os.pipe()
    if os.fork() == 0:  # the child is forked before the node of this process is used: see the order of CHECKS
        a = hip.malloc(300)
        hip.view(a, 300)[:] = b"x" * 300
        handle = ctypes.create_string_buffer(64)
        hip.call("hipIpcGetMemHandle", handle, c_void_p(a + 100))
        os.write(ready[1], handle.raw)
        os.read(done[0], 1)
        os._exit(0 if hip.view(a + 100, 1)[0] == ord("y") else 1)

    class Handle(ctypes.Structure):
        _fields_ = (("raw", ctypes.c_ubyte * 64),)

    handle = Handle.from_buffer_copy(os.read(ready[0], 64))
    mapped = c_void_p()
    hip.call("hipIpcOpenMemHandle", byref(mapped), handle, c_uint32(1))
    assert set(hip.view(mapped.value, 200)) == {ord("x")}
    hip.view(mapped.value, 1)[0] = ord("y")
    os.write(done[1], b"d")
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    hip.call("hipIpcCloseMemHandle", mapped)


def fork_is_refused():
    hip.malloc(16)
    child = os.fork()
    if child == 0:
        os._exit(0 if hip.code_of("hipMalloc", byref(c_void_p()), c_size_t(16)) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def queues():
    hip.open_kmt()
    properties = (c_uint32 * 8)()
    hip.kmt_call("hsaKmtAcquireSystemProperties", properties)
    assert properties[0] == 9
    for device in range(8):
        masks = [hip.recommended_engines(device, peer, 8) for peer in range(8) if peer != device]
        assert len(set(masks)) == 7  # every peer has engines of its own
    source, target, signal = hip.malloc(5000), hip.malloc(5000), hip.malloc(64, uncached=True)
    hip.view(signal, 64)[:] = bytes(64)
    queue = hip.SdmaQueue(0, 3, 256)
    for i in range(1, 60):  # many times round a ring that holds three puts
        hip.view(source, 5000)[:] = bytes([i]) * 5000
        queue.post(hip.copy_packet(target, source, 5000), hip.add64_packet(signal, 1))
        end = time.monotonic() + 20
        while hip.view(signal, 8).cast("Q")[0] < i:
            assert time.monotonic() < end
        assert set(hip.view(target, 5000)) == {i}
    queue.post(hip.poll_packet(signal + 8, 7), hip.fence_packet(signal + 16, 1))  # waits for us
    time.sleep(0.05)
    assert hip.view(signal + 16, 1)[0] == 0
    hip.view(signal + 8, 4).cast("I")[0] = 7
    end = time.monotonic() + 20
    while hip.view(signal + 16, 1)[0] == 0:
        assert time.monotonic() < end
    queue.close()


def queue_limits():
    hip.open_kmt()
    many = [hip.SdmaQueue(1, 5) for _ in range(8)]
    for engine, status in ((5, 1), (16, 3)):
        got = 0
        try:
            hip.SdmaQueue(1, engine)
        except hip.KmtError as error:
            got = error.status
        assert got == status, engine
    many.pop().close()
    many.append(hip.SdmaQueue(1, 5))
    for queue in many:
        queue.close()
    memory = c_void_p(hip.malloc(4096))
    arguments = (c_uint32(1), c_int(6), c_uint32(100), c_int(0), memory, c_uint64(4096), None)
    assert hip.kmt.hsaKmtCreateQueue(*arguments, byref((c_uint64 * 5)())) == 1


def errors():
    assert hip.library.hipGetErrorName(700) == b"hipErrorIllegalAddress"
    hip.library.hipGetLastError()
    raises(101, "hipSetDevice", 99)
    assert hip.library.hipPeekAtLastError() == 101
    assert hip.library.hipGetLastError() == 101
    assert hip.library.hipGetLastError() == 0
    module = c_void_p()
    raises(200, "hipModuleLoadData", byref(module), b"\x7fELF" + bytes(4096))
    raises(301, "hipModuleLoad", byref(module), b"/nowhere/kernel.hsaco")


def both_names_are_one_node():
    other = ctypes.CDLL("libamdhip64.so")
    hip.call("hipSetDevice", 5)
    value = c_int()
    assert other.hipGetDevice(byref(value)) == 0
    assert value.value == 5
    hip.call("hipSetDevice", 0)


CHECKS = (
    ipc,
    devices,
    memory,
    host_memory,
    windows,
    streams,
    null_stream,
    graphs,
    fork_is_refused,
    queues,
    queue_limits,
    errors,
    both_names_are_one_node,
)

if __name__ == "__main__":
    for check in CHECKS:
        if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
            check()
            print(f"ok {check.__name__}", flush=True)
