"""Launches of GEMM1: its arguments, made once; kernels, compiled and loaded once a process and device."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass

import torch
from mori_shmem.jit import build, driver

from mori_megamoe.targets.cuda.params import Arrivals, Gemm1Maps, Gemm1Params, pairs_inverse
from mori_megamoe.targets.cuda.tiles import TileArrays
from mori_megamoe.targets.cuda.variants import gemm1_variant
from mori_megamoe.targets.cuda.weights import PreparedWeights

THREADS = 384
_KINDS = {"R": ("u8", 128), "A": ("bf16", 64)}  # of an operand row; columns of a box


@dataclass(frozen=True)
class Buffers:
    """What GEMM1 reads beside weights, and writes. Rows of tiles; I = inter_dim."""

    rows: torch.Tensor  # [capacity, D]: uint8 e4m3 (R) or bf16 (A)
    row_scale: torch.Tensor | None  # R: [capacity] uint8
    out: torch.Tensor  # [capacity, I] uint8
    scales: torch.Tensor | None = None  # [capacity, I / 32] uint8
    shuffled_scales: torch.Tensor | None = None  # [capacity * I / 32] uint8, mx.ActivationScales
    sums: torch.Tensor | None = None  # fp32 [capacity, 2 I], gate first: of the variant that writes sums


def params_of(
    weights: PreparedWeights,
    buffers: Buffers,
    tiles: TileArrays,
    *,
    limit: float,
    arrivals: Arrivals | None = None,
) -> Gemm1Params:
    """The kernel's arguments but for the tensor maps."""
    width, model_dim = weights.base.shape[1], buffers.rows.shape[1]
    pairs = width // 512

    def at(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return Gemm1Params(
        nbytes=ctypes.sizeof(Gemm1Params),
        num_steps=model_dim // 128,
        width=width,
        pairs=pairs,
        pairs_inverse=pairs_inverse(pairs),
        sixteen=16,
        limit=limit,
        weights=weights.codes.data_ptr(),
        base=weights.base.data_ptr(),
        row_scale=at(buffers.row_scale),
        tiles=tiles.struct(),
        scales=at(buffers.scales),
        shuffled_scales=at(buffers.shuffled_scales),
        sums=at(buffers.sums),
        arrivals=arrivals or Arrivals(),
    )


def maps_of(body: str, buffers: Buffers, tile_rows: int) -> Gemm1Maps:
    """Its tensor maps, in a struct at a multiple of 64 bytes."""
    kind, columns = _KINDS[body]
    maps = driver.aligned(Gemm1Maps)
    capacity, model_dim = buffers.rows.shape
    item_bytes = buffers.rows.dtype.itemsize
    maps.rows = driver.tensor_map(
        *(buffers.rows.data_ptr(), kind),
        columns=model_dim,
        rows=capacity,
        pitch_bytes=model_dim * item_bytes,
        box_columns=columns,
        box_rows=tile_rows // 2,
    )
    maps.out = _plain_map(buffers.out, box_columns=64, box_rows=tile_rows)
    return maps


def _plain_map(out: torch.Tensor, *, box_columns: int, box_rows: int) -> driver.TensorMap:
    """Of bytes [rows, columns], whose boxes lie in shared memory row after row."""
    rows, columns = out.shape
    raw = (ctypes.c_uint8 * 192)()
    at = (ctypes.addressof(raw) + 63) & ~63
    driver.call(
        "cuTensorMapEncodeTiled",
        *(at, 0, 2, out.data_ptr(), (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(columns)),
        *((c_uint32 * 2)(box_columns, box_rows), (c_uint32 * 2)(1, 1), 0, 0, 2, 0),
    )
    made = driver.TensorMap()
    ctypes.memmove(ctypes.addressof(made), at, 128)
    return made


@functools.cache
def gemm1_function(
    device: int, body: str, tile_rows: int, wait: str = "never", sums: bool = False
) -> driver.Function:
    """`gemm1`, or `stage1` where it waits. `device` is the current one."""
    module = driver.Module(build(gemm1_variant(body, tile_rows, wait, sums=sums)))
    check_size(module, "params_bytes", Gemm1Params)
    return module.function("gemm1" if wait == "never" else "stage1", module.constant("shared_bytes"))


def check_size(module: driver.Module, constant: str, kind: type[ctypes.Structure]) -> None:
    """Both sides have the same struct."""
    if module.constant(constant) != ctypes.sizeof(kind):
        raise RuntimeError(
            f"{constant}: params.py has {ctypes.sizeof(kind)} bytes, params.cuh {module.constant(constant)}: "
            f"the two must hold the same fields"
        )


class Gemm1:
    """GEMM1 over tiles that are all there: `launch(stream)` is all that a call does."""

    def __init__(
        self,
        weights: PreparedWeights,
        buffers: Buffers,
        tiles: TileArrays,
        *,
        limit: float = 0.0,
        tile_rows: int = 128,
        grid: int = 0,
    ) -> None:
        """grid  blocks, an even number; 0: one an SM"""
        device = buffers.rows.device
        with torch.cuda.device(device):
            function = gemm1_function(
                device.index or 0, weights.body, tile_rows, sums=buffers.sums is not None
            )
            grid = grid or torch.cuda.get_device_properties(device).multi_processor_count // 2 * 2
            self._kept = (weights, buffers, tiles)
            args = [
                maps_of(weights.body, buffers, tile_rows),
                params_of(weights, buffers, tiles, limit=limit),
            ]
            self._prepared = driver.PreparedLaunch(function, grid, THREADS, args)

    def launch(self, stream: int) -> None:
        """Enqueue on `stream`, a raw handle."""
        self._prepared.launch(stream)
