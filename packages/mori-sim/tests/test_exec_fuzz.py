"""Random code never takes the host process down: it ends, faults with a reason, or is stopped by its instruction budget."""
# ruff: noqa: E501  (one instruction, one line)

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from asm950 import Bench
from mori_sim import _exec

HEADS = [
    0x7E000000,
    0x00000000,
    0x7C000000,
    0xD1000000,
    0xD3800000,
    0xBE800000,
    0x80000000,
    0xBF000000,
    0xB0000000,
    0xC0000000,
    0xD8000000,
    0xDC000000,
    0xE0000000,
]


def run_random(seed: int) -> str:
    rng = random.Random(seed)
    rows = _exec.opcodes()
    bench = Bench(strict=bool(seed & 1))
    data = bench.array(np.zeros(4096, np.uint32))
    kernarg = bench.array(np.array([data.ctypes.data, data.ctypes.data, 0, 0], np.uint64))
    words = []
    while len(words) < 400:
        if rng.random() < 0.3:
            words.append(rng.getrandbits(32))
            continue
        candidate = b"".join(
            (rng.choice(HEADS) | rng.getrandbits(26 if k == 0 else 32)).to_bytes(4, "little")
            for k in range(4)
        )
        got = _exec.decode_at(candidate)
        if (
            not got["ok"]
            or got["unsupported"]
            or (got["category"] in ("branch", "barrier") and rng.random() < 0.9)
            or got["name"] == "s_trap"
        ):
            continue
        words += [int.from_bytes(candidate[k : k + 4], "little") for k in range(0, got["nbytes"], 4)]
    assert rows
    code = _exec.Code(0x10_0000_0000, b"".join(w.to_bytes(4, "little") for w in words))
    # start at each of many places: one bad instruction must not hide the rest
    for start in range(0, 400, 5):
        bench.machine.submit(
            code,
            0x10_0000_0000 + 4 * start,
            (2,),
            (128,),
            kernarg.ctypes.data,
            {"lds": 4096, "scratch": 64, "rsrc1": 0xF0 << 12 | 63},
        )
        for _ in range(20):
            if bench.machine.run(200) != "running":
                break
        bench.machine.clear_fault()
    return bench.machine.fault()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_instructions(first):
    code = f"import test_exec_fuzz as t\nfor s in range({first}, {first + 10}): t.run_random(s)"
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=here,
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
