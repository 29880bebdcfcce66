"""Low-latency mode: rows by expert, weights in combine, two live results, hooks.

A shape (max tokens, hidden, experts, top-k) has two slots, used in turn, each an op with its rows by expert:
the result of a dispatch stays until the dispatch after the next. A third, small op carries weights.

  dispatch   cast to fp8; the op's dispatch_send; hook: dispatch_recv, rows laid out by expert
  combine    weights go where their tokens went, and meet every rank on the way: all have ended the combine
             before, so the slot's rows for combine may be written. Then every expert's row times its weight,
             added up by token, and the op's combine_send; hook: combine_recv

With masks, the weights that arrive may be of fewer tokens than the rows: a rank has died in between. They are
matched by where they are from; a row without weights counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, UnsupportedShape

from mori_ep.adapters.deepep.events import EventOverlap, after
from mori_ep.adapters.deepep.ids import expert_ids
from mori_ep.adapters.deepep.quant import BLOCK, cast_rows, pack_exponents
from mori_ep.arguments import check_flag, check_rows, check_shaped, check_slots, check_whole
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.config import EpDispatchCombineKernelType as Kind
from mori_ep.op import EpDispatchCombineOp

Shape = tuple[int, int, int, int]  # max tokens per rank, hidden, experts, k
Hook = Callable[[], None]


class Handle(tuple[Any, ...]):
    """(source tokens [experts here, rows] int32, where each rank's rows lie [experts here, ranks] int64 with
    the first row in the high half and their number in the low, max tokens, hidden, experts)."""

    slot: Slot
    number: int  # of the dispatch in its slot
    num_tokens: int


class Slot:
    """One op of a shape and what its result consists of, at fixed addresses."""

    def __init__(self, op: EpDispatchCombineOp, shape: Shape) -> None:
        config, device = op.config, op.comm.device
        self.op, self.shape, self.number = op, shape, 0
        experts, rows = config.num_experts_per_rank, config.recv_capacity
        self.sources = torch.empty(experts, rows, dtype=torch.int32, device=device)
        self.ranges = torch.zeros(experts, config.world_size, dtype=torch.int64, device=device)
        self._scales: dict[torch.dtype, torch.Tensor] = {}
        self._combine_buffer: torch.Tensor | None = None

    def scales(self, dtype: torch.dtype, width: int) -> torch.Tensor:
        """[experts, rows, width], column by column."""
        if dtype not in self._scales:
            experts, rows = self.sources.shape
            columns = torch.zeros(experts, width, rows, dtype=dtype, device=self.sources.device)
            self._scales[dtype] = columns.transpose(1, 2)
        return self._scales[dtype]

    @property
    def combine_buffer(self) -> torch.Tensor:
        if self._combine_buffer is None:
            size = (*self.sources.shape, self.shape[1])
            self._combine_buffer = torch.zeros(size, dtype=torch.bfloat16, device=self.sources.device)
        return self._combine_buffer

    def fill_ranges(self, positions: torch.Tensor, count: torch.Tensor) -> None:
        """Which source rank's rows lie where, from every row's source position."""
        stride = self.op.config.position_stride
        torch.remainder(positions, stride, out=self.sources)
        rows = torch.arange(positions.shape[1], device=positions.device)
        here = rows < count.unsqueeze(1)
        ranks = torch.where(here, positions // stride, 0).long()
        number = torch.zeros_like(self.ranges).scatter_add_(1, ranks, here.long())
        begin = number.cumsum(1) - number
        torch.bitwise_or(begin << 32, number, out=self.ranges)


class Ops:
    """The ops of one shape."""

    def __init__(self, comm: Any, shape: Shape, *, elastic: bool) -> None:
        self.slots = [Slot(_rows_op(comm, shape, elastic), shape) for _ in range(2)]
        self.weights = _weights_op(comm, shape, elastic)
        self.turn = 0

    def next_slot(self) -> Slot:
        """The one that is due; `advance` makes it the last."""
        return self.slots[(self.turn + 1) % 2]

    def advance(self) -> None:
        self.turn += 1
        self.slots[self.turn % 2].number += 1

    def all(self) -> list[EpDispatchCombineOp]:
        return [*(slot.op for slot in self.slots), self.weights]


class LowLatency:
    """The low-latency calls of one Buffer."""

    def __init__(self, comm: Any, *, elastic: bool) -> None:
        self._comm, self._elastic = comm, elastic
        self._ops: dict[Shape, Ops] = {}
        self._masked: dict[int, bool] = {}  # as the caller set them

    def dispatch(
        self,
        shape: Shape,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        stats: torch.Tensor | None,
        *,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        async_finish: bool,
        in_halves: bool,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Hook | None]:
        self._check_tensors(shape, x, topk_idx, stats)
        _check_dispatch(shape, x, topk_idx, use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        ops = self._ops_of(shape)
        rows, scales = cast_rows(x, round_scale=round_scale) if use_fp8 else (x, None)
        slot = ops.next_slot()
        op = slot.op
        out, _, out_scales, ids, _ = op.dispatch_send(rows, None, scales, expert_ids(topk_idx, shape[2]))
        ops.advance()
        packed, count, _, _ = op.convert_dispatch_output(out, ids, dispatch_out_scales=out_scales)
        packed_scales = _scale_tensor(slot, use_ue8m0) if use_fp8 else None

        def receive() -> None:
            op.dispatch_recv()
            _, _, positions, _ = op.convert_dispatch_output(out, ids, dispatch_out_scales=out_scales)
            if packed_scales is not None:
                _copy_scales(packed_scales, op.packed_recv_scales, count, use_ue8m0)
            slot.fill_ranges(positions, count)
            if stats is not None:
                stats.add_(count)

        handle = Handle((slot.sources, slot.ranges, *shape[:3]))
        handle.slot, handle.number, handle.num_tokens = slot, slot.number, x.shape[0]
        result = packed if packed_scales is None else (packed, packed_scales)
        return result, count, handle, *_finish(receive, async_finish, in_halves)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        *,
        async_finish: bool,
        in_halves: bool,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        slot = self._slot_of(handle)
        _check_combine(slot, x, topk_idx, topk_weights, handle, out)
        op, ids, n = slot.op, expert_ids(topk_idx, slot.shape[2]), handle.num_tokens
        op.check_due("combine_send")  # before the weights of others are waited for
        carrier = self._ops[slot.shape].weights
        weights, *_ = carrier.dispatch(topk_weights, None, None, ids)
        if self._elastic:
            self.masks()  # a rank that was found to be late here is not waited for once more
            weights = _matched(weights, carrier.get_dispatch_src_token_pos(), op.get_dispatch_src_token_pos())
        rows = op.convert_combine_input(x, weights=weights)
        combined, _ = op.combine_send(rows, None, ids, use_external_inp_buf=0)
        if out is None:
            out = torch.empty(n, slot.shape[1], dtype=torch.bfloat16, device=x.device)
        result = out

        def receive() -> None:
            op.combine_recv()
            result.copy_(combined[:n])

        return out, *_finish(receive, async_finish, in_halves)

    def combine_buffer(self, handle: Handle) -> torch.Tensor:
        return self._slot_of(handle).combine_buffer

    # ---- masks ----

    def update_mask(self, rank: int, masked: bool) -> None:
        self._check_elastic()
        check_whole("rank", rank, 0, self._comm.world_size - 1)
        if rank == self._comm.rank:
            raise ArgumentError(f"rank={rank} is this rank: another is needed")
        self._masked[rank] = check_flag("mask", masked)
        for op in self._all_ops():
            op.update_mask(rank, masked)

    def masks(self) -> torch.Tensor:
        """[ranks] int32. A rank that one op had to leave out is left out of the others from here on."""
        self._check_elastic()
        found = torch.zeros(self._comm.world_size, dtype=torch.int32)
        for op in self._all_ops():
            found |= op.query_mask()
        for rank in found.nonzero().flatten().tolist():
            self.update_mask(rank, True)
        return found

    def clean_masks(self) -> None:
        self._check_elastic()
        self._masked.clear()
        for op in self._all_ops():
            op.clean_mask()

    def close(self) -> None:
        for op in self._all_ops():
            op.close()

    # ---- inside ----

    def _all_ops(self) -> list[EpDispatchCombineOp]:
        return [op for ops in self._ops.values() for op in ops.all()]

    def _ops_of(self, shape: Shape) -> Ops:
        if shape not in self._ops:
            ops = self._ops[shape] = Ops(self._comm, shape, elastic=self._elastic)
            for rank, masked in self._masked.items():
                for op in ops.all():
                    op.update_mask(rank, masked)
        return self._ops[shape]

    def _check_tensors(
        self, shape: Shape, x: torch.Tensor, topk_idx: torch.Tensor, stats: torch.Tensor | None
    ) -> None:
        """What the op would refuse, before a new one is made among the ranks or a slot is used."""
        max_tokens, _, experts, topk = shape
        device, world = self._comm.device, self._comm.world_size
        n = check_rows("x", x, device)
        if n > max_tokens:
            raise UnsupportedShape(
                f"x has {n} tokens: num_max_dispatch_tokens_per_rank={max_tokens} is the most"
            )
        check_slots("topk_idx", topk_idx, torch.int64, n, topk, device)
        if experts < 1 or experts % world:
            raise ArgumentError(f"num_experts={experts}: a multiple of the {world} ranks is needed")
        if stats is None:
            return
        wide = isinstance(stats, torch.Tensor) and stats.dtype == torch.int64
        dtype = torch.int64 if wide else torch.int32
        check_shaped("cumulative_local_expert_recv_stats", stats, dtype, (experts // world,), device)

    def _slot_of(self, handle: Handle) -> Slot:
        if not isinstance(handle, Handle) or not hasattr(handle, "slot"):
            raise ArgumentError(
                f"handle is {described(handle)}: what low_latency_dispatch returned is needed"
            )
        if not any(handle.slot in ops.slots for ops in self._ops.values()):
            raise ArgumentError("this handle is of another Buffer: pass what low_latency_dispatch returned")
        if handle.number != handle.slot.number:
            raise ArgumentError(
                "this handle's result is gone: at most two low-latency results are live, and two later "
                "dispatches of this shape have been made"
            )
        return handle.slot

    def _check_elastic(self) -> None:
        if not self._elastic:
            raise UnsupportedShape("this Buffer was made with enable_shrink=False: no rank can be left out")


# ---- ops ----


def _rows_op(comm: Any, shape: Shape, elastic: bool) -> EpDispatchCombineOp:
    max_tokens, hidden, experts, topk = shape
    across = comm.backend == "internode"
    kind = Kind.IntraNodeLL if elastic else Kind.AsyncLL
    config = EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=experts,
        data_type=torch.bfloat16,
        hidden_dim=hidden,
        max_num_inp_token_per_rank=max_tokens,
        num_experts_per_token=topk,
        scale_dim=hidden // BLOCK,
        scale_type_size=4,
        kernel_type=Kind.InterNodeV1LL if across else kind,
        elastic=elastic,
        **_nodes(comm),
    )
    return EpDispatchCombineOp(config, comm)


def _weights_op(comm: Any, shape: Shape, elastic: bool) -> EpDispatchCombineOp:
    """Its rows are weights: [n, k] fp32."""
    max_tokens, _, experts, topk = shape
    across = comm.backend == "internode"
    kind = Kind.IntraNodeLL if elastic else Kind.IntraNode
    config = EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=experts,
        data_type=torch.float32,
        hidden_dim=topk,
        max_num_inp_token_per_rank=max_tokens,
        num_experts_per_token=topk,
        max_token_type_size=4,
        kernel_type=Kind.InterNodeV1LL if across else kind,
        elastic=elastic,
        **_nodes(comm),
    )
    return EpDispatchCombineOp(config, comm)


def _nodes(comm: Any) -> dict[str, int]:
    return {"gpu_per_node": comm.ranks_per_node} if comm.backend == "internode" else {}


# ---- the parts of a call ----


def _finish(receive: Hook, async_finish: bool, in_halves: bool) -> tuple[EventOverlap, Hook | None]:
    if in_halves:
        return EventOverlap(), receive
    receive()
    return after(async_finish), None


def _scale_tensor(slot: Slot, use_ue8m0: bool) -> torch.Tensor:
    width = slot.shape[1] // BLOCK
    return slot.scales(torch.int32, width // 4) if use_ue8m0 else slot.scales(torch.float32, width)


def _copy_scales(to: torch.Tensor, scales: torch.Tensor | None, count: torch.Tensor, packed: bool) -> None:
    """The scales of the rows that came. Where counting would wait for a device, all rows are copied."""
    assert scales is not None
    most = int(count.max()) if count.device.type == "cpu" else scales.shape[1]
    came = scales[:, :most]
    to[:, :most].copy_(pack_exponents(came.contiguous()) if packed else came)


def _matched(weights: torch.Tensor, from_: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Rows of `weights`, which are from positions `from_`, in the order of `wanted`; 0 where none is."""
    matched = weights.new_zeros(weights.shape)
    if len(from_) and len(wanted):
        at = torch.searchsorted(from_, wanted).clamp(max=len(from_) - 1)
        found = from_[at] == wanted
        matched[: len(wanted)][found] = weights[at[found]]
    return matched


def _check_dispatch(
    shape: Shape, x: torch.Tensor, ids: torch.Tensor, *, use_fp8: bool, round_scale: bool, use_ue8m0: bool
) -> None:
    hidden = shape[1]
    if x.dtype != torch.bfloat16:
        raise ArgumentError(f"x is {x.dtype}: bfloat16 is needed, the cast to fp8 is made here")
    if ids.dtype != torch.int64:
        raise ArgumentError(f"topk_idx is {ids.dtype}: int64 is needed")
    if use_fp8 and hidden % BLOCK:
        raise UnsupportedShape(f"hidden size {hidden} with use_fp8: a multiple of {BLOCK} is needed")
    if use_ue8m0 and not (use_fp8 and round_scale and hidden % (4 * BLOCK) == 0):
        raise UnsupportedShape(
            f"use_ue8m0 with use_fp8={use_fp8}, round_scale={round_scale}, hidden size {hidden}: it needs "
            f"both, and a multiple of {4 * BLOCK}"
        )


def _check_combine(
    slot: Slot,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    handle: Handle,
    out: torch.Tensor | None,
) -> None:
    size, device = (*slot.sources.shape, slot.shape[1]), slot.sources.device
    slots = (handle.num_tokens, slot.shape[3])
    check_shaped("x", x, torch.bfloat16, size, device)
    check_shaped("topk_idx", ids, torch.int64, slots, device)
    check_shaped("topk_weights", weights, torch.float32, slots, device)
    if out is not None:
        check_shaped("out", out, torch.bfloat16, (handle.num_tokens, slot.shape[1]), device)
