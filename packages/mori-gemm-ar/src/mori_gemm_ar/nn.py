"""The op inside a compiled model: an operator of torch.library, which the compiler takes whole.

    y = torch.relu(nn.gemm_all_reduce(op, a, b, a_scale, b_scale))     # under torch.compile, too

The compiler sees a function of four tensors that returns a new one: [M, N] bf16, storage of its own, no
argument changed. Calling the op itself stays the way that copies nothing; here the result is copied out of
its window.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import MutableMapping

import torch
from mori_shmem.errors import UnsupportedShape

from mori_gemm_ar.op import GemmAllReduce
from mori_gemm_ar.quant.operands import FP8

_ops: MutableMapping[int, GemmAllReduce] = weakref.WeakValueDictionary()
_handles: MutableMapping[GemmAllReduce, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def gemm_all_reduce(
    op: GemmAllReduce, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """op(a, b, a_scale, b_scale) as a new tensor. Collective; the caller keeps `op` alive."""
    if a.dtype != FP8 or b.dtype != FP8:
        raise UnsupportedShape(f"a is {a.dtype}, b is {b.dtype}: allowed is torch.float8_e4m3fn")
    # As bytes, since torch's own check of operators cannot compare fp8 tensors.
    codes = a.view(torch.uint8), b.view(torch.uint8)
    result: torch.Tensor = _gemm_all_reduce(*codes, a_scale, b_scale, handle_of(op), op.n)
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def handle_of(op: GemmAllReduce) -> int:
    """The number by which the operator finds its op: compilers pass numbers, not objects."""
    if op not in _handles:
        _handles[op] = next(_numbers)
        _ops[_handles[op]] = op
    return _handles[op]


@torch.library.custom_op("mori_gemm_ar::gemm_all_reduce", mutates_args=())
def _gemm_all_reduce(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, handle: int, n: int
) -> torch.Tensor:
    out = torch.empty(a.shape[0], n, dtype=torch.bfloat16, device=a.device)
    return _ops[handle](a.view(FP8), b.view(FP8), a_scale, b_scale, out=out)


@_gemm_all_reduce.register_fake
def _(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, handle: int, n: int
) -> torch.Tensor:
    return torch.empty(a.shape[0], n, dtype=torch.bfloat16, device=a.device)
