"""The environment variables that the node reads: one table for `mori-sim run`, its help and the README.

The C++ side reads them once, when the node starts in a process, and refuses bad values by name.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    allowed: str
    meaning: str


VARIABLES = (
    Variable("MORI_SIM_DEVICES", "1", "1 to 8", "devices of the node"),
    Variable(
        "MORI_SIM_COHERENCE",
        "off",
        "off, strict",
        "strict: caches and missing waits are modelled and reported",
    ),
    Variable(
        "MORI_SIM_SCHEDULE", "rr", "rr, random, delay-rank", "order in which waves and workgroups advance"
    ),
    Variable("MORI_SIM_DELAY_RANK", "0", "a rank", "the rank that delay-rank holds back"),
    Variable("MORI_SIM_SEED", "0", "a whole number", "seed of every random choice"),
    Variable(
        "MORI_SIM_XCD_SEED", "0", "a whole number", "0: workgroup i runs on XCD i mod 8; else a permutation"
    ),
    Variable("MORI_SIM_SLICE", "2048", "1 to 2^24", "wave instructions of one turn"),
    Variable(
        "MORI_SIM_MAX_REPORTS", "64", "1 to 2^20", "broken rules that a process reports before it is silent"
    ),
    Variable(
        "MORI_SIM_REPORT", "", "a path", "JSON lines are appended to it: faults, coherence reports, counters"
    ),
    Variable("MORI_SIM_SAVE_CODE", "", "a folder", "every code object that is loaded is copied there"),
    Variable(
        "MORI_SIM_ON_FAULT",
        "abort",
        "abort, error",
        "error: HIP calls fail from then on, and the process exits with 70",
    ),
    Variable(
        "MORI_SIM_WATCHDOG_S", "120", "0.1 to 1e6", "a kernel in which nothing moves for so long is stuck"
    ),
    Variable(
        "MORI_SIM_HOST_MEMORY",
        "lend",
        "lend, refuse",
        "may kernels touch ordinary process memory (CPU tensors)?",
    ),
    Variable(
        "MORI_SIM_POISON",
        "1 if strict",
        "0, 1",
        "fill new device memory with 0xCB, as nothing promises zeros",
    ),
    Variable(
        "MORI_SIM_MFMA_ORDER",
        "exact",
        "exact, sequential, blocked",
        "how an MFMA adds the products of one output",
    ),
    Variable(
        "MORI_SIM_FP8_SATURATES",
        "0",
        "0, 1",
        "conversions to fp8 out of range: largest finite number, not NaN",
    ),
    Variable(
        "MORI_SIM_LAZY_COPIES", "1 if strict", "0, 1", "SDMA read pointers may move before the bytes land"
    ),
    Variable(
        "MORI_SIM_KERNEL_END",
        "system",
        "system, agent",
        "strict: agent: the end of a kernel leaves stores to other devices unpublished",
    ),
    Variable("MORI_SIM_COPY_DELAY_US", "0", "0 to 1e6", "every SDMA packet waits a random time up to this"),
    Variable(
        "MORI_SIM_RECORD_DELAY_US",
        "0",
        "0 to 1e6",
        "strict: what engines and streams store is told to the checker so much later; for tests of the node",
    ),
    Variable(
        "MORI_SIM_SHORT_COPIES",
        "0",
        "0, 1",
        "refuse SDMA copies above 4 MiB, as older engines would cut them",
    ),
    Variable("MORI_SIM_QUEUES_PER_ENGINE", "8", "1 to 64", "creating more SDMA queues on an engine fails"),
    Variable(
        "MORI_SIM_MISSING_ENGINES",
        "0",
        "a mask of 16 bits",
        "engines that accept queues and never serve them",
    ),
    Variable("MORI_SIM_TORCH_CUDA", "0", "0, 1", '"cuda" of a CPU torch is the simulated node'),
    Variable("MORI_SIM_PACKET_LIBRARY", "", "a path", "libmori_sdma.so, where it is not beside this package"),
    Variable(
        "MORI_SIM_LLD", "", "a path", "an LLVM ld.lld for kernels, instead of the one in the triton wheel"
    ),
)


def active() -> bool:
    """Was this process started by `mori-sim run`?"""
    return os.environ.get("MORI_SIM_ACTIVE") == "1"
