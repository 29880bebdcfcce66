"""Operands from a seed: standard normal values, quantised. The same on every machine, different on every
rank.

B is a layer's weight and stays; A changes with `turn`, so that a result which repeats the last one is wrong.
"""

from __future__ import annotations

import torch
from mori_bench import seed_for

from mori_gemm_ar.problem import Problem
from mori_gemm_ar.quant.quantize import quantize
from mori_gemm_ar.testing import Operands


def operands(problem: Problem, rank: int, quant: str, seed: int, *, turns: int) -> list[Operands]:
    """One rank's operands for each turn; all share one B."""
    b, b_scale = quantize(_normal(problem.n, problem.k, seed, "b", rank), quant, "b")
    found = []
    for turn in range(turns):
        a, a_scale = quantize(_normal(problem.m, problem.k, seed, "a", rank, turn), quant, "a")
        found.append(Operands(quant, a, b, a_scale, b_scale))
    return found


def _normal(rows: int, columns: int, seed: int, *purpose: object) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed_for(seed, *purpose))
    return torch.randn(rows, columns, generator=random)
