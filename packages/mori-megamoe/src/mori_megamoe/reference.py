"""The layer with nothing in between: every routed row goes from its token to its expert and back in one
process.

What is right, byte for byte, for the host target, whatever way the rows travel there. Rows of one expert are
multiplied together, which changes no bit (arithmetic.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mori_megamoe import arithmetic, mx
from mori_megamoe.problem import Problem
from mori_megamoe.weights import StoredWeights, dequantized, w1_of, w2_of

ACCURACY_GATE = 0.10  # relative L2 against `dense`; what quantised rows cost


class RankInput(NamedTuple):
    """What one rank gives to a call."""

    x: torch.Tensor  # [n, D] bf16
    weights: torch.Tensor  # [n, k] fp32
    ids: torch.Tensor  # [n, k] int32


class Result(NamedTuple):
    """One rank's tokens."""

    out: torch.Tensor  # [n, D] bf16
    hidden: torch.Tensor  # [n, k, I] uint8: codes between the GEMMs, by slot; of invalid slots zeros
    hidden_scales: torch.Tensor  # [n, k, I / 32] uint8


def layer(inputs: Sequence[RankInput], weights: Sequence[StoredWeights], problem: Problem) -> list[Result]:
    """All ranks' results. `weights` by rank."""
    results, partials = _empty(inputs, problem)
    for expert in range(problem.num_experts):
        rank, local = divmod(expert, problem.experts_per_rank)
        where = [(given.ids == expert).nonzero() for given in inputs]  # (token, slot) by source
        if sum(len(w) for w in where) == 0:
            continue
        rows = torch.cat([given.x[w[:, 0]] for given, w in zip(inputs, where, strict=True)])
        route = torch.cat([given.weights[w[:, 0], w[:, 1]] for given, w in zip(inputs, where, strict=True)])
        w1, w2 = w1_of(weights[rank], problem, local), w2_of(weights[rank], problem, local)
        hidden = arithmetic.hidden_rows(*mx.quantize_input(rows), w1, problem.swiglu_limit)
        back = arithmetic.partial_rows(arithmetic.matmul(*hidden, w2), route, problem.partial_format)
        at = 0
        for result, partial, w in zip(results, partials, where, strict=True):
            mine, at = slice(at, at + len(w)), at + len(w)
            token, slot = w.unbind(1)
            result.hidden[token, slot], result.hidden_scales[token, slot] = hidden[0][mine], hidden[1][mine]
            partial[token, slot] = back[mine]
    for given, result, partial in zip(inputs, results, partials, strict=True):
        read = arithmetic.read_partials(partial, problem.model_dim, problem.partial_format)
        result.out.copy_(arithmetic.combine(read, valid_slots(given.ids, problem)))
    return results


def dense(
    inputs: Sequence[RankInput], weights: Sequence[StoredWeights], problem: Problem
) -> list[torch.Tensor]:
    """[n, D] fp64 of each rank: the same experts in float64, nothing quantised but the weights."""
    out = [torch.zeros(given.x.shape, dtype=torch.float64) for given in inputs]
    for expert in range(problem.num_experts):
        rank, local = divmod(expert, problem.experts_per_rank)
        w1 = dequantized(w1_of(weights[rank], problem, local))
        w2 = dequantized(w2_of(weights[rank], problem, local))
        for total, given in zip(out, inputs, strict=True):
            token, slot = (given.ids == expert).nonzero().unbind(1)
            g, u = (given.x[token].double() @ w1.T).chunk(2, dim=1)
            if problem.swiglu_limit > 0:
                g, u = g.clamp(max=problem.swiglu_limit), u.clamp(-problem.swiglu_limit, problem.swiglu_limit)
            y = (torch.nn.functional.silu(g) * u) @ w2.T
            total.index_add_(0, token, y * given.weights[token, slot].double()[:, None])
    return out


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance; 0 of equal ones, inf or NaN if `want` is zero or one of the two is not finite."""
    apart, norm = torch.linalg.norm(got.double() - want.double()), torch.linalg.norm(want.double())
    return 0.0 if apart == 0 else float(apart / norm)


def valid_slots(ids: torch.Tensor, problem: Problem) -> torch.Tensor:
    """[n, k] bool: whether the slot names an expert."""
    return (ids >= 0) & (ids < problem.num_experts)


def _empty(inputs: Sequence[RankInput], problem: Problem) -> tuple[list[Result], list[torch.Tensor]]:
    """Results to be filled, and each rank's partials [n, k, partial bytes]."""
    results, partials = [], []
    for given in inputs:
        n, k = given.ids.shape
        results.append(
            Result(
                torch.zeros(n, problem.model_dim, dtype=torch.bfloat16),
                torch.zeros(n, k, problem.inter_dim, dtype=torch.uint8),
                torch.zeros(n, k, problem.inter_scales, dtype=torch.uint8),
            )
        )
        partials.append(torch.zeros(n, k, problem.partial_bytes, dtype=torch.uint8))
    return results, partials
