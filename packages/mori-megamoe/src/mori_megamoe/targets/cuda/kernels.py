"""The kernels of one shape on this rank's GPU: compiled and loaded on first use, then launched with arguments
that were made once. Load what a call needs before the call: loading waits for kernels that are running."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import mori_shmem
import torch
from mori_shmem.jit import Variant, build, driver

from mori_megamoe.targets.cuda import limits, variants
from mori_megamoe.targets.cuda.gemm1 import THREADS, Buffers, check_size, gemm1_function, maps_of
from mori_megamoe.targets.cuda.layout import Shape
from mori_megamoe.targets.cuda.operand_rows import prepare_module
from mori_megamoe.targets.cuda.params import (
    BackParams,
    CombineParams,
    Gemm1Maps,
    HiddenParams,
    PlanParams,
    SendParams,
)

_PLAN_THREADS, _PLAN_WARPS = 1024, 32


class Launch(Protocol):
    """A kernel and its arguments."""

    def launch(self, stream: int) -> None:
        """Enqueue on `stream`, a raw handle."""


class Kernels:
    """By name:

    prepare-bf16, prepare-codes        plan and operand rows, of what a caller gives
    dispatch, gemm1                    the baseline
    pack                               rows into slots for copy engines
    stage1-signals, stage1-queue       both in one
    hidden, gemm2, combine             the way back
    """

    def __init__(self, comm: mori_shmem.Communicator, shape: Shape) -> None:
        """Collective."""
        self._device, self._shape = comm.device, shape
        self.blocks = _blocks_of(comm)  # of a grid that waits inside itself

    @property
    def stream(self) -> int:
        """The caller's, a raw handle."""
        return torch.cuda.current_stream(self._device).cuda_stream

    @property
    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured in a graph."""
        return torch.cuda.is_current_stream_capturing()

    def finish(self) -> None:
        """Wait for what torch has made on the current stream: later calls may be on others."""
        torch.cuda.synchronize(self._device)

    def load(self, *names: str) -> None:
        """So that `launch` has nothing to wait for."""
        with torch.cuda.device(self._device):
            for name in names:
                self._function(name)

    def launch(self, name: str, grid: int, args: Sequence[ctypes.Structure]) -> Launch:
        """Of `grid` blocks. `args` stay as they are: changing them changes the next launch."""
        with torch.cuda.device(self._device):
            function, threads = self._function(name)
            return driver.PreparedLaunch(function, grid, threads, list(args))

    def maps(self, buffers: Buffers) -> Gemm1Maps:
        """A GEMM's tensor maps."""
        return maps_of(self._shape.body, buffers, self._shape.tile_rows)

    def _function(self, name: str) -> tuple[driver.Function, int]:
        """And its threads."""
        shape, device = self._shape, self._device.index or 0
        kind, _, which = name.partition("-")
        if kind == "prepare":
            return _prepare_function(device, shape, which == "codes"), _PLAN_THREADS
        if kind in ("gemm1", "stage1"):
            return gemm1_function(device, shape.body, shape.tile_rows, which or "never"), THREADS
        if kind == "gemm2":
            return _gemm2_function(device, shape.body, shape.tile_rows, shape.partials), THREADS
        given = {"dispatch": "", "pack": "", "hidden": shape.body, "combine": shape.partials}[kind]
        threads = limits.DISPATCH_THREADS if kind in ("dispatch", "pack") else limits.SMALL_THREADS
        return _small_function(device, kind, given), threads


def _prepare_function(device: int, shape: Shape, quantised: bool) -> driver.Function:
    module = prepare_module(device, shape.body, quantised)
    check_size(module, "plan_params_bytes", PlanParams)
    shared = module.constant("plan_memory_bytes") + 4 * _PLAN_WARPS * shape.num_experts
    return module.function("prepare", shared)


@functools.cache
def _gemm2_function(device: int, body: str, tile_rows: int, partials: str) -> driver.Function:
    module = driver.Module(build(variants.gemm2_variant(body, tile_rows, partials)))
    check_size(module, "back_params_bytes", BackParams)
    return module.function("gemm2", module.constant("shared_bytes"))


@functools.cache
def _small_function(device: int, kind: str, given: str) -> driver.Function:
    makers: dict[str, Callable[[], Variant]] = {
        "dispatch": variants.dispatch_variant,
        "pack": variants.dispatch_variant,
        "hidden": lambda: variants.hidden_variant(given),
        "combine": lambda: variants.combine_variant(given),
    }
    params = {"hidden": HiddenParams, "combine": CombineParams}.get(kind, SendParams)
    module = driver.Module(build(makers[kind]()))
    check_size(module, "send_params_bytes" if params is SendParams else f"{kind}_params_bytes", params)
    return module.function(kind)


def _blocks_of(comm: mori_shmem.Communicator) -> int:
    """Collective: of this rank's share of its GPU."""
    properties = torch.cuda.get_device_properties(comm.device)
    sharing = comm.all_gather(str(properties.uuid)).count(str(properties.uuid))
    return limits.most_blocks(properties.multi_processor_count, sharing)
