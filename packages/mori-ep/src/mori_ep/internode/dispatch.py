"""Dispatch on one rank across nodes. The protocol is told in target.py."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from mori_shmem.deadline import Deadline
from mori_shmem.device.rows import SlotMap, copy_ranges, group_slots, scatter_rows, shift_slots
from mori_shmem.errors import ArgumentError, CollectiveMismatch, UnsupportedShape

from mori_ep import formats
from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.internode.comm import NodesCommunicator, NodesWindow
from mori_ep.internode.engine import Waits
from mori_ep.internode.flags import NodeFlags
from mori_ep.internode.layout import CHUNK_TOKENS, InterLayout, field_starts, num_chunks
from mori_ep.internode.routes import (
    InterNodeRoutingHandle,
    InterRoutes,
    new_routes,
    node_null,
    slot_map,
)
from mori_ep.layout import HEADER
from mori_ep.problem import RowFormat
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.targets import DispatchCall, DispatchShape
from mori_ep.targets.host.dispatch import compare_headers, replay_code
from mori_ep.targets.host.marks import Marks


class DispatchLaunch(NamedTuple):
    """What a dispatch of one shape needs."""

    row: RowFormat
    dtype_code: int


class InterDispatcher:
    """The dispatches of one op on this rank."""

    def __init__(
        self,
        comm: NodesCommunicator,
        window: NodesWindow,
        layout: InterLayout,
        config: EpDispatchCombineConfig,
        flags: NodeFlags,
        waits: Waits,
        marks: Marks,
        ll_tokens: int,
    ) -> None:
        self._comm, self._engine, self._layout, self._config = comm, window.engine, layout, config
        self._flags, self._waits, self._marks, self._ll_tokens = flags, waits, marks, ll_tokens
        self._bases: tuple[int, ...] = window.here.addresses  # of the ranks of this node
        self._base = self._bases[comm.local_rank]
        self._others = [node for node in range(comm.num_nodes) if node != comm.node_number]
        tokens = config.max_num_inp_token_per_rank
        self._positions = torch.arange(tokens, dtype=torch.int32) + comm.rank * config.position_stride
        self._scratch = torch.empty(tokens, config.num_experts_per_token, dtype=torch.int32)
        self._recv_count = ctypes.c_int32.from_address(self._base + layout.here.recv_count.offset_bytes)
        self._maps = new_routes(config)
        self._calls = 0
        self._due: tuple[DispatchLaunch, DispatchCall] | None = None
        self.routes: InterRoutes = self._maps

    def prepare(self, shape: DispatchShape) -> DispatchLaunch:
        return DispatchLaunch(
            shape.row_format(self._config.num_experts_per_token), formats.CODES[shape.dtype]
        )

    # ---- first half: my header and rows are on their way ----

    def send(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        replay = replayed(call.replay)
        self._calls += 1
        self.routes = self._route(call) if replay is None else self._again(replay)
        self._marks.add("route")
        self._send_headers(launch, call)
        for other, node in enumerate(self._others):
            for chunk, rows in enumerate(self.routes.sent_chunks[other]):
                if rows:
                    self._send_chunk(launch.row, call, other, node, chunk, rows)
        self._marks.add("pack and put rows")
        self._due = launch, call

    def _route(self, call: DispatchCall) -> InterRoutes:
        """The maps of my tokens."""
        config, n, maps = self._config, call.x.shape[0], self._maps
        per_rank, per_node = config.num_experts_per_rank, config.num_experts_per_rank * config.gpu_per_node
        compact = self._is_compact(n, call.geometry.low_latency)
        routes = InterRoutes(maps.here, maps.nodes, maps.forward, n, self._calls, compact)
        ids, first = call.indices.data_ptr(), self._comm.node_number * per_node
        routes.sent = group_slots(ids, slot_map(config, self._scratch, 0, n), 0, per_rank, config.world_size)
        group_slots(ids, routes.here_map(config), first, per_rank, config.gpu_per_node)
        tokens = config.max_num_inp_token_per_rank
        nodes = SlotMap(maps.nodes.data_ptr(), n, config.num_experts_per_token, tokens, node_null(config))
        group_slots(ids, nodes, 0, per_node, self._comm.num_nodes)
        routes.sent_chunks = self._count_chunks(routes)
        self._number_by_token(routes)
        return routes

    def _is_compact(self, tokens: int, low_latency: int) -> bool:
        kind = self._config.kernel_type
        if kind is EpDispatchCombineKernelType.InterNode:
            return tokens > self._ll_tokens if low_latency < 0 else not low_latency
        return kind is EpDispatchCombineKernelType.InterNodeV1

    def _count_chunks(self, routes: InterRoutes) -> list[list[int]]:
        """[other][chunk] rows. Not compact: all tokens of a chunk go where any of them goes."""
        n, tokens = routes.num_tokens, self._config.max_num_inp_token_per_rank
        nodes = routes.nodes[:n] // tokens  # null becomes the number of nodes
        chunks = num_chunks(n)
        goes = torch.zeros(chunks * CHUNK_TOKENS, self._comm.num_nodes + 1, dtype=torch.bool)
        goes[:n].scatter_(1, nodes.long(), True)
        counts = goes.view(chunks, CHUNK_TOKENS, goes.shape[1]).sum(1).T.tolist()
        if not routes.compact:
            sizes = [min(CHUNK_TOKENS, n - chunk * CHUNK_TOKENS) for chunk in range(chunks)]
            counts = [[size if rows else 0 for rows, size in zip(c, sizes, strict=True)] for c in counts]
        return [counts[node] for node in self._others]

    def _number_by_token(self, routes: InterRoutes) -> None:
        """Where rows are not compact, and in what stays on this node, a row's number is its token's."""
        n, tokens = routes.num_tokens, self._config.max_num_inp_token_per_rank
        nodes = routes.nodes[:n]
        by_token = nodes // tokens * tokens + torch.arange(n, dtype=torch.int32)[:, None]
        fixed = nodes != node_null(self._config)
        if routes.compact:
            fixed &= nodes // tokens == self._comm.node_number
        nodes.copy_(torch.where(fixed, by_token, nodes))

    def _again(self, past: InterRoutes) -> InterRoutes:
        """The maps of an earlier dispatch, for this call."""
        n, maps = past.num_tokens, self._maps
        maps.here[:n].copy_(past.here)
        maps.nodes[:n].copy_(past.nodes)
        maps.forward.copy_(past.forward)
        routes = InterRoutes(
            **{**vars(past), "here": maps.here, "nodes": maps.nodes, "forward": maps.forward}
        )
        routes.dispatch = self._calls
        return routes

    def _send_headers(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        """To the ranks of this node by store, to the counterparts by put."""
        row, routes, layout = launch.row, self.routes, self._layout
        kind = (row.payload_bytes, launch.dtype_code, row.scale_bytes, int(row.weights))
        header = [routes.num_tokens, *kind, replay_code(call.replay), *routes.sent]
        self._store_header(self._comm.rank, header)
        for other, node in enumerate(self._others):
            chunks = routes.sent_chunks[other]
            words = [*header, int(routes.compact), *chunks, *[0] * (layout.num_chunks - len(chunks))]
            at = layout.header_out(other)
            ctypes.memmove(self._base + at, (ctypes.c_int64 * len(words))(*words), len(words) * 8)
            mine = self._as_seen_from(node)
            to, word = layout.header_from(routes.dispatch, mine), layout.word("header_in", mine)
            self._engine.put_signal(node, to, at, len(words) * 8, word, routes.dispatch)

    def _as_seen_from(self, node: int) -> int:
        """Which of its others I am."""
        mine = self._comm.node_number
        return mine if mine < node else mine - 1

    def _store_header(self, source: int, header: list[int]) -> None:
        """Where every rank of this node looks for it."""
        words = (ctypes.c_int64 * len(header))(*header)
        at, nbytes = self._layout.here.header(self.routes.dispatch, source), ctypes.sizeof(words)
        copy_ranges([(base + at, ctypes.addressof(words), nbytes) for base in self._bases])

    def _send_chunk(
        self, row: RowFormat, call: DispatchCall, other: int, node: int, chunk: int, rows: int
    ) -> None:
        layout, routes = self._layout, self.routes
        if routes.compact:
            at = layout.chunk("rows_out", other, chunk)
            starts = field_starts(self._base + at, row, rows, routes.chunk_begin(other, chunk))
            targets = [[0] * len(starts)] * self._comm.num_nodes
            targets[node] = starts
            scatter_rows(routes.nodes_map(self._config, chunk), self._fields(row, call, chunk), targets)
        else:  # the same run of tokens for every node: packed once
            at = layout.chunk("rows_out", 0, chunk)
            if all(not self.routes.sent_chunks[before][chunk] for before in range(other)):
                self._pack_run(row, call, chunk, rows, self._base + at)
        mine = self._as_seen_from(node)
        to, word = (
            layout.chunk("rows_from", mine, chunk, routes.dispatch),
            layout.word("rows_in", mine, chunk),
        )
        self._engine.put_signal(node, to, at, rows * row.nbytes, word, routes.dispatch)

    def _pack_run(self, row: RowFormat, call: DispatchCall, chunk: int, rows: int, at: int) -> None:
        starts, fields = field_starts(at, row, rows), self._fields(row, call, chunk)
        copy_ranges(
            [
                (to, source, rows * nbytes)
                for to, (source, nbytes) in zip(starts, fields, strict=True)
                if nbytes
            ]
        )

    def _fields(self, row: RowFormat, call: DispatchCall, chunk: int = 0) -> list[tuple[int, int]]:
        """(address, row bytes) of what goes with every row, from a chunk's first token on."""
        tensors = (call.x, call.scales, call.weights, call.indices, self._positions)
        begin = chunk * CHUNK_TOKENS
        return [
            (0 if tensor is None or not nbytes else tensor.data_ptr() + begin * nbytes, nbytes)
            for tensor, nbytes in zip(tensors, row.field_bytes, strict=True)
        ]

    # ---- second half ----

    def receive(self, finished: int) -> None:
        """`finished`: combines that this rank has done; afterwards every rank of this node has."""
        if self._due is None:
            return
        (launch, call), self._due = self._due, None
        replaying = call.replay is not None
        try:
            headers = self._await_headers(replaying)
        except ArgumentError:  # too many rows, told to all ranks: the op goes on
            self._engine.quiet(Deadline(self._comm.timeout_s))
            raise
        counts = [header[len(HEADER) :] for header in headers]
        config, routes = self._config, self.routes
        starts = [region.offset_bytes for region in self._layout.here.out_fields]
        targets = [[base + start for start in starts] for base in self._bases]
        if not replaying:
            shift_slots(routes.here_map(config), self._first_rows(counts, self._comm.rank))
        scatter_rows(routes.here_map(config), self._fields(launch.row, call), targets)
        self._marks.add("store own rows")
        for other, node in enumerate(self._others):
            source = self._comm.counterpart(node)
            row, running = (
                row_of(headers[source], config.num_experts_per_token),
                self._first_rows(counts, source),
            )
            for chunk, rows in enumerate(routes.came_chunks[other]):
                if rows:
                    self._forward(row, other, node, chunk, rows, running, targets, replaying)
        self._marks.add("forward rows")
        self._flags.set("arrived", routes.dispatch)
        self._flags.wait("arrived", routes.dispatch, "dispatch")
        self._recv_count.value = routes.num_received
        self._flags.wait("finished", finished, "combine")
        self._engine.quiet(Deadline(self._comm.timeout_s))  # what goes out may be packed again
        self._marks.add("wait for rows")

    def _forward(
        self,
        row: RowFormat,
        other: int,
        node: int,
        chunk: int,
        rows: int,
        running: list[int],
        targets: list[list[int]],
        replaying: bool,
    ) -> None:
        """One chunk that came to me to its ranks of this node; `running` counts the source's rows at each."""
        layout, config, routes = self._layout, self._config, self.routes
        word = layout.word("rows_in", other, chunk)
        self._waits.for_word(node, word, routes.dispatch, f"chunk {chunk} of dispatch {routes.dispatch}")
        at = self._base + layout.chunk("rows_from", other, chunk, routes.dispatch)
        starts, forward = field_starts(at, row, rows), routes.forward_map(config, other, chunk)
        if not replaying:
            experts = config.num_experts_per_rank
            first = self._comm.node_ranks[0] * experts
            counts = group_slots(starts[3], forward, first, experts, config.gpu_per_node)
            shift_slots(forward, running)
            running[:] = [begin + more for begin, more in zip(running, counts, strict=True)]
        scatter_rows(forward, list(zip(starts, row.field_bytes, strict=True)), targets)

    def _await_headers(self, replaying: bool) -> list[list[int]]:
        """Everybody's header of this call, compared and settled."""
        layout, here, routes = self._layout, self._layout.here, self.routes
        came: list[list[int]] = []
        for other, node in enumerate(self._others):
            what = f"the header of dispatch {routes.dispatch}"
            self._waits.for_word(node, layout.word("header_in", other), routes.dispatch, what)
            words = self._read(layout.header_from(routes.dispatch, other), layout.header_words)
            self._store_header(self._comm.counterpart(node), words[: here.header_words])
            came.append(words[here.header_words + 1 :])
        self._flags.set("entered", routes.dispatch)
        self._flags.wait("entered", routes.dispatch, "dispatch")
        self._marks.add("wait for counts")
        headers = [
            self._read(here.header(routes.dispatch, source), here.header_words)
            for source in range(self._comm.world_size)
        ]
        compare_headers(routes.dispatch, headers)
        self._settle([header[len(HEADER) :] for header in headers], came, replaying)
        return headers

    def _read(self, offset_bytes: int, words: int) -> list[int]:
        return list((ctypes.c_int64 * words).from_address(self._base + offset_bytes))

    def _settle(self, counts: list[list[int]], came: list[list[int]], replaying: bool) -> None:
        """From all counts to where rows start; too many rows raise on every rank alike."""
        most, routes, me = self._config.recv_per_source, self.routes, self._comm.rank
        for source, to in enumerate(counts):
            for destination, rows in enumerate(to):
                if rows > most:
                    raise UnsupportedShape(
                        f"rank {source} sends {rows} rows to rank {destination} in dispatch "
                        f"{routes.dispatch}; "
                        f"there is room for {most} from each source "
                        f"(max_total_recv_tokens={self._config.max_total_recv_tokens})"
                    )
        received = [to[me] for to in counts]
        if replaying and (routes.received != received or routes.came_chunks != came):
            raise CollectiveMismatch(
                f"rank {me} replays a dispatch that brought it {routes.received} rows, by rank, but the "
                f"ranks now "
                f"send {received}: all must replay the same dispatch"
            )
        routes.received, routes.came_chunks = received, came
        routes.first = [sum(counts[source][d] for source in range(me)) for d in range(len(counts))]
        routes.node_received = [sum(to[rank] for to in counts) for rank in self._comm.node_ranks]

    def _first_rows(self, counts: list[list[int]], source: int) -> list[int]:
        """Where a source's rows start at each rank of this node."""
        return [sum(counts[s][rank] for s in range(source)) for rank in self._comm.node_ranks]


def replayed(handle: EpDispatchRoutingHandle | None) -> InterRoutes | None:
    """The routes of a handle of ours."""
    if handle is None:
        return None
    if not isinstance(handle, InterNodeRoutingHandle) or handle.routes is None:
        raise ArgumentError(
            "this routing handle is of an op inside one node: across nodes there are more maps"
        )
    return handle.routes


def row_of(header: list[int], topk: int) -> RowFormat:
    """What the rows of a source consist of."""
    _, payload_bytes, _, scale_bytes, weights, _ = header[: len(HEADER)]
    return RowFormat(payload_bytes, scale_bytes, topk, bool(weights))
