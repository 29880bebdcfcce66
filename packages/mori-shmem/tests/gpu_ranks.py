"""Ranks of the cuda target for tests: gpu(1), all share one device; gpu(2), one device a rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import mori_shmem
import pytest

one_gpu, two_gpus = pytest.mark.gpu(1), pytest.mark.gpu(2)
on_both = pytest.mark.parametrize(
    "spread",
    [pytest.param(False, marks=one_gpu, id="sharing"), pytest.param(True, marks=two_gpus, id="spread")],
)


def run(fn: Callable[..., Any], world_size: int, *args: object, spread: bool = True) -> list[Any]:
    """run_ranks, with one device a rank or all on the first one."""
    return mori_shmem.run_ranks(_placed, world_size, fn, spread, *args, timeout_s=60)


def _placed(fn: Callable[..., Any], spread: bool, *args: object) -> Any:
    if not spread:
        import torch

        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(0)
    return fn(*args)


def kernels_of(file: str) -> Any:
    """The module of the test's Triton kernels, in a rank."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("cuda_kernels", file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
