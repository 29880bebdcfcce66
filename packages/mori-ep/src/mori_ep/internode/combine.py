"""Combine on one rank across nodes. The protocol is told in target.py."""

from __future__ import annotations

from typing import NamedTuple

from mori_shmem.deadline import Deadline
from mori_shmem.device.rows import RowCode, SlotMap, copy_ranges, sum_rows
from mori_shmem.errors import ArgumentError, CollectiveMismatch

from mori_ep import formats
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.internode.comm import NodesCommunicator, NodesWindow
from mori_ep.internode.engine import Waits
from mori_ep.internode.flags import NodeFlags
from mori_ep.internode.layout import CHUNK_TOKENS, InterLayout, num_chunks
from mori_ep.internode.routes import InterRoutes
from mori_ep.layout import CALL_SHIFT
from mori_ep.problem import WEIGHT_BYTES
from mori_ep.targets import CombineCall, CombineShape
from mori_ep.targets.host.combine import SIGN_DTYPE, SIGN_WEIGHTS, sign_text
from mori_ep.targets.host.limits import KINDS
from mori_ep.targets.host.marks import Marks

_LOW_HALF = (1 << CALL_SHIFT) - 1


class CombineLaunch(NamedTuple):
    """What a combine of one shape needs."""

    shape: CombineShape
    kind: str
    code: RowCode
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
    ) -> None:
        self._comm, self._engine, self._layout, self._config = comm, window.engine, layout, config
        self._flags, self._waits, self._marks, self._window = flags, waits, marks, window.here
        self._bases: tuple[int, ...] = window.here.addresses  # of the ranks of this node
        self._base = self._bases[comm.local_rank]
        self._others = [node for node in range(comm.num_nodes) if node != comm.node_number]
        self._weight_bytes = config.num_experts_per_token * WEIGHT_BYTES
        self._weight_code = RowCode("fp32", config.num_experts_per_token)
        self._due: tuple[CombineLaunch, CombineCall, InterRoutes] | None = None
        self.calls = 0
        self._lent = False  # as in targets/host/combine.py

    def prepare(self, shape: CombineShape) -> CombineLaunch:
        sign = formats.CODES[shape.dtype] << SIGN_DTYPE | shape.hidden
        sign |= SIGN_WEIGHTS if shape.weights else 0
        kind = KINDS[shape.dtype]
        return CombineLaunch(shape, kind, RowCode(kind, shape.hidden), sign)

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
        if source != y:
            copy_ranges([(y, source, rows * launch.code.nbytes)])
        if call.weights is not None:
            to = self._base + here.y_weights.offset_bytes
            copy_ranges([(to, call.weights.data_ptr(), rows * self._weight_bytes)])
        self._flags.set("staged", self.calls, launch.sign)
        self._due = launch, call, routes
        self._marks.add("stage rows")

    def _check(self, launch: CombineLaunch, call: CombineCall, routes: InterRoutes) -> None:
        for name, tensor in (("input", call.rows), ("weights", call.weights)):
            if tensor is not None and tensor.shape[0] < routes.num_received:
                raise ArgumentError(
                    f"{name} has {tensor.shape[0]} rows, the dispatch that this combine belongs to brought "
                    f"{routes.num_received} to rank {self._comm.rank}"
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
        weights = self._compare_node(launch, routes)
        for other, node in enumerate(self._others):
            for chunk, rows in enumerate(routes.came_chunks[other]):
                if rows:
                    self._send_partial(launch, routes, other, node, chunk, weights)
            sign = (launch.sign & ~SIGN_WEIGHTS) | (SIGN_WEIGHTS if weights else 0)
            word = self._layout.word("combined_in", self._as_seen_from(node))
            self._engine.put_signal(node, 0, 0, 0, word, self.calls << CALL_SHIFT | sign)
        self._add_up_here(launch, call, routes)
        self._flags.set("finished", self.calls)
        self._marks.add("add up in the node")
        self._receive_partials(launch, call, routes)
        self._marks.add("wait for partial sums")
        self._add_up(launch, call, routes)
        self._engine.quiet(Deadline(self._comm.timeout_s))  # what went out may be overwritten
        if self._lent:  # nobody reads my y any more
            self._flags.wait("finished", self.calls, "combine")
        self._marks.add("add up")

    def _as_seen_from(self, node: int) -> int:
        mine = self._comm.node_number
        return mine if mine < node else mine - 1

    def _compare_node(self, launch: CombineLaunch, routes: InterRoutes) -> bool:
        """Rows of one kind on all ranks of this node; whether those that have rows brought weights."""
        brought: dict[int, bool] = {}
        signs = [(self._comm.local_rank, self.calls, launch.sign), *self._flags.read("staged")]
        for local, call, sign in signs:
            rank = self._comm.node_ranks[local]
            if call == self.calls:  # else it is a call ahead, and has finished with this one
                if (sign ^ launch.sign) & ~SIGN_WEIGHTS:
                    raise self._mismatch(launch.sign, rank, sign)
                if routes.node_received[local]:
                    brought[rank] = bool(sign & SIGN_WEIGHTS)
        if len(set(brought.values())) > 1:
            rank = next(r for r, has in brought.items() if has != bool(launch.sign & SIGN_WEIGHTS))
            raise self._mismatch(launch.sign, rank, launch.sign ^ SIGN_WEIGHTS)
        return any(brought.values())

    def _mismatch(self, mine: int, rank: int, theirs: int) -> CollectiveMismatch:
        return CollectiveMismatch(
            f"combine {self.calls}: rank {self._comm.rank} brings {sign_text(mine)}, rank {rank} "
            f"{sign_text(theirs)}: all ranks must combine rows of one kind"
        )

    def _tables(self, launch: CombineLaunch) -> tuple[list[int], list[int]]:
        """By rank of this node, where its rows for combine lie, and their weights."""
        here = self._layout.here
        rows = [base + here.y.offset_bytes for base in self._bases]
        return rows, [base + here.y_weights.offset_bytes for base in self._bases]

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
        self._sum(launch, slots, tables, out, weight_tables, out + nbytes if weights else 0)
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
        self._sum(launch, slots, tables, out, weight_tables, out_weights if call.weights is not None else 0)

    def _receive_partials(self, launch: CombineLaunch, call: CombineCall, routes: InterRoutes) -> None:
        layout = self._layout
        for other, node in enumerate(self._others):
            what = f"combine {self.calls}"
            word = layout.word("combined_in", other)
            seen = self._waits.for_word(node, word, self.calls << CALL_SHIFT, what)
            differ = (seen & _LOW_HALF) ^ launch.sign
            if seen >> CALL_SHIFT == self.calls:
                lacks = call.weights is not None and differ & SIGN_WEIGHTS and any(routes.sent_chunks[other])
                if differ & ~SIGN_WEIGHTS or lacks:
                    raise self._mismatch(launch.sign, self._comm.counterpart(node), seen & _LOW_HALF)
            for chunk, rows in enumerate(routes.sent_chunks[other]):
                if rows:
                    word = layout.word("partials_in", other, chunk)
                    self._waits.for_word(node, word, self.calls, f"chunk {chunk} of {what}")

    def _add_up(self, launch: CombineLaunch, call: CombineCall, routes: InterRoutes) -> None:
        """The nodes' partial sums, in the order of the first slots that name the nodes; chunk by chunk."""
        here, pitch = self._layout.here, launch.code.nbytes
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
