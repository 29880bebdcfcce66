"""Combine on one rank across nodes. The protocol is told in target.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from mori_shmem.deadline import Deadline
from mori_shmem.device.rows import RowCode, SlotMap, copy_ranges, quantize_rows, sum_rows
from mori_shmem.errors import ArgumentError, CollectiveMismatch

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.internode.comm import NodesCommunicator, NodesWindow
from mori_ep.internode.engine import Waits
from mori_ep.internode.flags import NodeFlags
from mori_ep.internode.layout import CHUNK_TOKENS, InterLayout, num_chunks
from mori_ep.internode.routes import InterRoutes
from mori_ep.layout import CALL_SHIFT
from mori_ep.problem import WEIGHT_BYTES
from mori_ep.signs import SIGN_NO_WEIGHTS, SIGN_WEIGHTS, compare_signs, said_of_weights, sign_of
from mori_ep.targets import CombineCall, CombineShape
from mori_ep.targets.host.limits import KINDS, wire_for
from mori_ep.targets.host.marks import Marks

_LOW_HALF = (1 << CALL_SHIFT) - 1


class CombineLaunch(NamedTuple):
    """What a combine of one shape needs."""

    shape: CombineShape
    kind: str  # of the result
    code: RowCode  # of rows and of nodes' sums as they travel
    quantised: bool
    sign: int


class InterCombiner:
    """The combines of one op on this rank."""

    def __init__(
        self,
        comm: NodesCommunicator,
        window: NodesWindow,
        layout: InterLayout,
        config: EpDispatchCombineConfig,
        flags: NodeFlags,
        waits: Waits,
        marks: Marks,
        scale_dim: int,
    ) -> None:
        self._scale_dim = scale_dim
        self._comm, self._engine, self._layout, self._config = comm, window.engine, layout, config
        self._flags, self._waits, self._marks, self._window = flags, waits, marks, window.here
        self._bases: tuple[int, ...] = window.here.addresses  # of the ranks of this node
        self._base = self._bases[comm.local_rank]
        self._others = [node for node in range(comm.num_nodes) if node != comm.node_number]
        self._weight_bytes = config.num_experts_per_token * WEIGHT_BYTES
        self._weight_code = RowCode("fp32", config.num_experts_per_token)
        tokens = config.max_num_inp_token_per_rank if config.quant_type != "none" else 0
        self._sums = torch.empty(tokens * config.row_bytes, dtype=torch.uint8)  # before they are quantised
        self._due: tuple[CombineLaunch, CombineCall, InterRoutes] | None = None
        self.calls = 0
        self._lent = False  # as in targets/host/combine.py

    def prepare(self, shape: CombineShape) -> CombineLaunch:
        code = wire_for(self._config, shape.hidden, shape.dtype, self._scale_dim)
        quantised = self._config.quant_type != "none"
        return CombineLaunch(shape, KINDS[shape.dtype], code, quantised, sign_of(shape))

    def lend_input(self) -> None:
        """The caller gets y, to be filled from now on whenever no call is under way."""
        if not self._lent and self._due is None:
            self._flags.wait("finished", self.calls, "combine")
        self._lent = True

    # ---- first half ----

    def send(self, launch: CombineLaunch, call: CombineCall, routes: InterRoutes) -> None:
        """My rows, and their weights, where the ranks of this node read them."""
        self._check(launch, call, routes)
        self.calls += 1
        self._flags.wait("finished", self.calls - 1, "combine")
        here, rows = self._layout.here, routes.num_received
        y, source = self._base + here.y.offset_bytes, call.rows.data_ptr()
        if launch.quantised:
            quantize_rows(y, source, rows, launch.code)
        elif source != y:
            copy_ranges([(y, source, rows * launch.code.nbytes)])
        if call.weights is not None:
            to = self._base + here.y_weights.offset_bytes
            copy_ranges([(to, call.weights.data_ptr(), rows * self._weight_bytes)])
        self._flags.set("staged", self.calls, launch.sign | said_of_weights(launch.shape, rows))
        self._due = launch, call, routes
        self._marks.add("stage rows")

    def _check(self, launch: CombineLaunch, call: CombineCall, routes: InterRoutes) -> None:
        for name, tensor in (("input", call.rows), ("weights", call.weights)):
            if tensor is not None and tensor.shape[0] < routes.num_received:
                raise ArgumentError(
                    f"{name} has {tensor.shape[0]} rows, the dispatch that this combine belongs to brought "
                    f"{routes.num_received} to rank {self._comm.rank}: all of them are needed"
                )
        registered = self._base + self._layout.here.y.offset_bytes
        if launch.shape.registered and call.rows.data_ptr() != registered:
            raise ArgumentError(
                "use_external_inp_buf=0, but input is not the registered buffer: pass the tensor of "
                "get_registered_combine_input_buffer, or rows of your own with use_external_inp_buf=1"
            )

    # ---- second half ----

    def receive(self) -> None:
        """Add up: for others first, so that it is on its way; then for my tokens."""
        if self._due is None:
            return
        (launch, call, routes), self._due = self._due, None
        self._flags.wait("staged", self.calls, "combine")
        sign = self._sign_of_node(launch, routes)
        weights = bool(sign & SIGN_WEIGHTS)
        for other, node in enumerate(self._others):
            for chunk, rows in enumerate(routes.came_chunks[other]):
                if rows:
                    self._send_partial(launch, routes, other, node, chunk, weights)
            self._tell(node, sign)
        self._add_up_here(launch, call, routes)
        self._flags.set("finished", self.calls)
        self._marks.add("add up in the node")
        self._receive_partials(sign, routes)
        self._marks.add("wait for partial sums")
        self._add_up(launch, call, routes)
        self._engine.quiet(Deadline(self._comm.timeout_s))  # what went out may be overwritten
        if self._lent:  # nobody reads my y any more
            self._flags.wait("finished", self.calls, "combine")
        self._marks.add("add up")

    def _as_seen_from(self, node: int) -> int:
        mine = self._comm.node_number
        return mine if mine < node else mine - 1

    def _tell(self, node: int, sign: int) -> None:
        """A counterpart that all of this combine has been sent, and of which kind it is."""
        word = self._layout.word("combined_in", self._as_seen_from(node))
        self._engine.put_signal(node, 0, 0, 0, word, self.calls << CALL_SHIFT | sign)

    def _sign_of_node(self, launch: CombineLaunch, routes: InterRoutes) -> int:
        """What the ranks of this node bring, which must be one kind: else other nodes are told so, too."""
        mine = launch.sign | said_of_weights(launch.shape, routes.num_received)
        signs, all_said = [(self._comm.rank, mine)], mine
        for local, call, sign in self._flags.read("staged"):
            if call == self.calls:  # else it is a call ahead, and has finished with this one
                signs.append((self._comm.node_ranks[local], sign))
                all_said |= sign
        try:
            compare_signs(self.calls, signs)
        except CollectiveMismatch:
            for node in self._others:
                self._tell(node, launch.sign | SIGN_WEIGHTS | SIGN_NO_WEIGHTS)
            self._engine.quiet(Deadline(self._comm.timeout_s))
            raise
        return launch.sign | all_said & (SIGN_WEIGHTS | SIGN_NO_WEIGHTS)

    def _tables(self, launch: CombineLaunch) -> tuple[list[int], list[int]]:
        """By rank of this node, where its rows for combine lie, and their weights."""
        here = self._layout.here
        rows = [base + here.y.offset_bytes for base in self._bases]
        return rows, [base + here.y_weights.offset_bytes for base in self._bases]

    def _sum_in_node(
        self,
        launch: CombineLaunch,
        slots: SlotMap,
        tables: list[int],
        out: int,
        weights: list[int],
        out_weights: int,
    ) -> None:
        """What this node has made of a map's tokens, as it travels; and its weights unless out_weights is
        0."""
        if launch.quantised:
            sums = self._sums.data_ptr()
            self._sum(launch, slots, tables, sums, weights, out_weights)
            quantize_rows(out, sums, slots.rows, launch.code)
        else:
            self._sum(launch, slots, tables, out, weights, out_weights)

    def _sum(
        self,
        launch: CombineLaunch,
        slots: SlotMap,
        tables: list[int],
        out: int,
        weights: list[int],
        out_weights: int,
    ) -> None:
        """Rows of a map added up, and their weights unless out_weights is 0."""
        sum_rows(out, launch.kind, slots, tables, launch.code.nbytes, launch.code)
        if out_weights:
            sum_rows(out_weights, "fp32", slots, weights, self._weight_bytes, self._weight_code)

    def _send_partial(
        self, launch: CombineLaunch, routes: InterRoutes, other: int, node: int, chunk: int, weights: bool
    ) -> None:
        """What this node has made of a chunk of a counterpart's tokens: one row each, back to it."""
        layout, rows = self._layout, routes.came_chunks[other][chunk]
        at, nbytes = layout.chunk("partials_out", other, chunk), rows * launch.code.nbytes
        out = self._base + at
        tables, weight_tables = self._tables(launch)
        slots = routes.forward_map(self._config, other, chunk)
        self._sum_in_node(launch, slots, tables, out, weight_tables, out + nbytes if weights else 0)
        mine = self._as_seen_from(node)
        to, word = (
            layout.chunk("partials_from", mine, chunk, self.calls),
            layout.word("partials_in", mine, chunk),
        )
        self._engine.put_signal(
            node, to, at, nbytes + (rows * self._weight_bytes if weights else 0), word, self.calls
        )

    def _add_up_here(self, launch: CombineLaunch, call: CombineCall, routes: InterRoutes) -> None:
        """What this node has made of my tokens; rounded like what comes from other nodes."""
        extra = self._layout.extra
        out, out_weights = (self._base + extra[name].offset_bytes for name in ("own_partial", "own_weights"))
        tables, weight_tables = self._tables(launch)
        slots = routes.here_map(self._config)
        self._sum_in_node(
            launch, slots, tables, out, weight_tables, out_weights if call.weights is not None else 0
        )

    def _receive_partials(self, sign: int, routes: InterRoutes) -> None:
        """`sign`: of this node. Counterparts speak for theirs, and all are known before any is compared."""
        layout, signs = self._layout, [(self._comm.rank, sign)]
        for other, node in enumerate(self._others):
            word = layout.word("combined_in", other)
            what = f"combine {self.calls}"
            seen = self._waits.for_word(node, word, self.calls << CALL_SHIFT, what)
            if seen >> CALL_SHIFT == self.calls:  # else it is a call ahead, and has finished this one
                signs.append((self._comm.counterpart(node), seen & _LOW_HALF))
        for rank, theirs in signs:
            if theirs & SIGN_WEIGHTS and theirs & SIGN_NO_WEIGHTS:
                raise CollectiveMismatch(
                    f"combine {self.calls}: ranks of rank {rank}'s node bring rows of different kinds, or "
                    "only some of them weights, as their own errors say: all ranks must combine rows of one "
                    "kind"
                )
        compare_signs(self.calls, signs)
        for other, node in enumerate(self._others):
            for chunk, rows in enumerate(routes.sent_chunks[other]):
                if rows:
                    word = layout.word("partials_in", other, chunk)
                    what = f"chunk {chunk} of combine {self.calls}"
                    self._waits.for_word(node, word, self.calls, what)

    def _add_up(self, launch: CombineLaunch, call: CombineCall, routes: InterRoutes) -> None:
        """The nodes' partial sums, in the order of the first slots that name the nodes; chunk by chunk."""
        here, shape = self._layout.here, launch.shape
        pitch = shape.hidden * shape.dtype.itemsize
        for chunk in range(num_chunks(routes.num_tokens)):
            slots, token = routes.nodes_map(self._config, chunk), chunk * CHUNK_TOKENS
            tables, weight_tables = self._partial_tables(launch, routes, chunk)
            out = self._base + here.result.offset_bytes + token * pitch
            out_weights = self._base + here.result_weights.offset_bytes + token * self._weight_bytes
            self._sum(
                launch, slots, tables, out, weight_tables, out_weights if call.weights is not None else 0
            )

    def _partial_tables(
        self, launch: CombineLaunch, routes: InterRoutes, chunk: int
    ) -> tuple[list[int], list[int]]:
        """By node, where row 0 of its partial sums would lie, given a chunk."""
        layout, pitch = self._layout, launch.code.nbytes
        own = [self._base + layout.extra[name].offset_bytes for name in ("own_partial", "own_weights")]
        rows, weights = [own[0]] * self._comm.num_nodes, [own[1]] * self._comm.num_nodes
        for other, node in enumerate(self._others):
            at = self._base + layout.chunk("partials_from", other, chunk, self.calls)
            begin, number = routes.chunk_begin(other, chunk), routes.sent_chunks[other][chunk]
            rows[node] = at - begin * pitch
            weights[node] = at + number * pitch - begin * self._weight_bytes
        return rows, weights
