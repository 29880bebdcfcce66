"""Is the result right? Every element on every rank, against float64, without the transport under test.

Slice by slice, every rank multiplies its own true operands in float64, and gloo adds the products up on the
slice's owner, which compares its own rows of the op's result. All other ranks must hold the same bits as the
owner, which digests of each slice show. In gemm-only, where ranks do not meet, each compares its own product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mori_gemm_ar.problem import Problem
from mori_gemm_ar.reference import Errors, Tolerance, errors_of, fingerprint, tolerance
from mori_gemm_ar.testing import Operands

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Exact:
    """What this rank compares with, in float64."""

    product: torch.Tensor | None  # [m, n], this rank's own; only where a case needs it
    my_slice: torch.Tensor  # the rows of the sum that this rank owns
    rms: float  # of the whole sum


@dataclass(frozen=True)
class Checked:
    """What the comparison found, the same on every rank."""

    errors: Errors
    same_bits: bool  # on all ranks
    ok: bool
    digest: str  # of the whole result: two are equal exactly where the bits are

    @property
    def rel_l2(self) -> float | None:
        """For a JSON row, where infinity has no name."""
        return self.errors.rel_l2 if math.isfinite(self.errors.rel_l2) else None


def exact(operands: Operands, problem: Problem, rank: int, gather: Gather, *, keep_product: bool) -> Exact:
    """Collective. `operands` are the true ones, whatever the op is given."""
    a, b = operands.values()
    product = torch.empty(problem.m, problem.n, dtype=torch.float64) if keep_product else None
    my_slice = torch.empty(0, problem.n, dtype=torch.float64)
    for owner in range(problem.num_ranks):
        rows = problem.slice_of(owner)
        part = a[rows.start : rows.stop] @ b.t()
        if product is not None:
            product[rows.start : rows.stop] = part
        if rows.height and problem.num_ranks > 1:
            dist.reduce(part, dst=owner)
        if owner == rank:
            my_slice = part
    squares = sum(gather(my_slice.square().sum().item()))
    return Exact(product, my_slice, math.sqrt(squares / max(1, problem.m * problem.n)))


def check_sum(
    out: torch.Tensor,
    want: Exact,
    problem: Problem,
    rank: int,
    gather: Gather,
    gather_dtype: str,
    *,
    roundings: float = 1.0,
) -> Checked:
    """Collective: `out` on every rank. `roundings` widens the limits, for who rounds more often."""
    allowed = tolerance(gather_dtype, problem.k, problem.num_ranks).times(roundings)
    slices = [problem.slice_of(owner) for owner in range(problem.num_ranks)]
    rows = slices[rank]
    mine = errors_of(out[rows.start : rows.stop], want.my_slice, allowed, rms=want.rms)
    digests = [fingerprint(out[s.start : s.stop].contiguous()) for s in slices]
    ranks = gather((mine, digests))
    same_bits = all(theirs == digests for _, theirs in ranks)
    return _checked(Errors.pool([errors for errors, _ in ranks]), allowed, same_bits, ranks[0][1])


def check_product(out: torch.Tensor, want: Exact, problem: Problem, gather: Gather) -> Checked:
    """Collective: each rank's own partial sums. No two ranks hold the same, so bits are not compared."""
    assert want.product is not None
    allowed = tolerance("bf16", problem.k, 1)
    ranks = gather((errors_of(out, want.product, allowed), fingerprint(out.contiguous())))
    return _checked(Errors.pool([errors for errors, _ in ranks]), allowed, True, [d for _, d in ranks])


def _checked(errors: Errors, allowed: Tolerance, same_bits: bool, digests: list[str]) -> Checked:
    return Checked(errors, same_bits, same_bits and errors.within(allowed), " ".join(digests))
