"""Dispatch on one rank, by COUNTS, SLOTS or QUEUES. The protocol is told in launch.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import mori_shmem
import torch
from mori_shmem.device.rows import SlotMap, copy_ranges, group_slots, scatter_rows, shift_slots
from mori_shmem.errors import CollectiveMismatch, UnsupportedShape

from mori_ep import formats
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import CALL_SHIFT, HEADER, Layout
from mori_ep.plan import Plan, Way
from mori_ep.problem import RowFormat
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.targets import DispatchCall, DispatchShape
from mori_ep.targets.host.flags import LOW_HALF, Flags
from mori_ep.targets.host.marks import Marks
from mori_ep.targets.host.routes import Routes

NOT_HERE = LOW_HALF  # what `arrived` says, elastic, to a source whose rows the receiver has left out


class DispatchLaunch(NamedTuple):
    """What a dispatch of one shape needs."""

    row: RowFormat
    dtype_code: int


class Dispatcher:
    """The dispatches of one op on this rank."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        config: EpDispatchCombineConfig,
        plan: Plan,
        flags: Flags,
        marks: Marks,
    ) -> None:
        self._comm, self._window, self._layout = comm, window, layout
        self._config, self._plan, self._flags, self._marks = config, plan, flags, marks
        self._me, self._bases = comm.rank, window.addresses
        self._peers = [p for p in range(comm.world_size) if p != comm.rank]
        self._calls = 0
        tokens, topk = config.max_num_inp_token_per_rank, config.num_experts_per_token
        self._slots = torch.empty(tokens, topk, dtype=torch.int32)
        self._positions = torch.arange(tokens, dtype=torch.int32) + comm.rank * config.position_stride
        self._header = (ctypes.c_int64 * layout.header_words)()
        self._recv_count = ctypes.c_int32.from_address(self._mine(layout.recv_count.offset_bytes))
        self._replay: EpDispatchRoutingHandle | None = None
        self._due: DispatchLaunch | None = None  # what was sent and waits for its second half
        self.routes = Routes(self._slots)

    def _mine(self, offset_bytes: int) -> int:
        return self._bases[self._me] + offset_bytes

    def prepare(self, shape: DispatchShape) -> DispatchLaunch:
        return DispatchLaunch(
            shape.row_format(self._config.num_experts_per_token), formats.CODES[shape.dtype]
        )

    def send(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        """By QUEUES the first half, else all of it but what `receive` does."""
        if self._plan.dispatch is Way.COUNTS:
            self._send_rows(launch, call)
        else:
            self._send_blocks(launch, call)
        self._due = launch

    def receive(self, finished: int) -> None:
        """The rest. `finished`: combines that this rank has done; afterwards everybody has."""
        if self._due is None:
            return
        self._due = None
        routes = self.routes
        if self._plan.dispatch is Way.COUNTS:
            self._flags.wait("arrived", routes.dispatch, "dispatch")
        else:
            self._receive_blocks()
        self._recv_count.value = routes.num_received
        self._flags.wait("finished", finished, "combine")
        self._marks.add("wait for rows" if self._plan.dispatch is Way.COUNTS else "lay together")

    # ---- the beginning of every way ----

    def _begin(self, launch: DispatchLaunch, call: DispatchCall) -> SlotMap:
        """The map, with rows counted from 0 for each rank; this rank's header is with everybody."""
        config, n, replay = self._config, call.x.shape[0], call.replay
        self._calls += 1
        self._replay = replay
        routes = self.routes = Routes(self._slots, n, dispatch=self._calls)
        slot_map = routes.slot_map(config)
        if replay is None:
            ids, experts = call.indices.data_ptr(), config.num_experts_per_rank
            routes.sent = group_slots(ids, slot_map, 0, experts, config.world_size)
        else:
            self._slots[:n].copy_(replay.disp_dest_tok_id_map)
            routes.sent = replay.sent_per_rank.tolist()
        for rank, masked in enumerate(self._flags.masked):
            if masked:
                routes.sent[rank] = 0
        self._publish_header(launch, routes)
        return slot_map

    def _publish_header(self, launch: DispatchLaunch, routes: Routes) -> None:
        row = launch.row
        kind = (row.payload_bytes, launch.dtype_code, row.scale_bytes, int(row.weights))
        self._header[:] = [routes.num_tokens, *kind, replay_code(self._replay), *routes.sent]
        at, nbytes = self._layout.header(routes.dispatch, self._me), ctypes.sizeof(self._header)
        mine = ctypes.addressof(self._header)
        copy_ranges([(base + at, mine, nbytes) for base in self._bases])

    def _fields(self, row: RowFormat, call: DispatchCall) -> list[tuple[int, int]]:
        """(address, row bytes) of what goes with every row, as RowFormat orders it. 0 bytes: not given."""
        tensors = (call.x, call.scales, call.weights, call.indices, self._positions)
        return [
            (0 if tensor is None else tensor.data_ptr(), nbytes)
            for tensor, nbytes in zip(tensors, row.field_bytes, strict=True)
        ]

    def _await_headers(self) -> list[list[int]]:
        """Everybody's header of this call, compared and settled; a masked rank's says that it sends
        nothing."""
        words, call = self._layout.header_words, self.routes.dispatch
        self._flags.wait("entered", call, "dispatch")
        self._marks.add("wait for counts" if self._plan.dispatch is Way.COUNTS else "wait for rows")
        headers = []
        for source, masked in enumerate(self._flags.masked):
            address = self._mine(self._layout.header(call, source))
            headers.append([0] * words if masked else list((ctypes.c_int64 * words).from_address(address)))
        compare_headers(call, headers, self._flags.masked)
        self._settle([header[len(HEADER) :] for header in headers])
        return headers

    def _settle(self, counts: list[list[int]]) -> None:
        """From all counts to where rows start; too many rows raise on every rank alike."""
        most = self._config.recv_per_source
        for source, to in enumerate(counts):
            for destination, rows in enumerate(to):
                if rows > most:
                    raise UnsupportedShape(
                        f"rank {source} sends {rows} rows to rank {destination} in dispatch "
                        f"{self.routes.dispatch}; there is room for {most} from each source "
                        f"(max_total_recv_tokens={self._config.max_total_recv_tokens})"
                    )
        routes, me = self.routes, self._me
        routes.first = [sum(counts[source][d] for source in range(me)) for d in range(len(counts))]
        routes.received = [to[me] for to in counts]
        if self._replay is not None and self._replay.recv_per_source.tolist() != routes.received:
            raise CollectiveMismatch(
                f"rank {me} replays a dispatch that brought it {self._replay.recv_per_source.tolist()} rows, "
                f"by rank, but the ranks now send {routes.received}: all must replay the same dispatch"
            )

    # ---- COUNTS ----

    def _send_rows(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        slot_map = self._begin(launch, call)
        self._flags.set("entered", self.routes.dispatch)
        self._marks.add("route")
        self._await_headers()
        if call.replay is None:
            shift_slots(slot_map, self.routes.first)
        starts = [region.offset_bytes for region in self._layout.out_fields]
        targets = [[base + start for start in starts] for base in self._bases]
        scatter_rows(slot_map, self._fields(launch.row, call), targets)
        self._flags.set("arrived", self.routes.dispatch)
        self._marks.add("store rows")

    # ---- SLOTS, QUEUES ----

    def _send_blocks(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        slot_map = self._begin(launch, call)
        self._marks.add("route")
        queued, fits = (
            self._plan.dispatch is Way.QUEUES,
            max(self.routes.sent) <= self._config.recv_per_source,
        )
        if fits:  # else everybody sees in the header that it does not
            scatter_rows(
                slot_map, self._fields(launch.row, call), self._block_targets(launch.row, call, queued)
            )
        if not queued:
            self._flags.set("entered", self.routes.dispatch)
        for peer in self._peers if queued else ():
            self._put_block(peer, self.routes.sent[peer] * launch.row.nbytes if fits else 0)
        self._marks.add("pack and queue rows" if queued else "store rows")

    def _block_targets(self, row: RowFormat, call: DispatchCall, queued: bool) -> list[list[int]]:
        """By rank and field, where row 0 of the map goes; nothing goes to masked ranks."""
        routes, layout = self.routes, self._layout
        first = [0] * len(self._bases) if call.replay is None else call.replay.first_rows.tolist()
        targets = []
        for rank, base in enumerate(self._bases):
            if queued and rank != self._me:
                block = self._mine(layout.sending_block(rank))
            else:
                block = base + layout.block(routes.dispatch, self._me)
            starts = _field_starts(block, row, routes.sent[rank], first[rank])
            targets.append([0] * len(starts) if self._flags.masked[rank] else starts)
        return targets

    def _put_block(self, peer: int, nbytes: int) -> None:
        """My rows for a peer, cut into one put per queue; each queue then says that its part is there."""
        layout, window, queues, call = self._layout, self._window, self._plan.num_queues, self.routes.dispatch
        to, source = layout.block(call, self._me), layout.sending_block(peer)
        for index in range(queues):
            begin, end = nbytes * index // queues, nbytes * (index + 1) // queues
            queue = self._comm.queue(peer, index)
            if end > begin:
                queue.put(window.at(to + begin, peer), window.at(source + begin), end - begin)
            flag = layout.queue_flag(layout.entered, self._me, index)
            queue.signal(window.at(flag, peer), call << CALL_SHIFT)

    def _receive_blocks(self) -> None:
        headers, routes = self._await_headers(), self.routes
        out = [self._mine(region.offset_bytes) for region in self._layout.out_fields]
        ranges, begin = [], 0
        for source, rows in enumerate(routes.received):
            row = _row_of(headers[source], self._config.num_experts_per_token)
            starts = _field_starts(self._mine(self._layout.block(routes.dispatch, source)), row, rows)
            for at, start, nbytes in zip(out, starts, row.field_bytes, strict=True):
                ranges.append((at + begin * nbytes, start, rows * nbytes))
            if self._config.elastic:
                masked = self._flags.masked[source]
                self._flags.set_at("arrived", source, routes.dispatch, NOT_HERE if masked else begin)
            begin += rows
        copy_ranges(ranges)
        if self._replay is None and not self._config.elastic:
            shift_slots(routes.slot_map(self._config), routes.first)
        for peer in self._peers:
            for index in range(self._plan.num_queues):
                self._comm.queue(peer, index).quiet()  # my sending blocks may be packed again


def replay_code(handle: EpDispatchRoutingHandle | None) -> int:
    """What a header says of the dispatch that is replayed: its number, 0 for none, -1 if it is not known."""
    return 0 if handle is None else handle.dispatch or -1


def compare_headers(call: int, headers: list[list[int]], masked: Sequence[bool] = ()) -> None:
    """Rows must be of one kind on all ranks; without tokens a rank need not know of scales or weights. All
    ranks look at all headers, so that all are told."""
    known = [(rank, h) for rank, h in enumerate(headers) if not (masked and masked[rank])]
    if len({tuple(header[1 : len(HEADER)]) for _, header in known}) == 1:
        return
    for index, name in enumerate(HEADER):
        if name == "tokens":
            continue
        of = [(rank, h) for rank, h in known if h[0] or name not in ("scale bytes", "weights")]
        for rank, header in of:
            if header[index] != of[0][1][index]:
                first, second = (formats.header_text(name, h[index]) for h in (of[0][1], header))
                raise CollectiveMismatch(
                    f"dispatch {call}: {name} is {first} on rank {of[0][0]} and {second} on rank {rank}: all "
                    "ranks must dispatch rows of one kind"
                )


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
