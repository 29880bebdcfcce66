"""DeepEP's `Buffer`: the same calls on EpDispatchCombineOp.

    buffer = Buffer(group, low_latency_mode=True)
    x, count, handle, event, hook = buffer.low_latency_dispatch(hidden, ids, max_tokens, num_experts)
    out, event, hook = buffer.low_latency_combine(experts(x), ids, weights, handle)

    layout = buffer.get_dispatch_layout(ids, num_experts)
    x, ids_here, weights_here, counts, handle, event = buffer.dispatch(hidden, topk_idx=ids, ...)
    out, weights_out, event = buffer.combine(y, handle)

What is as there: shapes, dtypes, which rows come, weights in low_latency_combine and none in combine, hooks,
handles, two live low-latency results, masks. What is not, or better: rows come in the order of (source rank,
token) in both modes; memory is taken for each shape when it is first used, whatever the sizes given here, so
the first call of a shape is collective and slow; calls run in the order of the caller's stream.

An op of ours moves a row once to a *rank*, not once per expert. So experts' rows are weighted and added on
the experts' rank, for which low_latency_combine first sends the weights there; each rank's share is rounded
to bf16 before the shares are added in fp32 and rounded once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mori_shmem
import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, ClosedError, UnsupportedShape

from mori_ep import checks
from mori_ep.adapters.deepep import sizes
from mori_ep.adapters.deepep.events import EventHandle, EventOverlap, wait_for
from mori_ep.adapters.deepep.low_latency import Handle, LowLatency
from mori_ep.adapters.deepep.normal import Normal, NormalHandle
from mori_ep.adapters.deepep.sizes import Config
from mori_ep.arguments import check_flags, check_rows, check_shaped, check_whole, shape_of

_numbers = itertools.count(1)
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Buffer:
    """See the module. Calls are collective and made in the same order on every rank."""

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """group  a torch process group; the Buffer makes a communicator of its own among its ranks
        comm   instead: a communicator of mori_shmem, or of mori_ep.internode, that the caller keeps
        num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_*  accepted: memory and paths are our plan's
        enable_shrink  ranks that die or are late are masked in low-latency calls, and the others go on
        """
        if (group is None) == (comm is None):
            raise ArgumentError("a Buffer needs either group= (a process group) or comm= (a communicator)")
        _check_made_of(
            sizes={
                "num_nvl_bytes": num_nvl_bytes,
                "num_rdma_bytes": num_rdma_bytes,
                "num_qps_per_rank": num_qps_per_rank,
            },
            low_latency_mode=low_latency_mode,
            allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
            allow_mnnvl=allow_mnnvl,
            explicitly_destroy=explicitly_destroy,
            enable_shrink=enable_shrink,
        )
        if comm is not None:
            checks.check_comm(comm)
        self._owned = comm is None
        if comm is None:
            comm = mori_shmem.init(group=group, name=f"mori-ep/deepep/{next(_numbers)}")
        self.comm = comm
        self.group = group
        self.rank: int = comm.rank
        self.group_size: int = comm.world_size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._normal = Normal(comm)
        self._low_latency = LowLatency(comm, elastic=enable_shrink)
        self._destroyed = False

    # ---- before a Buffer is made ----

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        if check_whole("new_num_sms", new_num_sms, 2) % 2:
            raise ArgumentError(f"new_num_sms={new_num_sms}: an even number is needed")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that this shape holds on each rank once it is used."""
        return sizes.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        check_whole("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        check_whole("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms)

    # ---- normal mode ----

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """(tokens for each rank [W], for each node [nodes] or None in one node, for each expert [experts],
        whether a token goes to a rank [n, W] bool, event). Local."""
        self._begin_normal(None, previous_event, async_finish, allocate_on_comm_stream)
        return self._normal.layout(topk_idx, num_experts, async_finish)

    def dispatch(
        self,
        x: Rows,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows,  # [received, hidden], with scales if x came with some
        torch.Tensor | None,  # [received, k] int64: numbers among the experts here, -1 for those elsewhere
        torch.Tensor | None,  # [received, k] fp32, 0 where that is -1
        list[int] | None,  # rows of each expert here, rounded up to expert_alignment
        NormalHandle | None,
        EventOverlap,
    ]:
        """Rows to the ranks of their experts; the results are the caller's own. With `handle`: as in that
        dispatch, and only the rows come back."""
        self._begin_normal(config, previous_event, async_finish, allocate_on_comm_stream)
        check_whole("expert_alignment", expert_alignment, 1)
        check_whole("num_worst_tokens", num_worst_tokens, 0)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ArgumentError("dispatch with a handle goes where that dispatch went: give only x")
            return self._normal.replay(x, handle, async_finish)
        if topk_idx is None or num_tokens_per_expert is None:
            raise UnsupportedShape(
                "dispatch without a handle needs topk_idx and num_tokens_per_expert (get_dispatch_layout): "
                "rows are routed by expert, not by is_token_in_rank alone"
            )
        if not isinstance(num_tokens_per_expert, torch.Tensor) or num_tokens_per_expert.dim() != 1:
            raise ArgumentError(
                f"num_tokens_per_expert is {shape_of(num_tokens_per_expert)}: a tensor [experts] is needed, "
                "as get_dispatch_layout gives it"
            )
        return self._normal.dispatch(
            x,
            topk_idx,
            topk_weights,
            len(num_tokens_per_expert),
            expert_alignment,
            num_worst_tokens,
            async_finish,
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Rows home and added up, without weights; `topk_weights` are added up beside them, `bias` last."""
        self._begin_normal(config, previous_event, async_finish, allocate_on_comm_stream)
        return self._normal.combine(x, handle, topk_weights, bias, async_finish)

    # ---- low latency ----

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """x  # [n, hidden] bf16
        topk_idx  # [n, k] int64, -1: no expert

        Returns rows by expert [experts here, max_tokens * ranks, hidden]: bf16, or with use_fp8 e4m3fn and
        their scales, whose last two dimensions lie column by column: [.., hidden / 128] fp32, or with
        use_ue8m0 [.., hidden / 512] int32 of four exponents; rows of each expert [experts here] int32; the
        handle; event; hook. They stay until the dispatch after the next.
        """
        self._check_low_latency(async_finish, return_recv_hook, wait_stats=dispatch_wait_recv_cost_stats)
        check_flags(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        check_whole("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        check_whole("num_experts", num_experts, 1)
        check_rows("x", x, self.comm.device)
        check_rows("topk_idx", topk_idx, self.comm.device)
        shape = (num_max_dispatch_tokens_per_rank, x.shape[1], num_experts, topk_idx.shape[1])
        return self._low_latency.dispatch(
            shape,
            x,
            topk_idx,
            cumulative_local_expert_recv_stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=async_finish,
            in_halves=return_recv_hook,
        )

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """x  # [experts here, max_tokens * ranks, hidden] bf16, rows as low_latency_dispatch gave them
        topk_weights  # [n, k] fp32: what each expert's row is multiplied by

        Returns ([n, hidden] bf16, event, hook). `zero_copy` or not, x is read where it lies.
        """
        self._check_low_latency(async_finish, return_recv_hook, wait_stats=combine_wait_recv_cost_stats)
        check_flags(use_logfmt=use_logfmt, zero_copy=zero_copy)
        if use_logfmt:
            raise UnsupportedShape("use_logfmt=True: there is no such transport here, only rows as bf16")
        return self._low_latency.combine(
            x, topk_idx, topk_weights, handle, async_finish=async_finish, in_halves=return_recv_hook, out=out
        )

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """[experts here, max_tokens * ranks, hidden] bf16, to be filled and passed to low_latency_combine."""
        self._check_open()
        return self._low_latency.combine_buffer(handle)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing to clean: the modes share no memory, and flags only grow."""
        self._check_open()
        check_whole("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        check_whole("hidden", hidden, 1)
        check_whole("num_experts", num_experts, 1)

    def low_latency_update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        self._check_open()
        self._low_latency.update_mask(rank, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """1 in mask_status[rank] for each rank that is left out; [ranks] int32."""
        self._check_open()
        check_shaped("mask_status", mask_status, torch.int32, (self.group_size,), self.comm.device)
        mask_status.copy_(self._low_latency.masks())

    def low_latency_clean_mask_buffer(self) -> None:
        self._check_open()
        self._low_latency.clean_masks()

    # ---- life ----

    def destroy(self) -> None:
        """Give everything back. Twice is fine."""
        self._destroyed = True
        self._normal.close()
        self._low_latency.close()
        if self._owned:
            self.comm.close()

    def __del__(self) -> None:
        if not getattr(self, "explicitly_destroy", True) and not self._destroyed:
            self.destroy()

    def _check_open(self) -> None:
        if self._destroyed:
            raise ClosedError("this Buffer is destroyed")

    def _begin_normal(
        self,
        config: Config | None,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        """What all calls of the normal mode have."""
        self._check_open()
        check_flags(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        if config is not None and not isinstance(config, Config):
            raise ArgumentError(
                f"config is {described(config)}: a Config is needed (Buffer.get_dispatch_config), or None"
            )
        wait_for(previous_event)

    def _check_low_latency(self, async_finish: bool, hook: bool, *, wait_stats: torch.Tensor | None) -> None:
        self._check_open()
        if not self.low_latency_mode:
            raise ArgumentError("this Buffer was made with low_latency_mode=False")
        check_flags(async_finish=async_finish, return_recv_hook=hook)
        if async_finish and hook:
            raise ArgumentError("async_finish and return_recv_hook exclude each other")
        if wait_stats is not None:
            raise UnsupportedShape(
                "*_wait_recv_cost_stats: the time spent on each source is not measured here: None is needed"
            )


def _check_made_of(*, sizes: dict[str, int], **flags: bool) -> None:
    check_flags(**flags)
    for name, value in sizes.items():
        check_whole(name, value, 0)
