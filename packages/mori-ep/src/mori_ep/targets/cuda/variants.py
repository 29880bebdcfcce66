"""The compiled variants: one dispatch for all dtypes (it moves bytes), a combine for each dtype and
transport.

    python -m mori_shmem.jit --cache-dir DIR mori_ep.targets.cuda.variants --report

compiles them ahead of time, on any machine.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from mori_shmem.jit import Source, Variant, cuda_headers

ARCH = "sm_90a"
PACKAGE = "mori-ep"
ELEMENTS = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.float32: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 4,
}
WIRES = {"none": 0, "fp8_direct_cast": 1, "fp8_blockwise": 2}


@functools.cache
def _source(name: str) -> Source:
    return Source.read(Path(__file__).parent / name, [cuda_headers()])


def dispatch_variant() -> Variant:
    return Variant(PACKAGE, _source("dispatch.cu"), (), ARCH)


def tables_variant() -> Variant:
    return Variant(PACKAGE, _source("tables.cu"), (), ARCH)


def combine_variant(dtype: torch.dtype, quant_type: str) -> Variant:
    flags = (f"-DELEMENT={ELEMENTS[dtype]}", f"-DWIRE={WIRES[quant_type]}")
    return Variant(PACKAGE, _source("combine.cu"), flags, ARCH)


def experts_variant(dtype: torch.dtype) -> Variant:
    return Variant(PACKAGE, _source("experts.cu"), (f"-DELEMENT={ELEMENTS[dtype]}",), ARCH)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


VARIANTS = (
    ("dispatch", dispatch_variant()),
    ("tables", tables_variant()),
    *((f"combine-{_name(dtype)}", combine_variant(dtype, "none")) for dtype in ELEMENTS),
    *(
        (f"combine-bfloat16-{wire}", combine_variant(torch.bfloat16, wire))
        for wire in WIRES
        if wire != "none"
    ),
    *((f"experts-{_name(dtype)}", experts_variant(dtype)) for dtype in ELEMENTS),
)
