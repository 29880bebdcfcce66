"""Random bytes as packets and as code: fuzz.py packets|code TRIALS SEED [CODE_OBJECT].

Every trial is a forked process of its own, since a fault is final. It may end well (0) or with a fault (70);
a signal, or any other end, is what this program looks for. Prints how the trials ended.
"""

import os
import random
import struct
import sys
import time
from collections import Counter
from ctypes import c_int, c_int64, c_uint64
from functools import partial
from pathlib import Path

import hip

TRIAL_S = 20
FAULT = 70


def packets_trial(source: random.Random) -> None:
    hip.open_kmt()
    memory = hip.malloc(1 << 16)
    queue = hip.SdmaQueue(0, source.randrange(16), 4096)
    near = [memory, memory + 8, memory + (1 << 16) - 64, queue.ring]
    for _ in range(source.randrange(1, 12)):
        kind = source.randrange(5)
        if kind == 0:
            packet = [source.getrandbits(32) for _ in range(source.randrange(1, 9))]
        elif kind == 1:
            packet = hip.copy_packet(
                source.choice(near), source.choice(near), source.choice([1, 7, 64, 1 << 20, 1 << 30])
            )
        elif kind == 2:
            packet = [
                10 | source.randrange(128) << 25,
                *hip.halves(source.choice(near)),
                *(source.getrandbits(32) for _ in range(4)),
                0,
            ]
        elif kind == 3:
            packet = [
                11 | source.randrange(4) << 30,
                *hip.halves(source.choice(near)),
                source.getrandbits(32),
                source.getrandbits(22),
            ]
        else:
            packet = [
                source.randrange(18),
                *hip.halves(source.choice(near)),
                *(source.getrandbits(8) for _ in range(source.randrange(6))),
            ]
        if 4 * len(packet) + queue.written - queue.read < queue.nbytes:
            queue.post(packet)
    end = time.monotonic() + 0.05
    while queue.read < queue.written and time.monotonic() < end and hip.library.hipPeekAtLastError() == 0:
        pass


def code_trial(source: random.Random, image: bytes, text: tuple[int, int]) -> None:
    """Some or all dwords of the kernel are replaced; the last one stays, so that some trials can end."""
    start, nbytes = text
    mutated = bytearray(image)
    places = range(start, start + nbytes - 4, 4)
    for place in places if source.random() < 0.3 else source.sample(places, source.randrange(1, 12)):
        if source.random() < 0.5:
            word = source.getrandbits(32)
        else:  # a dword of the same kernel elsewhere, perhaps with a bit flipped: more likely to decode
            word = struct.unpack_from("<I", image, source.choice(places))[0] ^ (1 << source.randrange(32))
        struct.pack_into("<I", mutated, place, word)
    module = hip.KernelModule(bytes(mutated))
    a = hip.malloc(8 * 512)
    module.launch("sum_slices_0", (3, 1, 1), 256, c_uint64(a), c_int64(512), c_uint64(a), c_int(32))
    hip.code_of("hipDeviceSynchronize")


def text_of(image: bytes) -> tuple[int, int]:
    """File offset and size of the executable segment."""
    (at,), (count,) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<H", image, 56)
    for i in range(count):
        kind, flags, offset, _, _, nbytes = struct.unpack_from("<IIQQQQ", image, at + 56 * i)
        if kind == 1 and flags & 1:
            return offset, nbytes
    raise LookupError("no code")


def run_trial(trial) -> str:
    child = os.fork()
    if child == 0:
        quiet = os.open("/dev/null", os.O_WRONLY)
        os.dup2(quiet, 2)
        trial()
        sys.exit(0)
    end = time.monotonic() + TRIAL_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return {0: "well", FAULT: "fault"}.get(code, f"CODE {code}")
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "HANG"


def main() -> int:
    what, trials, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    image = Path(sys.argv[4]).read_bytes() if what == "code" else b""
    text = text_of(image) if image else (0, 0)
    ends: Counter[str] = Counter()
    for i in range(trials):
        source = random.Random(f"{seed} {i}")
        trial = partial(code_trial, source, image, text) if image else partial(packets_trial, source)
        end = run_trial(trial)
        ends[end] += 1
        if end not in ("well", "fault"):
            print(f"trial {i} of seed {seed}: {end}", flush=True)
    print("ends", dict(ends), flush=True)
    return 0 if set(ends) <= {"well", "fault"} else 1


if __name__ == "__main__":
    sys.exit(main())
