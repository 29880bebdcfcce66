"""The op inside a compiled model: operators of torch.library, which the compiler takes whole.

    rows, weights, scales, ids, count = nn.dispatch(op, x, weights, None, expert_ids)      # under
    torch.compile, too y = experts(rows, weights, ids)
    out, _ = nn.combine(op, y, None, expert_ids, after=count)

The compiler sees functions that return new tensors and change none: [recv capacity, ...] rows of which the
first `count` mean something, [n, hidden] out of combine. Calling the op itself stays the way that copies
nothing; here results are copied out of its memory. `after` is any tensor of the dispatch: it keeps the two in
order where y does not depend on the rows.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import MutableMapping

import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError

from mori_ep import checks
from mori_ep.arguments import check_rows, check_tensor
from mori_ep.formats import CODES, DTYPES
from mori_ep.op import EpDispatchCombineOp

_ops: MutableMapping[int, EpDispatchCombineOp] = weakref.WeakValueDictionary()
_handles: MutableMapping[EpDispatchCombineOp, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def dispatch(
    op: EpDispatchCombineOp,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """op.dispatch as new tensors. Collective; the caller keeps `op` alive."""
    if not torch.compiler.is_compiling():  # there, operators are refused when they run
        _check_op(op)
        checks.dispatch_shape(op.config, op.comm.device, x, weights, scales, indices)
    # As bytes, since torch's own check of operators cannot compare 8-bit floats.
    rows, out_weights, out_scales, ids, count = _dispatch(
        x.view(torch.uint8),
        weights,
        None if scales is None else scales.view(torch.uint8),
        indices,
        CODES[x.dtype],
        x.shape[1],
        handle_of(op),
        op.config.recv_capacity,
    )
    back = None if scales is None else out_scales.view(scales.dtype)
    return rows.view(x.dtype), out_weights, back, ids, count


def combine(
    op: EpDispatchCombineOp,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """op.combine as new tensors of this rank's n tokens. Collective."""
    if not torch.compiler.is_compiling():
        _check_op(op)
        check_rows("y", y, op.comm.device)
        checks.check_combine_dtype(op.config, op.dispatch_dtype, y.dtype)
        check_rows("indices", indices, op.comm.device)
        for name, given in (("weights", weights), ("after", after)):
            if given is not None:
                check_tensor(name, given, op.comm.device)
    out, out_weights = _combine(
        y.view(torch.uint8), weights, indices, CODES[y.dtype], y.shape[1], handle_of(op), after
    )
    return out.view(y.dtype), None if weights is None else out_weights


def _check_op(op: object) -> None:
    if not isinstance(op, EpDispatchCombineOp):
        raise ArgumentError(f"op is {described(op)}: an EpDispatchCombineOp is needed")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def handle_of(op: EpDispatchCombineOp) -> int:
    """The number by which the operators find their op: compilers pass numbers, not objects."""
    _check_op(op)
    if op not in _handles:
        _handles[op] = next(_numbers)
        _ops[_handles[op]] = op
    return _handles[op]


@torch.library.custom_op("mori_ep::dispatch", mutates_args=())
def _dispatch(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    indices: torch.Tensor,
    dtype: int,
    hidden: int,
    handle: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    given = x.view(DTYPES[dtype]).view(-1, hidden)
    rows, out_weights, out_scales, ids, count = _ops[handle].dispatch(given, weights, scales, indices)
    copied = rows.view(torch.uint8).clone(), out_weights.clone()
    scale_bytes = x.new_empty(0) if out_scales is None else out_scales.view(torch.uint8).clone()
    return *copied, scale_bytes, ids.clone(), count.clone()


@_dispatch.register_fake
def _(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    indices: torch.Tensor,
    dtype: int,
    hidden: int,
    handle: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    topk = indices.shape[1]
    return (
        x.new_empty(capacity, x.shape[1]),
        indices.new_empty(capacity, topk, dtype=torch.float32),
        x.new_empty(0) if scales is None else x.new_empty(capacity, scales.shape[1]),
        indices.new_empty(capacity, topk),
        indices.new_empty(1),
    )


@torch.library.custom_op("mori_ep::combine", mutates_args=())
def _combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    dtype: int,
    hidden: int,
    handle: int,
    after: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, rows = indices.shape[0], y.view(DTYPES[dtype]).view(-1, hidden)
    out, out_weights = _ops[handle].combine(rows, weights, indices, use_external_inp_buf=1)
    mine = indices.new_empty(0, dtype=torch.float32) if out_weights is None else out_weights[:n].clone()
    return out[:n].view(torch.uint8).clone(), mine


@_combine.register_fake
def _(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    dtype: int,
    hidden: int,
    handle: int,
    after: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (0,) if weights is None else (indices.shape[0], indices.shape[1])
    return y.new_empty(indices.shape[0], y.shape[1]), indices.new_empty(shape, dtype=torch.float32)
