"""Rows by ids against torch: every small code, and rows sent to groups and brought back."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from mori_shmem.core import native
from mori_shmem.device.rows import (
    RowCode,
    SlotMap,
    count_ids,
    group_slots,
    quantize_rows,
    scatter_rows,
    sum_rows,
)

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


def added(kind: str, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = rows, through the sum of one row each."""
    slots = torch.zeros(1, 1, dtype=torch.int32)
    slot_map = SlotMap(slots.data_ptr(), 1, 1, 10, -1)
    kinds = {dtype: name for name, dtype in DTYPES.items()}
    code = RowCode(kind, rows.numel())
    sum_rows(out.data_ptr(), kinds[out.dtype], slot_map, [rows.data_ptr()], code.nbytes, code)
    return out


@pytest.mark.parametrize("kind", DTYPES)
def test_every_code_means_what_torch_says(kind: str) -> None:
    bits = (
        torch.arange(256, dtype=torch.uint8)
        if DTYPES[kind].itemsize == 1
        else torch.randint(0, 256, (4096,)).byte()
    )
    rows = bits.view(DTYPES[kind])
    torch.testing.assert_close(
        added(kind, rows, torch.empty(rows.numel())), rows.float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", [k for k in DTYPES if k != "fp32"])
def test_rounding_is_that_of_torch(kind: str) -> None:
    """fp8 saturates here and not in torch, so values stay within its range."""
    limit = torch.finfo(DTYPES[kind]).max if DTYPES[kind].itemsize == 1 else 1e4
    x = torch.cat([torch.randn(5000) * scale for scale in (1e-9, 1e-4, 1e-2, 1.0, 50.0)]).clamp(-limit, limit)
    got = added("fp32", x, torch.empty(x.shape, dtype=DTYPES[kind]))
    assert torch.equal(got.view(torch.uint8), x.to(DTYPES[kind]).view(torch.uint8))


def test_fp8_blocks_are_scaled_to_the_largest_code() -> None:
    x = torch.randn(3, 300).bfloat16()
    code = RowCode("e4m3fn", 300, 128)
    wire = torch.zeros(3, code.nbytes, dtype=torch.uint8)
    quantize_rows(wire.data_ptr(), x.data_ptr(), 3, code)
    scales = wire[:, 300 : 300 + 12].contiguous().view(torch.float32)
    for block in range(3):
        part = x[:, 128 * block : 128 * block + 128].float()
        largest = part.abs().amax(1)
        torch.testing.assert_close(scales[:, block], largest / 448, rtol=1e-6, atol=0)
        codes = wire[:, 128 * block : min(300, 128 * block + 128)].contiguous().view(torch.float8_e4m3fn)
        factor = torch.full_like(largest, 448) / largest  # `448 / largest` is a reciprocal, rounded twice
        want = (part * factor[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


def test_ids_are_counted_within_their_range_only() -> None:
    ids = torch.tensor([3, 4, 4, -1, 5, 9, 4], dtype=torch.int32)
    counts = torch.full((3,), 7, dtype=torch.int32)
    count_ids(ids.data_ptr(), ids.numel(), 4, 3, counts.data_ptr())
    assert counts.tolist() == [3, 1, 0]


def test_slots_of_no_rows() -> None:
    assert group_slots(0, SlotMap(0, 0, 8, 10, -1), 0, 4, 3) == [0, 0, 0]


def test_EP_3_rows_beyond_four_gigabytes_are_exact() -> None:
    """Row 300000 of 14336 bytes, in sparse memory: an offset or a product of 32 bits would land elsewhere."""
    nbytes = 300_001 * 14336
    fd = native.create_memory(nbytes, "rows")
    memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    os.close(fd)
    x = torch.randn(1, 7168).bfloat16()
    slots = torch.tensor([[300_000]], dtype=torch.int32)
    slot_map = SlotMap(slots.data_ptr(), 1, 1, 300_001, -1)
    scatter_rows(slot_map, [(x.data_ptr(), 14336)], [[memory.data_ptr()]])
    assert torch.equal(memory[-14336:].view(torch.bfloat16), x[0])
    out = torch.empty_like(x)
    sum_rows(out.data_ptr(), "bf16", slot_map, [memory.data_ptr()], 14336, RowCode("bf16", 7168))
    assert torch.equal(out, x)
