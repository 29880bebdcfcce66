"""Operand rows alone, for a GEMM without a layer around it: what rows.cuh makes of a caller's rows."""

from __future__ import annotations

import ctypes
import functools

import torch
from mori_shmem.jit import build, driver

from mori_megamoe.targets.cuda.gemm1 import check_size
from mori_megamoe.targets.cuda.params import RowsParams
from mori_megamoe.targets.cuda.variants import prepare_variant

_THREADS, _BLOCKS_AN_SM = 256, 8


@functools.cache
def prepare_module(device: int, body: str, quantised: bool) -> driver.Module:
    """`prepare` and `operand_rows`. `device` is the current one."""
    module = driver.Module(build(prepare_variant(body, quantised=quantised)))
    check_size(module, "rows_params_bytes", RowsParams)
    return module


def rows_params(
    x: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor, row_scale: torch.Tensor | None
) -> RowsParams:
    """x [n, D] bf16, or e4m3 with scales [n, D / 32]."""
    return RowsParams(
        nbytes=ctypes.sizeof(RowsParams),
        tokens=x.shape[0],
        hidden=x.shape[1],
        input=x.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        rows=rows.data_ptr(),
        row_scale=None if row_scale is None else row_scale.data_ptr(),
    )


class OperandRows:
    """One prepared launch."""

    def __init__(
        self,
        body: str,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        rows: torch.Tensor,
        row_scale: torch.Tensor | None,
    ) -> None:
        """x         [n, D] bf16, or e4m3 with `scales` [n, D / 32] uint8
        rows      [n, D], R uint8 with `row_scale` [n] uint8, A bf16: what is made
        """
        with torch.cuda.device(x.device):
            module = prepare_module(x.device.index or 0, body, scales is not None)
            sms = torch.cuda.get_device_properties(x.device).multi_processor_count
            grid = max(1, min(-(-x.shape[0] // (_THREADS // 32)), sms * _BLOCKS_AN_SM))
            self._kept = (x, scales, rows, row_scale)
            self._prepared = driver.PreparedLaunch(
                module.function("operand_rows"), grid, _THREADS, [rows_params(x, scales, rows, row_scale)]
            )

    def launch(self, stream: int) -> None:
        """Enqueue on `stream`, a raw handle."""
        self._prepared.launch(stream)
