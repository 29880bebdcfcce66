"""Shared by every package's tests: what hardware is here, counted without importing torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

KERNELS = re.compile(r"test_(rocm|cuda|compile|triton)")


def num_nvidia_gpus() -> int:
    """By their device nodes."""
    return sum(p.name[6:].isdigit() for p in Path("/dev").glob("nvidia[0-9]*"))


def num_amd_gpus() -> int:
    """The KFD nodes that have compute units."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum("simd_count 0\n" not in p.read_text() for p in nodes)


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background jobs are born deaf to Ctrl-C, and so would be the processes that tests start."""
    if config.getoption("--share-gpus"):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(ImportError):
        from mori_shmem.launch import preload

        preload("pytest")  # 0.3 s of every rank of every test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--num-gpus", type=int, default=None, help="use at most this many GPUs")
    parser.addoption(
        "--share-gpus",
        action="store_true",
        help="tests that need more GPUs than there are run too, with several ranks a GPU: for what is right, "
        "not for how fast",
    )


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is marked gpu runs on NVIDIA's, or, in a file named for rocm, on AMD's. Files named for
    kernels are marked so: their other tests compile those, or run them on the software node or emulated."""
    limit = config.getoption("--num-gpus")
    shared = config.getoption("--share-gpus")
    counts = {"NVIDIA": num_nvidia_gpus(), "AMD": num_amd_gpus()}
    for item in items:
        mark = item.get_closest_marker("gpu")
        vendor = "AMD" if "rocm" in item.path.name else "NVIDIA"
        if KERNELS.match(item.path.name):
            item.add_marker(pytest.mark.kernels)
        here = counts[vendor]
        usable = here if limit is None else min(limit, here)
        needed = 0 if mark is None else mark.args[0]
        if usable < (min(needed, 1) if shared else needed):
            reason = f"needs {needed} {vendor} GPUs, {usable} usable, {here} here"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`pytest -m gpu` with nothing to collect yet is a skip, not a failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("-m") == "gpu":
        session.exitstatus = pytest.ExitCode.OK
