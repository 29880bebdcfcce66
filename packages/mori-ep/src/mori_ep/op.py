"""`EpDispatchCombineOp`: the two exchanges of an expert-parallel layer.

    op = EpDispatchCombineOp(config, comm)
    rows, weights, scales, ids, count = op.dispatch(x, weights, None, expert_ids)
    ...                                              # rows[:count]: apply experts, weights; add up per row
    out, _ = op.combine(y, None, expert_ids)         # out[:n]: sum over the ranks that a token went to

What is promised:
  * A row per (token, rank that holds one of its experts), in the order of (source rank, token), on every
    rank.
  * Everything returned is a view of the op's own memory at a fixed address, overwritten by the op's next
    call; rows from `count` on are stale. The same call shape gives the same tensor objects
    (MORI_EP_DISABLE_VIEW_CACHE=1: new objects over the same memory).
  * combine adds in fp32, a token's ranks in the order of the first slots that name them, and rounds once.
  * Ranks may bring different numbers of tokens, also none; they must make the same calls in the same order.

When it is made, all ranks compare the configuration, agree on tuned rules (rules.py: AUTO, unless told
otherwise), allocate the window, and meet once more before anybody may write into another's memory. A call
checks its arguments before it waits for anyone. A call that fails while ranks are under way leaves the op
unusable, unless it is `elastic`; an argument that is refused leaves it as it was.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mori_shmem
import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, ClosedError, MoriError, UnsupportedShape

from mori_ep import checks, formats
from mori_ep.again import Again
from mori_ep.arguments import check_dtype, check_flag, check_index, check_whole
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.keys import PHASES
from mori_ep.plan import Geometry
from mori_ep.prepared import UNASKED, Combined, Dispatched, PreparedCalls
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.rules import Rules
from mori_ep.settings import KERNELS, TABLE
from mori_ep.standard_moe import StandardMoe
from mori_ep.targets import CombineCall, DispatchCall, DispatchShape, target_for, target_name
from mori_ep.turns import CALLS, Turn

if TYPE_CHECKING:
    from mori_bench import Trace
    from mori_tune import Decision

_numbers = itertools.count(1)
_op_numbers = itertools.count(1)


class EpDispatchCombineOp(StandardMoe):
    """See the module. Calls of one op are made one after the other, in the same order on every rank."""

    def __init__(
        self,
        config: EpDispatchCombineConfig,
        comm: mori_shmem.Communicator | None = None,
        *,
        geometry: Mapping[str, Geometry] | None = None,
        kernels: str | None = None,
    ) -> None:
        """Collective. Without `comm` the op makes a communicator of its own among the ranks that torchrun, or
        torch's default process group, knows, and closes it with itself.

        geometry  by phase ("dispatch", "combine"): launched so, and no tuned rule is looked up; equal on all
                  ranks. {}: as the target plans it
        kernels   "own", or "triton" for the readable ones (targets/triton); None: as MORI_EP_KERNELS says
        """
        checks.check_made_of(config, comm)
        self.values = TABLE.read({KERNELS: kernels})
        self._kernels: str = self.values[KERNELS]
        checks.check_by_hand(geometry, self._kernels)
        config.check()
        self.config = config
        self._by_hand = geometry
        self._number = next(_op_numbers)  # in this process, for routing handles
        self._owned: mori_shmem.Communicator | None = None
        if comm is None:
            comm = self._owned = mori_shmem.init(name=f"mori-ep/{next(_numbers)}")
        self.comm = comm
        self.trace: Trace | None = None  # set one, and every call adds its steps
        self._closed = False
        self._broken: BaseException | None = None
        self._lock = threading.Lock()
        self._again = Again(self)
        self._window: mori_shmem.Window | None = None
        try:
            self._construct(comm)
        except BaseException:
            self.close()
            raise

    def _construct(self, comm: mori_shmem.Communicator) -> None:
        config = self.config
        target = target_for(target_name(comm.backend, self._kernels))
        self.dispatch_dtype = config.dispatch_dtype or config.data_type
        self.combine_dtype = config.combine_dtype or formats.combine_dtype_for(config.data_type)
        checks.check_place(config, comm)
        checks.check_triple(target, config, self.dispatch_dtype, self.combine_dtype)
        checks.compare_ranks(config, comm, self._by_hand, self._kernels)
        self._dtypes = {"dispatch": self.dispatch_dtype, "combine": self.combine_dtype}
        by_hand = self._by_hand if self._kernels == "own" else {}  # rules are for the others
        self.rules = Rules(comm, config, self._dtypes, by_hand, self.values)
        self.plan = target.plan_for(config, self.rules.few_tokens())
        self.layout = target.layout_for(config, self.plan)
        self._window = comm.alloc(self.layout.nbytes)
        self._runner = target.Runner(comm, self._window, self.layout, config, self.plan, self.values)
        self.rules.announce(self._runner)
        self._calls = PreparedCalls(
            config, comm.device, self.dispatch_dtype, self.rules, self._runner, self.values
        )
        self._num_tokens = self._sent_tokens = -1  # of the last dispatch, and of one that was sent only
        self._construct_standard_moe()
        self._half = None
        self._turns = {what: Turn(self, what) for what in CALLS}
        self.local_expert_count = torch.zeros(
            config.num_experts_per_rank, dtype=torch.int32, device=comm.device
        )
        # Zeroed on this rank, then everybody: a peer's first rows must not be wiped by our zeroing.
        comm.barrier()

    # ---- dispatch ----

    def dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Send every row to the ranks of its experts. Collective. Returns `Dispatched`; with return_routing
        the handle of this dispatch as a sixth value.

        input    # [n, hidden], a row's payload; n from 0 to the capacity, hidden up to hidden_dim
        weights  # [n, k] fp32, or None
        scales   # [n, scale_dim], or None
        indices  # [n, k] int32: global expert ids; -1, or any id that no rank has: the slot goes nowhere
        routing  # a handle: rows go where they went in that dispatch, which had the same n (all ranks replay)
        """
        asked = (block_num, rdma_block_num, warp_per_block)
        if call_local_expert_count is not False or return_routing is not False:
            checks.check_options(
                call_local_expert_count=call_local_expert_count, return_routing=return_routing
            )
            checks.check_keeps_routing(self.config, bool(return_routing))
        elif asked == UNASKED and routing is None:
            repeated = self._again.dispatch(input, weights, scales, indices)
            if repeated is not None:
                return repeated
        shape = self._dispatch_shape("dispatch", input, weights, scales, indices, asked, routing)
        n: int = input.shape[0]
        with self._turns["dispatch"]:
            prepared = self._calls.dispatch(shape)
            geometry = prepared.geometry(n, asked)
            call = DispatchCall(input, weights, scales, indices, routing, geometry, self._calls.homeward(n))
            self._begin_dispatch()
            self._runner.dispatch(prepared.launch, call)
            self._num_tokens = input.shape[0]
            if call_local_expert_count:
                self._runner.count_experts(self.local_expert_count)
            handle = self._routing() if return_routing else routing
            if handle is None and asked == UNASKED:
                self._again.after_dispatch(prepared, shape, call)
        results = prepared.results or self._calls.dispatch_views(shape)
        if handle is not None:
            results = (*results[:4], handle.recv_count)
        return (*results, handle) if return_routing else results

    def dispatch_send(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Dispatched:
        """The half of `dispatch` that waits for nobody; the tensors are those that `dispatch_recv` will fill.

        Only AsyncLL has two halves; with the other kernel types this is all of it.
        """
        asked = (block_num, rdma_block_num, warp_per_block)
        shape = self._dispatch_shape("dispatch_send", input, weights, scales, indices, asked, None)
        n: int = input.shape[0]
        with self._turns["dispatch_send"]:
            prepared = self._calls.dispatch(shape)
            geometry = prepared.geometry(n, asked)
            call = DispatchCall(input, weights, scales, indices, None, geometry, self._calls.homeward(n))
            self._begin_dispatch()
            self._runner.dispatch_send(prepared.launch, call)
            self._sent_tokens = n
            self._half = "dispatch_recv"
        results: Dispatched = prepared.results or self._calls.dispatch_views(shape)
        return results

    def dispatch_recv(
        self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False
    ) -> None:
        """The half that waits. It goes by what the send was given; nothing is passed again."""
        checks.check_options((block_num, -1, warp_per_block), call_local_expert_count=call_local_expert_count)
        with self._turns["dispatch_recv"]:
            self._half = None
            self._runner.dispatch_recv()
            self._num_tokens = self._sent_tokens
            if call_local_expert_count:
                self._runner.count_experts(self.local_expert_count)

    # ---- combine ----

    def combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
    ) -> Combined:
        """Bring every token's rows home and add them up. Collective.

        input    # [>= rows received, hidden] in the order of dispatch's rows, already multiplied by the
                 # router's weights and added up over this rank's experts
        weights  # [>= rows received, k] fp32, or None: added up likewise
        indices  # this rank's own [n, k] of the dispatch, not the ids that came with the rows
        use_external_inp_buf  # 0: `input` is the registered buffer (zero copy); -1: as configured
        routing  # the handle of the dispatch that this belongs to; without it, the last dispatch
        """
        if call_reset is not False:
            checks.check_options(call_reset=call_reset)
        asked = (block_num, rdma_block_num, warp_per_block)
        if asked == UNASKED and routing is None:
            repeated = self._again.combine(use_external_inp_buf, input, weights, indices)
            if repeated is not None:
                return repeated
        return self._combine("combine", input, weights, indices, asked, use_external_inp_buf, routing)

    def combine_send(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
    ) -> Combined:
        """The half of `combine` that waits for nobody."""
        asked = (block_num, rdma_block_num, warp_per_block)
        return self._combine("combine_send", input, weights, indices, asked, use_external_inp_buf, None)

    def combine_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None:
        """The half that waits, with the shape of its send."""
        checks.check_options((block_num, -1, warp_per_block))
        with self._turns["combine_recv"]:
            self._half = None
            self._runner.combine_recv()

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """[recv capacity, hidden] of this rank's window, for combine without a copy: fill its first rows,
        pass it to combine with use_external_inp_buf=0. It may be filled whenever no call is under way, so
        also for a second combine right after a first. A combine of other rows overwrites it; on a GPU it may
        then be filled once the next dispatch is over."""
        self._check_usable()
        hidden = self.config.hidden_dim if hidden_dim == -1 else hidden_dim
        checks.check_combine_dtype(self.config, self.dispatch_dtype, dtype)
        checks.check_hidden(self.config, hidden, dtype, "the buffer")
        return self._runner.lend_combine_input((self.config.recv_capacity, hidden), dtype)

    # ---- what came, and from where ----

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """[rows received] int32: source rank * (world_size * max tokens) + source token, row by row."""
        self._check_usable()
        self._again.forget()  # this may raise what the next call has to raise as well
        return self._runner.view("out_positions", (self._runner.received_rows(),), torch.int32)

    def decode_send_flat_idx(self, position: int) -> tuple[int, int]:
        """(source rank, source token) of such a number."""
        return divmod(
            check_index("position", position, self.config.null_position - 1), self.config.position_stride
        )

    # ---- ranks that are left out ----

    def update_mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out of all calls from the next one on, or take it in again; needs `elastic`. All that
        go on must leave out the same ranks at the same call. On the host a rank that is taken in must have
        made as many calls as the others; on the cuda target the last one that is masked is taken in by all
        ranks together, itself too, as by `clean_mask`, and a rank is masked behind a whole pair, dispatch and
        its combine: not between two calls of one kind."""
        self._check_elastic()
        if type(rank) is not int or not 0 <= rank < self.config.world_size or rank == self.config.rank:
            raise ArgumentError(
                f"rank={described(rank)} cannot be masked here: allowed are ranks from 0 to "
                f"{self.config.world_size - 1}, but for this one, {self.config.rank}"
            )
        self._again.forget()
        self._runner.set_masked(rank, check_flag("masked", masked))

    def query_mask(self) -> torch.Tensor:
        """[world_size] int32: 1 for each rank that is left out."""
        self._check_elastic()
        return torch.tensor([int(m) for m in self._runner.masked()], dtype=torch.int32)

    def clean_mask(self) -> None:
        """Take all ranks in again: all of them at the same call. On the cuda target they meet."""
        self._check_elastic()
        self._again.forget()
        self._runner.take_all_in()

    # ---- how it is launched ----

    def rule(
        self,
        phase: str,
        dtype: torch.dtype,
        *,
        tokens: int,
        hidden: int | None = None,
        zero_copy: bool | None = None,
    ) -> Decision | None:
        """The tuned rule for calls of this phase ("dispatch", "combine") and dtype, or why there is none;
        None where nothing is tuned. Without `hidden` and `zero_copy` as configured."""
        if phase not in PHASES:
            raise ArgumentError(f"phase={described(phase)}: one of {', '.join(PHASES)}")
        config = self.config
        check_dtype("dtype", dtype)
        check_whole("tokens", tokens, 0)
        if hidden is not None:
            check_whole("hidden", hidden, 1)
        if zero_copy is None:
            zero_copy = not config.use_external_inp_buf
        check_flag("zero_copy", zero_copy)
        return self.rules.decision(
            phase, dtype, tokens=tokens, hidden=hidden or config.hidden_dim, zero_copy=zero_copy
        )

    def launch_with(self, geometry: Mapping[str, Geometry]) -> None:
        """From the next call on, calls are launched so, and no rule is looked up. Local. For an op that was
        made with `geometry`, on a target that chooses call by call; its memory is that of the first
        geometry."""
        self._check_usable()
        checks.check_by_hand(geometry, self._kernels)
        self.rules.take(geometry)
        self._again.forget()
        self._calls.tune_again()

    # ---- life ----

    def check_due(self, what: str) -> None:
        """Raise what the call of this name would, if the op is closed or broken or another call is due."""
        if what not in CALLS:
            raise ArgumentError(f"{described(what)} is no call of an op: one of {', '.join(CALLS)} is needed")
        self._turns[what].check()

    def reset(self) -> None:
        """Nothing needs it: every call leaves the op ready for the next. Kept for those who call it."""
        self._check_usable()

    @property
    def window_bytes(self) -> int:
        """The bytes of symmetric memory that this op holds on this rank."""
        return int(self.layout.nbytes)

    def close(self) -> None:
        """Give the window back. Local; twice is fine. Tensors over it stay readable."""
        self._closed = True
        self._again.forget()
        if self._window is not None:
            self._window.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> EpDispatchCombineOp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside a call ----

    def _begin_dispatch(self) -> None:
        self._num_tokens = -1  # until this one has come through
        self._count_dispatch()

    def _routing(self) -> EpDispatchRoutingHandle:
        handle = self._runner.routing()
        handle.op_number = self._number
        return handle

    def _combine(
        self,
        what: str,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        asked: tuple[int, int, int],
        use_external_inp_buf: int,
        routing: EpDispatchRoutingHandle | None,
    ) -> Combined:
        """A whole combine, or its first half."""
        turn = self._turns[what]
        turn.check()
        if asked != UNASKED:
            checks.check_options(asked)
        num_tokens = self._num_tokens
        if routing is not None:
            checks.check_handle(routing, self._number, self.config, self.comm.device)
            num_tokens = routing.cur_rank_num_token
        external = self.config.use_external_inp_buf
        if type(use_external_inp_buf) is not int or use_external_inp_buf != -1:
            external = checks.check_external(use_external_inp_buf)
        shape = self._calls.combine_shape(input, weights, indices, num_tokens, external=external)
        call = CombineCall(input, weights if shape.weights else None, num_tokens, routing)
        with turn:
            prepared = self._calls.combine(shape)
            call = self._calls.launched(call, prepared, asked)
            if what == "combine":
                self._runner.combine(prepared.launch, call)
                if routing is None and asked == UNASKED:
                    self._again.after_combine(prepared, shape, call, indices, use_external_inp_buf)
            else:
                self._runner.combine_send(prepared.launch, call)
                self._half = "combine_recv"
        results: Combined = prepared.results or self._calls.combine_views(shape)
        return results

    def _dispatch_shape(
        self,
        what: str,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        asked: tuple[int, int, int],
        routing: EpDispatchRoutingHandle | None,
    ) -> DispatchShape:
        """The shape of a dispatch that may be made now."""
        self._turns[what].check()
        if asked != UNASKED:
            checks.check_options(asked)
        if routing is not None:
            checks.check_handle(routing, self._number, self.config, self.comm.device)
        shape = self._calls.dispatch_shape(input, weights, scales, indices)
        if routing is not None:
            checks.check_replay(routing, input.shape[0])
        return shape

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this EpDispatchCombineOp is closed")
        if self._broken is not None:
            raise MoriError(
                "this EpDispatchCombineOp cannot be used any more since a call failed with "
                f"{type(self._broken).__name__}: {self._broken}. Close it; make a new communicator and a new "
                f"op"
            )

    def _check_elastic(self) -> None:
        self._check_usable()
        if not self.config.elastic:
            raise UnsupportedShape("elastic=False: only an op made with elastic=True can leave ranks out")
