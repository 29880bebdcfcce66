"""Dispatch and combine between processes that share memory. What each way is: plan.py. Flags: layout.py.

Dispatch e on rank r, by COUNTS
  1. slots: for every (token, slot) the rank it goes to and its number among r's rows for that rank
  2. r's header (what a row consists of, rows for each rank) to every rank's headers[e & 1][r]; entered[r] = e there
  3. wait for entered >= e of every rank. Now all know all counts, and where everybody's rows start
  4. every row to its place in out* of its rank; then arrived[r] = e at every rank
  5. wait for arrived >= e, then for finished >= (combines that r has done): y may be filled from here on
by SLOTS
  2. rows to blocks[e & 1][r] of their rank, field by field; header; entered[r] = e
  3. wait for entered >= e; lay the blocks of all sources together in out*, in rank order; then as 5
by QUEUES the rows are packed in r's own sending block and put from there; the queue sets entered after its put. The
second half starts with 3 and ends when r's queues are idle, so that the sending blocks may be packed again.

Combine c, by PULL
  1. y = the rows to be added, unless they are there already. Before that: finished >= (c - 1) of every rank
  2. staged[r] = c, with hidden size and dtype, at every rank; wait for staged >= c of every rank
  3. result = for every token the sum of its rows in the ranks' y; then finished[r] = c at every rank
by QUEUES the rows of y are put to returned_rows[c & 1][r] of their source, where they lie in token order; the queue
sets returned after its put.

Who may overwrite what. "p entered e" means that r has seen entered[p] >= e.
  out* of r         Written by s in its dispatch e (COUNTS) after r entered e: r's caller has given its views back.
                    Otherwise by r itself.
  headers, blocks   Parity e & 1, written by s in dispatch e. s has seen everybody enter e - 1, and a rank enters
                    e - 1 after it has read what came with e - 2. A rank makes the second half of a call before
                    the first half of the next.
  y of r            Written by r. Readers have finished c - 1: looked at in combine for rows that are copied, and at
                    the end of dispatch for a caller who fills the registered buffer. If other dispatches are still
                    open when a registered buffer is combined, the caller may go on to fill it for the next of them
                    without a dispatch in between: then combine itself ends by waiting for finished >= c.
  returned_rows     Parity c & 1, like blocks.
Flags have one writer and only grow. Every call, with 0 tokens too, sets every flag at every rank.

Elastic: rows go by SLOTS. A rank whose flag does not come in time, or whose process has ended, is masked: nothing
of it is waited for, read or counted any more. Ranks may learn of a death at different calls, so where a source's
rows start at a receiver is told by the receiver (`arrived` holds the first row, or NONE), not added up by the
source.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mori_shmem
import torch
from mori_shmem.device.rows import (
    RowCode,
    SlotMap,
    copy_ranges,
    count_ids,
    group_slots,
    quantize_rows,
    scatter_rows,
    shift_slots,
    sum_rows,
)
from mori_shmem.errors import ArgumentError, CollectiveMismatch, LayoutError, PeerError, UnsupportedShape
from mori_shmem.settings import Snapshot
from mori_shmem.words import Words

from mori_ep import formats
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import CALL_SHIFT, HEADER, Layout, Region
from mori_ep.plan import Plan, Way
from mori_ep.problem import WEIGHT_BYTES, RowFormat
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.settings import FP8_COMBINE_SCALE_DIM
from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape
from mori_ep.targets.host.limits import KINDS, wire_code

_LOG = logging.getLogger("mori_ep")
NONE = (1 << 32) - 1  # low half of `arrived`: the receiver has none of the source's rows
SIGN_WEIGHTS = 1 << 31  # low half of `staged`: weights come along; then dtype code << 24, hidden size
MAX_HIDDEN = (1 << 24) - 1


class DispatchLaunch(NamedTuple):
    """What a dispatch of one shape needs."""

    row: RowFormat
    dtype_code: int


class CombineLaunch(NamedTuple):
    """What a combine of one shape needs."""

    shape: CombineShape
    wire: RowCode
    wire_bytes: int
    kind: str  # of the result
    quantised: bool
    sign: int
    result_row_bytes: int


@dataclass
class Routes:
    """Where one dispatch's rows went, and how many came from where."""

    slots: torch.Tensor  # [n, k] int32: the dispatch map
    num_tokens: int
    sent: list[int]  # rows to each rank
    first: list[int]  # where they start there
    received: list[int]  # rows from each rank
    num_received: int
    dispatch: int  # the call


class Runner:
    """One op's flags, buffers and maps on this rank; see mori_ep.targets.Runner."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        config: EpDispatchCombineConfig,
        plan: Plan,
        values: Snapshot,
    ) -> None:
        if config.hidden_dim > MAX_HIDDEN:
            raise UnsupportedShape(f"hidden_dim={config.hidden_dim}: at most {MAX_HIDDEN}")
        self._comm, self._window, self._layout = comm, window, layout
        self._config, self._plan = config, plan
        self._scale_dim = values[FP8_COMBINE_SCALE_DIM]
        self._me, self._ranks = comm.rank, range(comm.world_size)
        self._peers = [p for p in self._ranks if p != comm.rank]
        self._bases = window.addresses
        self._masked = [False] * comm.world_size
        self._dispatches = self._combines = 0
        self._open: weakref.WeakSet[EpDispatchRoutingHandle] = weakref.WeakSet()
        self._recv_count = ctypes.c_int32.from_address(self._mine(layout.recv_count.offset_bytes))
        words = layout.header_words
        self._header = (ctypes.c_int64 * words)()
        self._positions = torch.arange(config.max_num_inp_token_per_rank, dtype=torch.int32)
        self._positions += comm.rank * config.position_stride
        self._slots = torch.empty(
            config.max_num_inp_token_per_rank, config.num_experts_per_token, dtype=torch.int32
        )
        self._routes = Routes(self._slots, 0, [], [], [], 0, 0)
        self._sent_dispatch: DispatchLaunch | None = None
        self._sent_combine: tuple[CombineLaunch, CombineCall, Routes] | None = None
        self._memory = window.tensor(window.nbytes, torch.uint8)  # keeps what the addresses point to mapped
        self._make_words()

    def _mine(self, offset_bytes: int) -> int:
        return self._bases[self._me] + offset_bytes

    def _make_words(self) -> None:
        """The flags that this rank sets at its peers, and those that it waits for."""
        layout, me = self._layout, self._me

        def pair(purpose: Region) -> tuple[Words, Words]:
            ours = [self._window.at(layout.flag(purpose, me), p) for p in self._alive()]
            theirs = [self._window.at(layout.flag(purpose, p)) for p in self._alive()]
            return self._comm.words(ours, self._alive()), self._comm.words(theirs, self._alive())

        def by_queue(purpose: Region) -> Words:
            ends = [(p, q) for p in self._alive() for q in range(layout.num_queues)]
            refs = [self._window.at(layout.queue_flag(purpose, p, q)) for p, q in ends]
            return self._comm.words(refs, [p for p, _ in ends])

        self._arrived, self._finished, self._staged = map(
            pair, (layout.arrived, layout.finished, layout.staged)
        )
        self._entered = (
            self._comm.words(
                [self._window.at(layout.queue_flag(layout.entered, me, 0), p) for p in self._alive()],
                self._alive(),
            ),
            by_queue(layout.entered),
        )
        self._returned = by_queue(layout.returned)

    def _alive(self) -> list[int]:
        return [p for p in self._peers if not self._masked[p]]

    # ---- what a target offers ----

    def view(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._window.tensor(shape, dtype, self._layout.regions()[region].offset_bytes)

    def prepare_dispatch(self, shape: DispatchShape) -> DispatchLaunch:
        return DispatchLaunch(
            shape.row_format(self._config.num_experts_per_token), formats.CODES[shape.dtype]
        )

    def prepare_combine(self, shape: CombineShape) -> CombineLaunch:
        quant = self._config.quant_type
        wire = wire_code(shape.hidden, shape.dtype, quant, self._scale_dim)
        if wire.nbytes > self._config.row_bytes:
            raise LayoutError(
                f"{quant} makes rows of {wire.nbytes} bytes of hidden size {shape.hidden}, the window holds "
                f"{self._config.row_bytes}: MORI_FP8_COMBINE_SCALE_DIM={self._scale_dim} is too large"
            )
        sign = formats.CODES[shape.dtype] << 24 | shape.hidden | (SIGN_WEIGHTS if shape.weights else 0)
        row_bytes = shape.hidden * shape.dtype.itemsize
        return CombineLaunch(shape, wire, wire.nbytes, KINDS[shape.dtype], quant != "none", sign, row_bytes)

    def received_rows(self) -> int:
        return self._routes.num_received

    def count_experts(self, counts: torch.Tensor) -> None:
        config = self._config
        slots = self._routes.num_received * config.num_experts_per_token
        ids = self._mine(self._layout.out_indices.offset_bytes)
        first = self._me * config.num_experts_per_rank
        count_ids(ids, slots, first, config.num_experts_per_rank, counts.data_ptr())

    def routing(self) -> EpDispatchRoutingHandle:
        if self._config.elastic:
            raise UnsupportedShape(
                "an elastic op keeps no routing: which rows arrived may change from call to call"
            )
        routes = self._routes
        handle = EpDispatchRoutingHandle(
            disp_dest_tok_id_map=routes.slots[: routes.num_tokens].clone(),
            disp_tok_id_to_src_tok_id=self.view(
                "out_positions", (self._config.recv_capacity,), torch.int32
            ).clone(),
            recv_count=torch.tensor([routes.num_received], dtype=torch.int32),
            recv_per_source=torch.tensor(routes.received, dtype=torch.int32),
            sent_per_rank=torch.tensor(routes.sent, dtype=torch.int32),
            first_rows=torch.tensor(routes.first, dtype=torch.int32),
            cur_rank_num_token=routes.num_tokens,
        )
        self._open.add(handle)
        return handle

    def masked(self) -> list[bool]:
        return list(self._masked)

    def set_masked(self, rank: int, value: bool) -> None:
        if self._masked[rank] != value:
            self._masked[rank] = value
            self._make_words()

    # ---- waiting ----

    def _await(self, which: str, value: int, what: str) -> None:
        """Until the flag of every rank that is not masked has the value. Elastic: who does not come is masked."""
        while True:
            words = getattr(self, which)
            words = words[1] if isinstance(words, tuple) else words
            try:
                words.wait(value, what=what)
                return
            except PeerError as error:
                if not self._config.elastic or not error.peers:
                    raise
                for peer in error.peers:
                    _LOG.warning("rank %d leaves out rank %d from now on: %s", self._me, peer, error)
                    self._masked[peer] = True
                self._make_words()

    # ---- dispatch ----

    def dispatch(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        if self._plan.dispatch is Way.COUNTS:
            self._dispatch_by_counts(launch, call)
        else:
            self._send_blocks(launch, call)
            self._receive_blocks(launch)

    def dispatch_send(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        if self._plan.dispatch is Way.QUEUES:
            self._send_blocks(launch, call)
            self._sent_dispatch = launch
        else:
            self.dispatch(launch, call)

    def dispatch_recv(self) -> None:
        if self._sent_dispatch is not None:
            launch, self._sent_dispatch = self._sent_dispatch, None
            self._receive_blocks(launch)

    def _dispatch_by_counts(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        e, slot_map = self._begin_dispatch(launch, call)
        self._entered[0].signal(e << CALL_SHIFT)
        self._await("_entered", e << CALL_SHIFT, f"`entered` of dispatch {e}")
        self._settle(e, self._headers(e), launch)
        if call.replay is None:
            shift_slots(slot_map, self._routes.first)
        out = [region.offset_bytes for region in self._layout.out_fields]
        scatter_rows(
            slot_map, self._fields(launch.row, call), [[base + at for at in out] for base in self._bases]
        )
        self._arrived[0].signal(e << CALL_SHIFT)
        self._await("_arrived", e << CALL_SHIFT, f"`arrived` of dispatch {e}")
        self._end_dispatch()

    def _begin_dispatch(self, launch: DispatchLaunch, call: DispatchCall) -> tuple[int, SlotMap]:
        """The call's number and its map, rows counted from 0 for each rank; its header is with everybody."""
        config, n, replay = self._config, call.x.shape[0], call.replay
        self._dispatches += 1
        e, topk = self._dispatches, config.num_experts_per_token
        slot_map = SlotMap(self._slots.data_ptr(), n, topk, config.position_stride, config.null_position)
        if replay is None:
            sent = group_slots(
                call.indices.data_ptr(), slot_map, config.num_experts_per_rank, config.world_size
            )
        else:
            self._slots[:n].copy_(replay.disp_dest_tok_id_map)
            sent = replay.sent_per_rank.tolist()
        row = launch.row
        self._routes = Routes(self._slots, n, sent, [], [], 0, e)
        self._header[:] = [
            n,
            row.payload_bytes,
            launch.dtype_code,
            row.scale_bytes,
            int(row.weights),
            int(replay is not None),
            *sent,
        ]
        self._replay = replay
        offset, nbytes = self._layout.header(e, self._me), ctypes.sizeof(self._header)
        copy_ranges([(base + offset, ctypes.addressof(self._header), nbytes) for base in self._bases])
        return e, slot_map

    def _fields(self, row: RowFormat, call: DispatchCall) -> list[tuple[int, int]]:
        """(address, row bytes) of what goes with every row, in the order of RowFormat. No bytes: not given."""
        tensors = (call.x, call.scales, call.weights, call.indices, self._positions)
        return [
            (0 if tensor is None else tensor.data_ptr(), nbytes)
            for tensor, nbytes in zip(tensors, row.field_bytes, strict=True)
        ]

    def _headers(self, e: int) -> list[list[int]]:
        """Everybody's header of this dispatch; a masked rank's says that it sends nothing."""
        words = self._layout.header_words
        headers = []
        for source in self._ranks:
            if self._masked[source]:
                headers.append([0] * words)
            else:
                address = self._mine(self._layout.header(e, source))
                headers.append(list((ctypes.c_int64 * words).from_address(address)))
        return headers

    def _settle(self, e: int, headers: list[list[int]], launch: DispatchLaunch) -> None:
        """From all counts to where rows start; raises, on every rank alike, what does not go together."""
        self._compare_headers(e, headers)
        counts = [header[len(HEADER) :] for header in headers]
        most = self._config.recv_per_source
        for source, to in enumerate(counts):
            for destination, rows in enumerate(to):
                if rows > most:
                    raise UnsupportedShape(
                        f"rank {source} sends {rows} rows to rank {destination} in dispatch {e}; room is for "
                        f"{most} from each source (max_total_recv_tokens={self._config.max_total_recv_tokens})"
                    )
        routes, me = self._routes, self._me
        routes.first = [sum(counts[source][d] for source in range(me)) for d in self._ranks]
        routes.received = [to[me] for to in counts]
        routes.num_received = sum(routes.received)
        if self._replay is not None and self._replay.recv_per_source.tolist() != routes.received:
            raise CollectiveMismatch(
                f"rank {me} replays a dispatch that brought it {self._replay.recv_per_source.tolist()} rows, by "
                f"rank, but the ranks now send {routes.received}: all must replay the same dispatch"
            )

    def _compare_headers(self, e: int, headers: list[list[int]]) -> None:
        """Rows must consist of the same on all ranks. A rank without tokens need not know of scales or weights."""
        mine = headers[self._me]
        for source, theirs in enumerate(headers):
            if self._masked[source]:
                continue
            for index, name in enumerate(HEADER):
                optional = name in ("scale bytes", "weights") and 0 in (mine[0], theirs[0])
                if name != "tokens" and not optional and theirs[index] != mine[index]:
                    raise CollectiveMismatch(
                        f"dispatch {e}: {name} is {mine[index]} on rank {self._me} and {theirs[index]} on rank "
                        f"{source}: all ranks must dispatch rows of one kind"
                    )

    def _end_dispatch(self) -> None:
        self._recv_count.value = self._routes.num_received
        combines = self._combines
        self._await("_finished", combines << CALL_SHIFT, f"`finished` of combine {combines}")

    # ---- dispatch by blocks ----

    def _send_blocks(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        e, slot_map = self._begin_dispatch(launch, call)
        routes, row, layout = self._routes, launch.row, self._layout
        if max(routes.sent) <= self._config.recv_per_source:  # else everybody will see it in the header
            queued = self._plan.dispatch is Way.QUEUES
            first = call.replay.first_rows.tolist() if call.replay is not None else [0] * len(self._ranks)
            targets = []
            for rank in self._ranks:
                if queued and rank != self._me:
                    block = self._mine(layout.sending_block(rank))
                else:
                    block = self._bases[rank] + layout.block(e, self._me)
                starts = _field_starts(block, row, routes.sent[rank], first[rank])
                targets.append([0] * len(starts) if self._masked[rank] else starts)
            scatter_rows(slot_map, self._fields(row, call), targets)
        if self._plan.dispatch is Way.QUEUES:
            for peer in self._peers:
                self._put_block(peer, e, routes.sent[peer] * row.nbytes)
        else:
            self._entered[0].signal(e << CALL_SHIFT)

    def _put_block(self, peer: int, e: int, nbytes: int) -> None:
        """My rows for a peer, cut into one put per queue; each queue then says that its part is there."""
        layout, window, queues = self._layout, self._window, self._plan.num_queues
        if nbytes > layout.block_bytes:
            nbytes = 0
        for index in range(queues):
            begin, end = nbytes * index // queues, nbytes * (index + 1) // queues
            queue = self._comm.queue(peer, index)
            if end > begin:
                queue.put(
                    window.at(layout.block(e, self._me) + begin, peer),
                    window.at(layout.sending_block(peer) + begin),
                    end - begin,
                )
            queue.signal(window.at(layout.queue_flag(layout.entered, self._me, index), peer), e << CALL_SHIFT)

    def _receive_blocks(self, launch: DispatchLaunch) -> None:
        routes = self._routes
        e = routes.dispatch
        self._await("_entered", e << CALL_SHIFT, f"`entered` of dispatch {e}")
        headers = self._headers(e)
        self._settle(e, headers, launch)
        out = [self._mine(region.offset_bytes) for region in self._layout.out_fields]
        ranges, begin = [], 0
        for source, rows in enumerate(routes.received):
            if rows:
                row = _row_of(headers[source], self._config.num_experts_per_token)
                starts = _field_starts(self._mine(self._layout.block(e, source)), row, rows)
                for at, start, nbytes in zip(out, starts, row.field_bytes, strict=True):
                    if nbytes:
                        ranges.append((at + begin * nbytes, start, rows * nbytes))
            begin += rows
        copy_ranges(ranges)
        if self._config.elastic:
            self._tell_first_rows(e)
        else:
            self._finish_map(routes)
        if self._plan.dispatch is Way.QUEUES:
            self._quiet()
        self._end_dispatch()

    def _finish_map(self, routes: Routes) -> None:
        """From numbers among my rows to rows at the receiver."""
        if self._replay is None:
            config = self._config
            shift_slots(
                SlotMap(
                    routes.slots.data_ptr(),
                    routes.num_tokens,
                    config.num_experts_per_token,
                    config.position_stride,
                    config.null_position,
                ),
                routes.first,
            )

    def _tell_first_rows(self, e: int) -> None:
        """Elastic: every source learns where its rows start here, if they are here."""
        begin = 0
        for source, rows in enumerate(self._routes.received):
            where = self._window.at(self._layout.flag(self._layout.arrived, self._me), source)
            self._comm.signal(where, e << CALL_SHIFT | (NONE if self._masked[source] else begin))
            begin += rows

    def _quiet(self) -> None:
        for peer in self._peers:
            for index in range(self._plan.num_queues):
                self._comm.queue(peer, index).quiet()

    # ---- combine ----

    def combine(self, launch: CombineLaunch, call: CombineCall) -> None:
        self.combine_send(launch, call)
        self.combine_recv()

    def combine_send(self, launch: CombineLaunch, call: CombineCall) -> None:
        routes = self._routes if call.routing is None else self._routes_of(call.routing)
        self._check_rows(call, routes)
        if call.routing is not None:
            self._open.discard(call.routing)
        self._combines += 1
        c = self._combines
        self._stage(launch, call, routes, c)
        self._staged[0].signal(c << CALL_SHIFT | launch.sign)
        if self._plan.combine is Way.QUEUES:
            self._put_back(launch, routes, c)
        self._sent_combine = launch, call, routes
        if self._plan.combine is not Way.QUEUES:
            self.combine_recv()

    def combine_recv(self) -> None:
        if self._sent_combine is None:
            return
        (launch, call, routes), self._sent_combine = self._sent_combine, None
        c = self._combines
        if self._plan.combine is Way.QUEUES:
            self._await("_returned", c << CALL_SHIFT, f"`returned` of combine {c}")
        self._await("_staged", c << CALL_SHIFT, f"`staged` of combine {c}")
        self._compare_signs(c, launch, routes)
        self._add_up(launch, call, routes, c)
        self._finished[0].signal(c << CALL_SHIFT)
        if self._plan.combine is Way.QUEUES:
            self._quiet()
        elif launch.shape.registered and len(self._open):
            self._await("_finished", c << CALL_SHIFT, f"`finished` of combine {c}")

    def _routes_of(self, handle: EpDispatchRoutingHandle) -> Routes:
        """A handle as this runner's own maps."""
        received = handle.recv_per_source.tolist()
        return Routes(
            handle.disp_dest_tok_id_map,
            handle.cur_rank_num_token,
            handle.sent_per_rank.tolist(),
            handle.first_rows.tolist(),
            received,
            sum(received),
            0,
        )

    def _check_rows(self, call: CombineCall, routes: Routes) -> None:
        for name, tensor in (("input", call.rows), ("weights", call.weights)):
            if tensor is not None and tensor.shape[0] < routes.num_received:
                raise ArgumentError(
                    f"{name} has {tensor.shape[0]} rows, the dispatch that this combine belongs to brought "
                    f"{routes.num_received} to rank {self._me}"
                )

    def _stage(self, launch: CombineLaunch, call: CombineCall, routes: Routes, c: int) -> None:
        """The rows to be added, and their weights, where other ranks, or queues, read them."""
        y, rows = self._mine(self._layout.y.offset_bytes), routes.num_received
        source = call.rows.data_ptr()
        in_place = source == y and not launch.quantised
        if launch.shape.registered and not in_place:
            raise ArgumentError(
                "use_external_inp_buf=0, but input is not the registered buffer: pass the tensor of "
                "get_registered_combine_input_buffer, or rows of your own with use_external_inp_buf=1"
            )
        self._await("_finished", (c - 1) << CALL_SHIFT, f"`finished` of combine {c - 1}")
        if launch.quantised:
            quantize_rows(y, source, rows, launch.wire)
        elif not in_place:
            copy_ranges([(y, source, rows * launch.wire_bytes)])
        if call.weights is not None:
            nbytes = rows * self._weight_bytes
            copy_ranges([(self._mine(self._layout.y_weights.offset_bytes), call.weights.data_ptr(), nbytes)])

    @property
    def _weight_bytes(self) -> int:
        return self._config.num_experts_per_token * WEIGHT_BYTES

    def _put_back(self, launch: CombineLaunch, routes: Routes, c: int) -> None:
        """Every source's rows, which lie together in y, to the source: rows first, then all their weights."""
        begin = 0
        for source, rows in enumerate(routes.received):
            if source != self._me:
                self._put_rows_back(launch, source, begin, rows, c)
            begin += rows

    def _put_rows_back(self, launch: CombineLaunch, source: int, begin: int, rows: int, c: int) -> None:
        layout, window, queues = self._layout, self._window, self._plan.num_queues
        block = layout.returned_block(c, self._me)
        parts = [(layout.y, launch.wire_bytes, block)]
        if launch.shape.weights:
            parts.append((layout.y_weights, self._weight_bytes, block + rows * launch.wire_bytes))
        for index in range(queues):
            queue = self._comm.queue(source, index)
            low, high = rows * index // queues, rows * (index + 1) // queues
            for region, pitch, to in parts if high > low else ():
                queue.put(
                    window.at(to + low * pitch, source),
                    window.at(region.offset_bytes + (begin + low) * pitch),
                    (high - low) * pitch,
                )
            where = window.at(layout.queue_flag(layout.returned, self._me, index), source)
            queue.signal(where, c << CALL_SHIFT)

    def _compare_signs(self, c: int, launch: CombineLaunch, routes: Routes) -> None:
        """Hidden size and dtype must be the same everywhere, weights too where any rows are read."""
        for peer, seen in zip(self._staged[1].peers, self._staged[1].read(), strict=True):
            if seen >> CALL_SHIFT != c:
                continue  # the peer is a call ahead: it has finished with this one
            differ = (seen ^ launch.sign) & NONE
            if differ & ~SIGN_WEIGHTS or (differ and routes.sent[peer]):
                raise CollectiveMismatch(
                    f"combine {c}: rank {self._me} brings {_sign_text(launch.sign)}, rank {peer} "
                    f"{_sign_text(seen)}: all ranks must combine rows of one kind"
                )

    def _add_up(self, launch: CombineLaunch, call: CombineCall, routes: Routes, c: int) -> None:
        config, layout = self._config, self._layout
        slot_map = SlotMap(
            routes.slots.data_ptr(),
            routes.num_tokens,
            config.num_experts_per_token,
            config.position_stride,
            config.null_position,
        )
        rows, weights = self._tables(launch, routes, c)
        out = self._mine(layout.result.offset_bytes)
        sum_rows(out, launch.kind, slot_map, rows, launch.wire_bytes, launch.wire)
        if call.weights is not None:
            out = self._mine(layout.result_weights.offset_bytes)
            code = RowCode("fp32", config.num_experts_per_token)
            sum_rows(out, "fp32", slot_map, weights, self._weight_bytes, code)

    def _tables(self, launch: CombineLaunch, routes: Routes, c: int) -> tuple[list[int], list[int]]:
        """By rank, where row 0 of the map's rows lies, of the rows and of their weights; 0: left out."""
        layout, pitches = self._layout, (launch.wire_bytes, self._weight_bytes)
        rows = [base + layout.y.offset_bytes for base in self._bases]
        weights = [base + layout.y_weights.offset_bytes for base in self._bases]
        if self._config.elastic:
            self._shift_tables(rows, weights, pitches, routes)
        elif self._plan.combine is Way.QUEUES:
            for peer in self._peers:
                block, first = self._mine(layout.returned_block(c, peer)), routes.first[peer]
                rows[peer] = block - first * pitches[0]
                weights[peer] = block + routes.sent[peer] * pitches[0] - first * pitches[1]
        return rows, weights

    def _shift_tables(
        self, rows: list[int], weights: list[int], pitches: Sequence[int], routes: Routes
    ) -> None:
        """Elastic: the map counts my rows from 0, and each receiver has told where they start there."""
        for rank in self._ranks:
            where = self._window.at(self._layout.flag(self._layout.arrived, rank))
            told = self._comm.read(where)
            here = told >> CALL_SHIFT == routes.dispatch and told & NONE != NONE
            if self._masked[rank] or not here:
                rows[rank] = weights[rank] = 0
            else:
                rows[rank] += (told & NONE) * pitches[0]
                weights[rank] += (told & NONE) * pitches[1]


def _field_starts(block: int, row: RowFormat, rows: int, first: int = 0) -> list[int]:
    """Where row 0 of each field lies in a block of `rows` rows, if the block starts with row `first`."""
    starts, at = [], block
    for nbytes in row.field_bytes:
        starts.append(at - first * nbytes)
        at += rows * nbytes
    return starts


def _row_of(header: list[int], topk: int) -> RowFormat:
    """What the rows of a source consist of."""
    _, payload_bytes, _, scale_bytes, weights, _ = header[: len(HEADER)]
    return RowFormat(payload_bytes, scale_bytes, topk, bool(weights))


def _sign_text(sign: int) -> str:
    dtype = formats.DTYPES[sign >> 24 & 0x7F]
    weights = "with" if sign & SIGN_WEIGHTS else "without"
    return f"[*, {sign & MAX_HIDDEN}] {formats.names([dtype])} {weights} weights"
