"""Operand rows and the epilogue's arithmetic as the cuda target's source has them, on the CPU: the bytes of
mx and torch."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import pytest
import torch
from mori_megamoe import arithmetic, mx
from mori_megamoe.targets.cuda.operand_rows import OperandRows, rows_params

sys.path.insert(0, str(Path(__file__).parent))
from cuda_cases import operand_rows
from cuda_emulator import Library
from cuda_ranks import prepare_library

bodies = pytest.mark.parametrize("body", ["R", "A"])
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
EPILOGUE = r"""
extern "C" void hidden(const float* gate, const float* up, int blocks, float limit,
                       uint8_t* codes, uint8_t* scales) {
  for (int block = 0; block < blocks; block++, gate += 32, up += 32, codes += 32) {
    float h[32], largest = 0;
    for (int i = 0; i < 32; i++) {
      h[i] = swiglu(gate[i], up[i], limit);
      largest = max_nan(largest, fabsf(h[i]));
    }
    const uint32_t e8 = output_scale(largest);
    scales[block] = (uint8_t)e8;
    for (int i = 0; i < 32; i += 2) {
      const uint16_t two = to_e4m3x2(h[i] * output_factor(e8), h[i + 1] * output_factor(e8));
      memcpy(codes + i, &two, 2);
    }
  }
}
extern "C" long long shuffled(int row, int column, int columns) { return shuffled_at(row, column, columns); }
"""


@functools.cache
def epilogue() -> Library:
    return Library("swiglu.cuh", tests=EPILOGUE)


def rows_with_everything(hidden: int) -> torch.Tensor:
    """bf16: normal rows, wide spans, zeros, the smallest and the largest numbers, ties."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(12, hidden, generator=generator)
    x[1] *= torch.exp2(torch.randint(-14, 14, (hidden,), generator=generator).float())
    x[2] *= torch.exp2(
        torch.randint(-60, 60, (hidden // 32,), generator=generator).float()
    ).repeat_interleave(32)
    x[3] = 0
    x[4, :64] = 0
    x[5] = -0.0
    x[6] *= 1e-37
    x[7] *= 3e36
    x[8] = torch.arange(hidden) / 16  # many ties
    x[9] = 448.0
    x[10, 5] = torch.inf
    x[11, 100] = torch.nan
    return x.bfloat16()


def made(
    body: str, x: torch.Tensor, scales: torch.Tensor | None, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.uint8 if body == "R" else torch.bfloat16
    rows = torch.zeros(x.shape, dtype=kind, device=device)
    row_scale = torch.zeros(len(x), dtype=torch.uint8, device=device)
    if device == "cpu":
        given = rows_params(x, scales, rows, row_scale)
        prepare_library(body, scales is not None).run("operand_rows", [given], 2, 64)
    else:
        there = None if scales is None else scales.to(device)
        OperandRows(body, x.to(device), there, rows, row_scale).launch(
            torch.cuda.current_stream().cuda_stream
        )
    return rows.cpu(), row_scale.cpu()


@on_both
@bodies
@pytest.mark.parametrize("hidden", [256, 1280])
def test_rows_are_quantised_and_brought_to_the_bodys_form(device: str, body: str, hidden: int) -> None:
    """From bf16 and from codes that were quantised before: the same bytes, those of torch."""
    x = rows_with_everything(hidden)
    codes, scales = mx.quantize_input(x)
    scales = scales.to(torch.uint8)
    wanted, wanted_scale = operand_rows(body, codes, scales)
    for got, got_scale in (made(body, x, None, device), made(body, codes, scales, device)):
        finite = slice(0, 10)
        assert torch.equal(got.view(torch.uint8)[finite], wanted.view(torch.uint8)[finite])
        if body == "R":
            assert wanted_scale is not None
            assert torch.equal(got_scale, wanted_scale)
            assert bool(mx.decode_e4m3(got[10:]).isnan().any(1).all())
        else:
            assert bool(got[10:].isnan().any(1).all())


def test_the_epilogue_gives_the_bytes_of_the_reference() -> None:
    """With the reference's exp2, and a reciprocal that is off by a unit before its Newton step."""
    generator = torch.Generator().manual_seed(6)
    gate, up = torch.randn(2, 512, 256, generator=generator) * 4
    gate[:4] *= 30
    up[4:8] = 0
    gate[8:12] *= 1e-20
    gate[12, 3], up[13, 40], up[14, 99] = torch.nan, torch.nan, torch.inf
    codes, scales = torch.empty(512, 256, dtype=torch.uint8), torch.empty(512, 8, dtype=torch.uint8)
    for limit in (0.0, 10.0):
        epilogue().functions.hidden(
            *(ctypes.c_void_p(t.data_ptr()) for t in (gate, up)),
            *(512 * 8, ctypes.c_float(limit)),
            *(ctypes.c_void_p(t.data_ptr()) for t in (codes, scales)),
        )
        wanted, wanted_scales = mx.quantize_hidden(arithmetic.swiglu(torch.cat([gate, up], 1), limit))
        assert torch.equal(scales, wanted_scales.to(torch.uint8))
        assert torch.equal(codes, wanted)


def test_scales_lie_where_stage2_reads_them() -> None:
    form = mx.ActivationScales(64, 24)
    at = epilogue().functions.shuffled
    at.restype = ctypes.c_longlong
    assert all(at(r, c, 24) == form.offset(r, c) for r in range(64) for c in range(24))
