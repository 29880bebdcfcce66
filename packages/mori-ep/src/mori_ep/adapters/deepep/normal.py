"""Normal mode: rows of exactly those tokens that came, in tensors of the caller's own; any number of live
handles.

Callers name no capacity, so an op is made for the largest number of tokens that any rank brings, rounded up
to a power of two; ranks tell each other their numbers at the start of every dispatch without a handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, LayoutError

from mori_ep import formats
from mori_ep.adapters.deepep.events import EventOverlap, after
from mori_ep.adapters.deepep.ids import expert_ids
from mori_ep.arguments import (
    check_rows,
    check_shaped,
    check_slots,
    check_tensor,
    check_whole,
    shape_of,
)
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.config import EpDispatchCombineKernelType as Kind
from mori_ep.op import EpDispatchCombineOp
from mori_ep.routing import EpDispatchRoutingHandle

SMALLEST_CAPACITY = 128
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Key = tuple[int, int, int, int, int]  # capacity, hidden, k, experts, bytes of a row's scales


@dataclass(eq=False)
class NormalHandle:
    """Where the rows of one dispatch went; for combine, and to dispatch alike."""

    op: EpDispatchCombineOp
    routing: EpDispatchRoutingHandle
    ids: torch.Tensor  # [n, k] int32
    num_received: int


class Normal:
    """The normal calls of one Buffer."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._ops: dict[Key, EpDispatchCombineOp] = {}

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, async_finish: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        _check_ids(topk_idx, self._comm.device)
        self._check_experts("num_experts", num_experts)
        num_ranks = self._comm.world_size
        valid = (topk_idx >= 0) & (topk_idx < num_experts)
        experts = _marked(topk_idx, valid, num_experts)
        ranks = _marked(topk_idx // (num_experts // num_ranks), valid, num_ranks)
        per_node = None
        if self._comm.backend == "internode":
            nodes = ranks.view(len(ranks), self._comm.num_nodes, self._comm.ranks_per_node).any(2)
            per_node = nodes.sum(0, dtype=torch.int32)
        return (
            ranks.sum(0, dtype=torch.int32),
            per_node,
            experts.sum(0, dtype=torch.int32),
            ranks,
            after(async_finish),
        )

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_experts: int,
        alignment: int,
        num_worst_tokens: int,
        async_finish: bool,
    ) -> tuple[Rows, torch.Tensor, torch.Tensor | None, list[int], NormalHandle, EventOverlap]:
        _check_ids(topk_idx, self._comm.device)
        rows, scales = _parted(x)
        self._check_dispatch(rows, topk_idx, topk_weights, scales, num_experts)
        ids = expert_ids(topk_idx, num_experts)
        op = self._op_for(rows, ids, scales, num_experts)
        out, weights, out_scales, out_ids, _, routing = op.dispatch(
            rows, topk_weights, scales, ids, call_local_expert_count=True, return_routing=True
        )
        count = int(routing.recv_count)
        if num_worst_tokens and count > num_worst_tokens:
            raise ArgumentError(f"num_worst_tokens={num_worst_tokens}, but {count} rows have come")
        size = num_worst_tokens or count
        here, here_weights = self._local(
            op, out_ids[:count], weights[:count] if topk_weights is not None else None
        )
        per_expert = [] if num_worst_tokens else op.local_expert_count.tolist()
        return (
            _received(out, out_scales, count, size),
            _padded(here, size, -1),
            None if here_weights is None else _padded(here_weights, size, 0),
            [-(-n // alignment) * alignment for n in per_expert],
            NormalHandle(op, routing, ids, count),
            after(async_finish),
        )

    def replay(
        self, x: Rows, handle: NormalHandle, async_finish: bool
    ) -> tuple[Rows, None, None, None, None, EventOverlap]:
        self._check_handle(handle)
        rows, scales = _parted(x)
        out, _, out_scales, _, _ = handle.op.dispatch(rows, None, scales, handle.ids, routing=handle.routing)
        received = _received(out, out_scales, handle.num_received, handle.num_received)
        return received, None, None, None, None, after(async_finish)

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
        async_finish: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        self._check_handle(handle)
        check_rows("x", x, self._comm.device)
        if x.dtype != torch.bfloat16:
            raise ArgumentError(f"x is {x.dtype}: bfloat16 is needed")
        n = len(handle.ids)
        addends = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        for addend in addends:
            check_shaped("bias", addend, x.dtype, (n, x.shape[1]), self._comm.device)
        out, weights = handle.op.combine(
            x, topk_weights, handle.ids, use_external_inp_buf=1, routing=handle.routing
        )
        combined = out[:n].clone()
        for addend in addends:
            combined = combined.float().add_(addend).to(x.dtype)
        return combined, None if weights is None else weights[:n].clone(), after(async_finish)

    def close(self) -> None:
        for op in self._ops.values():
            op.close()

    # ---- inside ----

    def _check_dispatch(
        self,
        rows: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        num_experts: int,
    ) -> None:
        """All that the op would refuse, before the ranks meet to choose one."""
        device = self._comm.device
        n = check_rows("x", rows, device)
        if rows.dtype not in formats.CODES or rows.dtype.itemsize > torch.bfloat16.itemsize:
            raise ArgumentError(f"x is {rows.dtype}: bfloat16, or 8-bit floats with their scales, are needed")
        if topk_idx.shape[0] != n or topk_idx.device != device:
            raise LayoutError(
                f"topk_idx is {tuple(topk_idx.shape)} on {topk_idx.device}, x has {n} rows on {device}: a "
                "row of ids for each is needed"
            )
        if weights is not None:
            check_slots("topk_weights", weights, torch.float32, n, topk_idx.shape[1], device)
        if scales is not None and check_rows("scales", scales, device) != n:
            raise LayoutError(f"scales has {scales.shape[0]} rows, x has {n}: as many are needed")
        self._check_experts("the length of num_tokens_per_expert", num_experts)

    def _check_experts(self, name: str, num_experts: int) -> None:
        if check_whole(name, num_experts, 1) % self._comm.world_size:
            raise ArgumentError(
                f"{name} is {num_experts}: a multiple of the {self._comm.world_size} ranks is needed"
            )

    def _check_handle(self, handle: object) -> None:
        if not isinstance(handle, NormalHandle):
            raise ArgumentError(f"handle is {described(handle)}: what dispatch returned is needed")
        if handle.op not in self._ops.values():
            raise ArgumentError("this handle is of another Buffer: pass what dispatch of this one returned")

    def _op_for(
        self, rows: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None, num_experts: int
    ) -> EpDispatchCombineOp:
        """Collective: the op that holds what every rank brings."""
        scale_bytes = 0 if scales is None else scales.shape[1] * scales.dtype.itemsize
        mine = (rows.shape[0], rows.shape[1], ids.shape[1], num_experts, scale_bytes)
        given = self._comm.all_gather(mine)
        if len({shape[1:] for shape in given}) > 1:
            raise ArgumentError(
                "(hidden size, k, experts, bytes of scales) differ between ranks: "
                f"{[shape[1:] for shape in given]}"
            )
        capacity = SMALLEST_CAPACITY
        while capacity < max(shape[0] for shape in given):
            capacity *= 2
        key = (capacity, *mine[1:])
        if key not in self._ops:
            self._ops[key] = self._new_op(key)
        return self._ops[key]

    def _new_op(self, key: Key) -> EpDispatchCombineOp:
        capacity, hidden, topk, num_experts, scale_bytes = key
        across = self._comm.backend == "internode"
        nodes = {"gpu_per_node": self._comm.ranks_per_node} if across else {}
        config = EpDispatchCombineConfig.for_comm(
            self._comm,
            num_experts=num_experts,
            data_type=torch.bfloat16,
            hidden_dim=hidden,
            max_num_inp_token_per_rank=capacity,
            num_experts_per_token=topk,
            scale_dim=scale_bytes,
            scale_type_size=1,
            kernel_type=Kind.InterNode if across else Kind.IntraNode,
            **nodes,
        )
        return EpDispatchCombineOp(config, self._comm)

    def _local(
        self, op: EpDispatchCombineOp, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ids among the experts of this rank, int64 with -1 for others; weights with 0 for others."""
        experts = op.config.num_experts_per_rank
        local = ids.long() - op.config.rank * experts
        here = (local >= 0) & (local < experts)
        return torch.where(here, local, -1), None if weights is None else torch.where(here, weights, 0.0)


def _marked(values: torch.Tensor, valid: torch.Tensor, num: int) -> torch.Tensor:
    """[n, num] bool: which values a row holds."""
    marks = torch.zeros(len(values), num + 1, dtype=torch.bool, device=values.device)
    return marks.scatter_(1, torch.where(valid, values, num), True)[:, :num]


def _received(out: torch.Tensor, scales: torch.Tensor | None, count: int, size: int) -> Rows:
    rows = _padded(out[:count], size, None)
    return rows if scales is None else (rows, _padded(scales[:count], size, None))


def _padded(rows: torch.Tensor, size: int, fill: float | None) -> torch.Tensor:
    """A copy with `size` rows; those beyond the ones given hold `fill`, or anything."""
    copy = torch.empty(size, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    copy[: len(rows)].copy_(rows)
    if fill is not None:
        copy[len(rows) :] = fill
    return copy


def _parted(x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows, their scales): callers give a tensor, or both as a tuple."""
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2 or not isinstance(x[1], torch.Tensor):
        raise ArgumentError(f"x is ({', '.join(map(shape_of, x))}): a tensor, or (rows, scales), is needed")
    return x[0], x[1].contiguous()


def _check_ids(topk_idx: torch.Tensor, device: torch.device) -> None:
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2 or topk_idx.dtype != torch.int64:
        raise ArgumentError(f"topk_idx is {shape_of(topk_idx)}: int64 [n, k] is needed")
    check_tensor("topk_idx", topk_idx, device)
