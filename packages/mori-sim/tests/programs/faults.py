"""One fault of each kind: faults.py KIND [CODE_OBJECT]. Prints `returned CODE` if a call came back."""

import contextlib
import os
import resource
import sys
import time
from ctypes import addressof, c_int, c_int64, c_ubyte, c_uint64
from pathlib import Path

import hip


def sum_slices(code, source, slice_bytes, target, packs, stream=None):
    """8 slices of bf16, 8 elements a pack, as examples.py compiles it."""
    module = hip.KernelModule(code)
    module.launch(
        "sum_slices_0",
        (2, 1, 1),
        256,
        c_uint64(source),
        c_int64(slice_bytes),
        c_uint64(target),
        c_int(packs),
        queue=stream,
    )
    print("returned", hip.code_of("hipDeviceSynchronize"), flush=True)


def wild_load(code):
    sum_slices(code, 0x123450000, 512, hip.malloc(512), 32)


def past_the_end(code):
    sum_slices(
        code, hip.malloc(8 * 512), 512, hip.malloc(512 - 2), 32
    )  # the last store ends two bytes too late


def reserved_only(code):
    window = hip.Window(hip.GRANULE, 0, 2, 0, uncached=False)
    sum_slices(code, hip.malloc(8 * 512), 512, window.at(1), 32)


def peer_not_enabled(code):
    hip.call("hipSetDevice", 1)
    target = hip.malloc(512)
    hip.call("hipSetDevice", 0)
    sum_slices(code, hip.malloc(8 * 512), 512, target, 32)


def stuck(code):
    """A kernel polls a flag that nobody raises."""
    flags, seen = hip.malloc(64, uncached=True), hip.malloc(64)
    hip.view(flags, 64)[:] = bytes(64)
    module = hip.KernelModule(code)
    module.launch("await_flags_0", (1, 1, 1), 64, c_uint64(flags), c_int(41), c_uint64(seen))
    print("returned", hip.code_of("hipDeviceSynchronize"), flush=True)


def large_block(code):
    module = hip.KernelModule(code)
    a = hip.malloc(64)
    try:
        module.launch("sum_slices_0", (1, 1, 1), 2048, c_uint64(a), c_int64(64), c_uint64(a), c_int(0))
    except hip.HipError as error:
        print("returned", error.code, flush=True)


@contextlib.contextmanager
def no_descriptor_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    with contextlib.suppress(OSError):
        while True:
            fillers.append(os.open(os.devnull, os.O_RDONLY))
    yield
    for fd in fillers:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_descriptors(code):
    """Launches, first and later ones, at a moment when the process may open no file."""
    module = hip.KernelModule(code)
    source, target = (c_ubyte * 4096)(*[0, 0x40] * 2048), (c_ubyte * 512)()  # ordinary memory, bf16 2.0

    def launch():
        arguments = c_uint64(addressof(source)), c_int64(512), c_uint64(addressof(target)), c_int(32)
        module.launch("sum_slices_0", (1, 1, 1), 256, *arguments)
        hip.call("hipDeviceSynchronize")

    with no_descriptor_left():
        try:
            launch()
        except hip.HipError as error:
            print("returned", error.code, flush=True)
    launch()
    target[1] = 0
    with no_descriptor_left():
        launch()
    print("came", bytes(target[:4]).hex(), flush=True)


def post_and_look(*packets):
    hip.open_kmt()
    queue = hip.SdmaQueue(0, 2)
    queue.post(*packets)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        code = hip.library.hipPeekAtLastError()
        if code != 0:
            print("returned", code, flush=True)
            return
        time.sleep(0.002)


def bad_packet(_):
    post_and_look([0x77, 1, 2, 3])


def packet_out_of_range(_):
    a = hip.malloc(4096)
    post_and_look(hip.copy_packet(a + 100, a, 4000))


def doorbell_backwards(_):
    hip.open_kmt()
    queue = hip.SdmaQueue(0, 2)
    queue.resource.doorbell[0] = 3
    time.sleep(0.2)
    print("returned", hip.library.hipPeekAtLastError(), flush=True)


def doorbell_ahead(_):
    """The doorbell tells of packets, and the write pointer does not."""
    hip.open_kmt()
    queue = hip.SdmaQueue(0, 2)
    queue.put([0] * 8)
    queue.resource.doorbell[0] = queue.written
    time.sleep(0.2)
    print("returned", hip.library.hipPeekAtLastError(), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]) if len(sys.argv) > 2 else None)
