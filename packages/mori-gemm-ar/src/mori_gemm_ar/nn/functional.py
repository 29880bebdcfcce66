"""The op inside a compiled model: an operator of torch.library, which the compiler takes whole.

    y = torch.relu(nn.gemm_all_reduce(op, a, b, a_scale, b_scale))     # under torch.compile, too

The compiler sees a function of tensors that returns a new one: [M, N] bf16, storage of its own, no argument
changed. Calling the op itself stays the way that copies nothing; here the result is copied out of its
window, and with a bias that copy is the addition: once, to the finished sum, on every rank alike.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import MutableMapping

import torch
from mori_shmem.errors import UnsupportedShape

from mori_gemm_ar.nn.watch import watch
from mori_gemm_ar.op import GemmAllReduce
from mori_gemm_ar.quant.operands import FP8

_ops: MutableMapping[int, GemmAllReduce] = weakref.WeakValueDictionary()
_handles: MutableMapping[GemmAllReduce, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def gemm_all_reduce(
    op: GemmAllReduce,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """op(a, b, a_scale, b_scale) + bias as a new tensor. Collective; the caller keeps `op` alive."""
    return by_handle(handle_of(op), op.n, a, b, a_scale, b_scale, bias)


def by_handle(
    handle: int,
    n: int,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The same for an op that is known by its number."""
    if a.dtype != FP8 or b.dtype != FP8:
        raise UnsupportedShape(f"a is {a.dtype}, b is {b.dtype}: allowed is torch.float8_e4m3fn")
    # As bytes, since torch's own check of operators cannot compare fp8 tensors.
    codes = a.view(torch.uint8), b.view(torch.uint8)
    result: torch.Tensor = _gemm_all_reduce(*codes, a_scale, b_scale, handle, n, bias)
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def handle_of(op: GemmAllReduce) -> int:
    """The number by which the operator finds its op: compilers pass numbers, not objects."""
    if op not in _handles:
        _handles[op] = next(_numbers)
        _ops[_handles[op]] = op
    return _handles[op]


def in_window(
    op: GemmAllReduce, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """The op's own call, watched where that is switched on: a view that its next call overwrites."""
    result = op(a, b, a_scale, b_scale)
    watch(op, result, a, b, a_scale, b_scale)
    return result


def add_bias(total: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """total + bias in fp32, rounded to bf16 once, in new storage."""
    return torch.add(total, bias).to(torch.bfloat16)


@torch.library.custom_op("mori_gemm_ar::gemm_all_reduce", mutates_args=())
def _gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    handle: int,
    n: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    view = in_window(_ops[handle], a.view(FP8), b.view(FP8), a_scale, b_scale)
    return view.clone() if bias is None else add_bias(view, bias)


@_gemm_all_reduce.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    handle: int,
    n: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty(a.shape[0], n, dtype=torch.bfloat16, device=a.device)
