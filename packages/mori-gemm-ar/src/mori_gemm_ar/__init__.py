"""fp8 GEMM fused with its all-reduce: the row-parallel layer of tensor parallelism, on every rank as one
call.

    import mori_shmem
    from mori_gemm_ar import GemmAllReduce, quantize

    op = GemmAllReduce(mori_shmem.init(), n=7168, k=2048, m_max=16384)
    out = op(a, b, a_scale, b_scale)

Importing the package imports no torch and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mori_gemm_ar import settings

if TYPE_CHECKING:
    from mori_gemm_ar.op import GemmAllReduce
    from mori_gemm_ar.quant.formats import convert_fnuz
    from mori_gemm_ar.quant.quantize import dequantize, quantize

_HOMES = {
    "GemmAllReduce": "op",
    "convert_fnuz": "quant.formats",
    "dequantize": "quant.quantize",
    "quantize": "quant.quantize",
}

__all__ = ["GemmAllReduce", "convert_fnuz", "dequantize", "quantize", "settings"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mori_gemm_ar' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mori_gemm_ar.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
