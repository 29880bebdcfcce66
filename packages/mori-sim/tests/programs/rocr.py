"""SDMA queues through libhsa-runtime64: find the agent, create, copy, run out of queues, destroy."""

import struct
import time
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    memmove,
)  # fmt: skip

import hip

hsa = CDLL("libhsa-runtime64.so.1")
INVALID_ARGUMENT, INVALID_CREATION, OUT_OF_RESOURCES = 0x1001, 0x1002, 0x1008
DEVICE, BDF, READ, WRITE, ENGINE = 17, 0xA006, 15, 16, 14


class Queue(Structure):
    _fields_ = [
        ("type", c_uint32), ("features", c_uint32), ("base", c_void_p), ("doorbell_signal", c_uint64),
        ("nbytes", c_uint32), ("reserved", c_uint32), ("id", c_uint64),
    ]  # fmt: skip


class Description(Structure):
    _fields_ = [
        ("version", c_uint16), ("flags", c_uint16), ("engine_type", c_uint8), ("reserved0", c_uint8 * 3),
        ("nbytes", c_uint32), ("priority", c_int), ("callback", c_void_p), ("callback_data", c_void_p),
        ("queue", POINTER(Queue)), ("engine_id", c_uint32), ("reserved1", c_uint32 * 7),
        ("traffic_class", c_uint32), ("reserved2", c_uint8 * 20),
    ]  # fmt: skip


def agents() -> list[int]:
    found = []
    look = CFUNCTYPE(c_int, c_uint64, c_void_p)(lambda agent, _: found.append(agent) or 0)
    assert hsa.hsa_iterate_agents(look, None) == 0
    return [agent for agent in found if info(agent, DEVICE) == 1]


def info(agent: int, attribute: int) -> int:
    value = c_uint32()
    assert hsa.hsa_agent_get_info(c_uint64(agent), attribute, byref(value)) == 0
    return value.value


def describe(engine: int, flags: int = 0, **other: int) -> Description:
    values = {"version": 1, "engine_type": 1, "nbytes": 4096, "priority": 1} | other
    return Description(flags=flags, engine_id=engine, **values)


def create(agent: int, wanted: Description) -> int:
    return hsa.hsa_amd_queue_create(c_uint64(agent), byref(wanted), c_uint32(1))


def queue_info(queue: object, attribute: int) -> int:
    value = c_uint64()
    assert hsa.hsa_amd_queue_get_info(queue, attribute, byref(value)) == 0
    return value.value


def copies(agent: int, flags: int) -> None:
    wanted = describe(3, flags)
    assert create(agent, wanted) == 0
    queue = wanted.queue
    assert queue_info(queue, ENGINE) == 3
    doorbell = c_uint64.from_address(queue.contents.doorbell_signal + 8).value
    assert c_int64.from_address(queue.contents.doorbell_signal).value == -1
    source, target, done = hip.malloc(4096), hip.malloc(4096), hip.malloc(64, uncached=True)
    hip.view(source, 4096)[:] = bytes(i % 251 for i in range(4096))
    hip.view(done, 64)[:] = bytes(64)
    packets = hip.copy_packet(target, source, 4096) + hip.fence_packet(done, 1)
    memmove(queue.contents.base, struct.pack(f"<{len(packets)}I", *packets), 4 * len(packets))
    c_uint64.from_address(queue_info(queue, WRITE)).value = 4 * len(packets)
    c_uint64.from_address(doorbell).value = 4 * len(packets)
    end = time.monotonic() + 20
    while not hip.view(done, 4)[0]:
        assert time.monotonic() < end
    assert bytes(hip.view(target, 4096)) == bytes(hip.view(source, 4096))
    assert c_uint64.from_address(queue_info(queue, READ)).value == 4 * len(packets)
    assert hsa.hsa_queue_destroy(queue) == 0
    assert hsa.hsa_queue_destroy(queue) != 0


def main() -> None:
    words = c_char_p()
    assert hsa.hsa_init() == 0
    gpus = agents()
    assert [info(agent, BDF) for agent in gpus] == [0x1000 + 0x1000 * i for i in range(len(gpus))]
    mask = c_uint32()
    get = hsa.hsa_amd_memory_get_preferred_copy_engine
    assert get(c_uint64(gpus[1]), c_uint64(gpus[0]), byref(mask)) == 0
    assert mask.value == hip.recommended_engines(0, 1, len(gpus))
    copies(gpus[0], 0)
    copies(gpus[0], 1)
    for refused, wanted in (
        (INVALID_ARGUMENT, describe(3, version=2)),
        (INVALID_ARGUMENT, describe(3, nbytes=5000)),
        (INVALID_ARGUMENT, describe(3, traffic_class=1)),
        (INVALID_CREATION, describe(99)),
        (INVALID_CREATION, describe(3, engine_type=0)),
    ):
        assert create(gpus[0], wanted) == refused
        assert not wanted.queue
    made = [describe(5) for _ in range(9)]
    assert [create(gpus[0], wanted) for wanted in made] == [0] * 8 + [OUT_OF_RESOURCES]
    assert hsa.hsa_status_string(OUT_OF_RESOURCES, byref(words)) == 0
    print("rocr works:", words.value.decode())


if __name__ == "__main__":
    hip.open_kmt()
    main()
