"""A mixture-of-experts layer whose experts live on many ranks: dispatch, GEMM1 with SwiGLU, GEMM2, combine,
in MX fp8 by fp4.

    from mori_megamoe import MegaMoE

    moe = MegaMoE(rank=..., world_size=..., model_dim=7168, inter_dim=3072, experts=384, topk=6, ...)
    out = moe(x, weights, expert_ids)      # every token's sum over its experts, on the token's own rank

How rows reach their experts and when these begin (Stage1) can be replaced without changing a byte of the
output; see mori_megamoe.stage1. Importing the package imports no torch and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mori_megamoe import settings

if TYPE_CHECKING:
    from mori_megamoe.layer import MegaMoE
    from mori_megamoe.problem import Problem
    from mori_megamoe.stage1 import Stage1
    from mori_megamoe.stage1.sdma import MegaMoEStage1Sdma
    from mori_megamoe.weights import StoredWeights, quantize_weights, shuffle_weights

_HOMES = {
    "MegaMoE": "layer",
    "MegaMoEStage1Sdma": "stage1.sdma",
    "Problem": "problem",
    "Stage1": "stage1",
    "StoredWeights": "weights",
    "quantize_weights": "weights",
    "shuffle_weights": "weights",
}

__all__ = [
    "MegaMoE",
    "MegaMoEStage1Sdma",
    "Problem",
    "Stage1",
    "StoredWeights",
    "quantize_weights",
    "settings",
    "shuffle_weights",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mori_megamoe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mori_megamoe.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
