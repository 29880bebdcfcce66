"""Copies that follow close on what they wait for, and memory that comes out again as something else.

    records.py NAME ...     the functions of RIGHT and WRONG; `ok NAME` for each that came to its end

What the checker knows of memory has to change together with memory, or it blames programs that are right.
In RIGHT strict mode must have nothing to say. WRONG are some of them with one step left out.
"""

import contextlib
import ctypes
import struct
import sys
import time
from ctypes import c_size_t, c_uint64, c_void_p

import flydsl.compiler as flyc
import flydsl.expr as fx
import hip
from device import ORDER, pointer
from hip import GRANULE

LANES, NBYTES, PAGE, WPTR = 64, 64 * 16, 4096, 64
DEADLINE_S = 30


def ringer(waits):
    @flyc.kernel
    def ring_nops(ring: fx.Int64, wptr: fx.Int64, doorbell: fx.Int64):
        """One wave posts 1024 bytes of NOPs to a new queue."""
        lane = fx.thread_idx.x
        fx.generic_store(pointer(fx.Int32, ring, 16) + lane * 4, fx.Vector.filled(4, 0, fx.Int32))
        if fx.const_expr(waits):
            fx.rocdl.s_waitcnt(vmcnt=0)
        if lane == 0:
            fx.generic_store(pointer(fx.Int64, wptr, 8), fx.Int64(NBYTES), memory_order=ORDER.Monotonic)
            fx.rocdl.s_waitcnt(vmcnt=0)
            fx.generic_store(pointer(fx.Int64, doorbell, 8), fx.Int64(NBYTES), memory_order=ORDER.Monotonic)

    @flyc.jit
    def launch(ring: fx.Int64, wptr: fx.Int64, doorbell: fx.Int64, stream: fx.Stream = fx.Stream(None)):
        ring_nops(ring, wptr, doorbell).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)

    return launch


launch_ring, launch_hasty_ring = ringer(True), ringer(False)


@flyc.kernel
def fill(target: fx.Int64, gate: fx.Int64, end: fx.Int64):
    """Sevens, once `gate` is not 0; it ends once `end` is not."""
    lane = fx.thread_idx.x
    seen = fx.generic_load(pointer(fx.Int32, gate, 4), memory_order=ORDER.Monotonic)
    while seen < 1:
        fx.rocdl.s_sleep(1)
        seen = fx.generic_load(pointer(fx.Int32, gate, 4), memory_order=ORDER.Monotonic)
    fx.generic_store(pointer(fx.Int32, target, 16) + lane * 4, fx.Vector.filled(4, 7, fx.Int32))
    seen = fx.generic_load(pointer(fx.Int32, end, 4), memory_order=ORDER.Monotonic)
    while seen < 1:
        fx.rocdl.s_sleep(1)
        seen = fx.generic_load(pointer(fx.Int32, end, 4), memory_order=ORDER.Monotonic)


@flyc.jit
def launch_fill(target: fx.Int64, gate: fx.Int64, end: fx.Int64, stream: fx.Stream = fx.Stream(None)):
    fill(target, gate, end).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)


def filled(target, stream=0):
    launch_fill(target, word(1), word(1), stream=stream)


@flyc.kernel
def fill_and_tell(target: fx.Int64, flag: fx.Int64, value: fx.Int32):
    """Sevens, published, then `value` in `flag`."""
    lane = fx.thread_idx.x
    fx.generic_store(pointer(fx.Int32, target, 16) + lane * 4, fx.Vector.filled(4, 7, fx.Int32))
    fx.memory_fence(ordering=ORDER.Release)
    if lane == 0:
        fx.generic_store(pointer(fx.Int32, flag, 4), value, memory_order=ORDER.Monotonic)


@flyc.jit
def launch_fill_and_tell(
    target: fx.Int64, flag: fx.Int64, value: fx.Int32, stream: fx.Stream = fx.Stream(None)
):
    fill_and_tell(target, flag, value).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)


@flyc.kernel
def count(word: fx.Int64):
    """Each of four workgroups adds 1, and stores 1 in the word behind it."""
    if fx.thread_idx.x == 0:
        fx.atomic_add(pointer(fx.Int64, word, 8), fx.Int64(1), syncscope="one-as")
        fx.generic_store(pointer(fx.Int64, word + 8, 8), fx.Int64(1), memory_order=ORDER.Monotonic)


@flyc.jit
def launch_count(word: fx.Int64, stream: fx.Stream = fx.Stream(None)):
    count(word).launch(grid=(4, 1, 1), block=(LANES, 1, 1), stream=stream)


def words_of(queue):
    return [ctypes.cast(w, c_void_p).value for w in (queue.resource.wptr, queue.resource.doorbell)]


def ring_by_kernel(queue, launch=launch_ring):
    launch(queue.ring, *words_of(queue), stream=0)
    hip.synchronize()
    until(lambda: queue.read == NBYTES)
    queue.written = NBYTES


def until(come):
    end = time.monotonic() + DEADLINE_S
    while not come():
        assert time.monotonic() < end, "late"
        time.sleep(0.0005)


def word(value=0):
    """Two words, uncached."""
    address = hip.malloc(64, uncached=True)
    put(address, value)
    return address


def put(address, value):
    """By the host itself, which no library sees."""
    hip.view(address, 16)[:] = struct.pack("<qq", value, 0)


def copied(queue, source, *before):
    """Copies what kernels filled, behind `before`, and waits for it in the function that it returns."""
    target, done = hip.malloc(NBYTES), word()
    queue.post(*before, hip.copy_packet(target, source, NBYTES), hip.fence_packet(done, 1))

    def check():
        until(lambda: hip.view(done, 4)[0])
        assert bytes(hip.view(target, NBYTES)) == struct.pack("<i", 7) * (NBYTES // 4), "wrong bytes"

    return check


def take_pages(wanted):
    """Allocates pages until it has these addresses; returns the others."""
    wanted, others = set(wanted), []
    for _ in range(4096):
        page = hip.SdmaQueue.ring_memory(0)
        if page in wanted:
            wanted.remove(page)
        else:
            others.append(page)
        if not wanted:
            return others
    raise AssertionError("the pages did not come back")


@contextlib.contextmanager
def queue_in_the_place_of_another():
    """Its ring lies where the pointers were, its pointers where the ring was; a kernel stored to both."""
    old = hip.SdmaQueue(0, 2)
    ring_by_kernel(old)
    ring, page = old.ring, words_of(old)[0] - WPTR
    old.close()
    others = take_pages((ring, page))
    hip.free_ring(ring)
    queue = hip.SdmaQueue(0, 2, ring=page)
    assert words_of(queue)[0] == ring + WPTR
    yield queue
    queue.close()
    for memory in (page, *others):
        hip.free_ring(memory)


def memory_that_was_a_queue():
    with queue_in_the_place_of_another() as queue:
        source, target, done = hip.malloc(NBYTES), hip.malloc(NBYTES), word()
        filled(source)
        hip.synchronize()
        packets = hip.copy_packet(target, source, 64), hip.fence_packet(done, 1)
        queue.post(*packets, *packets)  # the second copy lies across what was the write pointer
        copied(queue, source)()


def hasty_ring():
    """Here a wave does not wait for its packets before it stores the write pointer."""
    with queue_in_the_place_of_another() as queue:
        ring_by_kernel(queue, launch_hasty_ring)


def pointers_that_were_a_queues():
    """Waves store to what was a write pointer, as they like."""
    old = hip.SdmaQueue(0, 2)
    page = words_of(old)[0] - WPTR
    old.close()
    others = take_pages((page,))
    launch_count(page + WPTR - 8, stream=0)
    hip.synchronize()
    assert hip.view(page + WPTR, 1)[0] == 1
    for memory in (page, *others):
        hip.free_ring(memory)


def host_after_kernel():
    """A kernel rings, and then the host, for what a later kernel stored."""
    queue, source = hip.SdmaQueue(0, 2), hip.malloc(NBYTES)
    ring_by_kernel(queue)
    filled(source)
    hip.synchronize()
    copied(queue, source)()
    queue.close()


def behind_a_poll(tell):
    """The copy is posted first; what `tell` does ends its wait. Twice: the word has a history then."""
    queue, go = hip.SdmaQueue(0, 2), word()
    for turn in (1, 2):
        source = hip.malloc(NBYTES)
        check = copied(queue, source, hip.poll_packet(go, turn))
        tell(source, go, turn)
        check()
        hip.synchronize()
    queue.close()


def stream_opens():
    def tell(source, go, turn):
        filled(source)
        hip.call("hipStreamWriteValue64", None, c_void_p(go), c_uint64(turn), 0)

    behind_a_poll(tell)


def stream_copy_opens():
    def tell(source, go, turn):
        filled(source)
        hip.call("hipMemcpyAsync", c_void_p(go), c_void_p(word(turn)), c_uint64(8), 1, None)

    behind_a_poll(tell)


def graph_opens():
    def tell(source, go, turn):
        stream, graph, executable = hip.stream(), c_void_p(), c_void_p()
        hip.call("hipStreamBeginCapture", stream, 0)
        filled(source, stream=stream.value)
        hip.call("hipStreamWriteValue64", stream, c_void_p(go), c_uint64(turn), 0)
        launch_count(word(), stream=stream.value)
        hip.call("hipStreamEndCapture", stream, ctypes.byref(graph))
        hip.call("hipGraphInstantiate", ctypes.byref(executable), graph, None, None, c_uint64(0))
        hip.call("hipGraphLaunch", executable, stream)

    behind_a_poll(tell)


def host_opens():
    def tell(source, go, turn):
        filled(source)
        hip.synchronize()
        put(go, turn)

    behind_a_poll(tell)


def another_stream_opens():
    """The kernel that fills the source has not ended, and another stream does not wait for it."""

    def tell(source, go, turn):
        filling, other, end = hip.stream(), hip.stream(), word()
        launch_fill(source, word(1), end, stream=filling.value)
        until(lambda: hip.view(source + NBYTES - 4, 1)[0] == 7)
        hip.call("hipStreamWriteValue64", other, c_void_p(go), c_uint64(turn), 0)
        hip.call("hipStreamSynchronize", other)
        time.sleep(0.05)
        put(end, 1)

    behind_a_poll(tell)


def kernel_opens():
    behind_a_poll(lambda source, go, turn: launch_fill_and_tell(source, go, turn, stream=0))


def kernels_and_engine_count():
    """All add to one word, in no order."""
    queue, sum_of_all, done = hip.SdmaQueue(0, 2), word(), word()
    launch_count(sum_of_all, stream=0)
    for i in range(8):
        queue.post(hip.add64_packet(sum_of_all, 1), hip.fence_packet(done, i + 1))
        launch_count(sum_of_all, stream=0)
    hip.synchronize()
    until(lambda: hip.view(done, 1)[0] == 8)
    assert hip.view(sum_of_all, 1)[0] == 9 * 4 + 8
    queue.close()


def first_launched_ends_last():
    queue, source, gate = hip.SdmaQueue(0, 2), hip.malloc(NBYTES), word()
    first, second = hip.stream(), hip.stream()
    launch_fill(source, gate, word(1), stream=first.value)
    filled(hip.malloc(NBYTES), stream=second.value)
    hip.call("hipStreamSynchronize", second)
    put(gate, 1)
    hip.call("hipStreamSynchronize", first)
    copied(queue, source)()
    queue.close()


def mapped(*parts):
    """One range of addresses in which parts (handle, offset, bytes) follow each other."""
    nbytes, place = sum(n for _, _, n in parts), c_void_p()
    hip.call("hipMemAddressReserve", ctypes.byref(place), c_size_t(nbytes), c_size_t(0), None, c_uint64(0))
    at = place.value
    for handle, offset, n in parts:
        hip.call("hipMemMap", c_void_p(at), c_size_t(n), c_size_t(offset), handle, c_uint64(0))
        at += n
    hip.call("hipMemSetAccess", place, c_size_t(nbytes), struct.pack("<iii", 1, 0, 3), c_size_t(1))
    return place.value


def handle_of(granules):
    handle, properties = c_void_p(), struct.pack("<iiiiQBBHi", 1, 1, 1, 0, 0, 0, 0, 0, 0)
    hip.call("hipMemCreate", ctypes.byref(handle), c_size_t(granules * GRANULE), properties, c_uint64(0))
    return handle


@contextlib.contextmanager
def kernel_that_has_not_ended(target):
    """It has filled the target."""
    filling, end = hip.stream(), word()
    launch_fill(target, word(1), end, stream=filling.value)
    until(lambda: hip.view(target + NBYTES - 4, 1)[0] == 7)
    yield
    put(end, 1)
    hip.synchronize()


def half_of_a_handle_beside_another():
    """The second half of one lies behind another; the first half, elsewhere, is not that other's memory."""
    halves, other = handle_of(2), handle_of(1)
    beside = mapped((other, 0, GRANULE), (halves, GRANULE, GRANULE))
    first = mapped((halves, 0, GRANULE))
    queue = hip.SdmaQueue(0, 2)
    filled(first)
    hip.synchronize()
    with kernel_that_has_not_ended(beside):
        copied(queue, first)()
    hip.call("hipMemUnmap", c_void_p(first), c_size_t(GRANULE))
    with kernel_that_has_not_ended(beside):
        filled(beside + GRANULE)
    hip.synchronize()
    copied(queue, mapped((halves, 0, 2 * GRANULE)) + GRANULE)()  # all of it, by now at two addresses
    queue.close()


def half_of_a_handle_at_two_addresses():
    """The kernel that fills it by one of them has not ended."""
    halves = handle_of(2)
    mapped((halves, 0, GRANULE))
    second, queue = mapped((halves, GRANULE, GRANULE)), hip.SdmaQueue(0, 2)
    with kernel_that_has_not_ended(mapped((halves, 0, 2 * GRANULE)) + GRANULE):
        copied(queue, second)()
    queue.close()


def copy_across_two_mappings():
    """Of the second, a kernel that has not ended has stored the bytes, by another address."""
    one, other = handle_of(1), handle_of(1)
    by_itself, queue = mapped((other, 0, GRANULE)), hip.SdmaQueue(0, 2)
    across = mapped((one, 0, GRANULE), (other, 0, GRANULE)) + GRANULE - 64
    filled(across)
    hip.synchronize()
    with kernel_that_has_not_ended(by_itself):
        copied(queue, across)()
    queue.close()


def many_queues_one_after_the_other():
    """None of them shares its doorbell with one that lives."""
    kept = hip.SdmaQueue(0, 2)
    for _ in range(1030):
        queue = hip.SdmaQueue(0, 3)
        assert words_of(queue)[1] != words_of(kept)[1]
        queue.close()
    kept.close()


RIGHT = (
    memory_that_was_a_queue,
    pointers_that_were_a_queues,
    host_after_kernel,
    stream_opens,
    stream_copy_opens,
    graph_opens,
    host_opens,
    kernel_opens,
    kernels_and_engine_count,
    first_launched_ends_last,
    many_queues_one_after_the_other,
    half_of_a_handle_beside_another,
)
WRONG = (hasty_ring, another_stream_opens, half_of_a_handle_at_two_addresses, copy_across_two_mappings)


if __name__ == "__main__":
    hip.open_kmt()
    for name in sys.argv[1:] or [case.__name__ for case in RIGHT]:
        globals()[name]()
        print(f"ok {name}", flush=True)
