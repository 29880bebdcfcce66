"""Combine on one rank, by PULL or QUEUES. The protocol is told in launch.py."""

from __future__ import annotations

from typing import NamedTuple

import mori_shmem
from mori_shmem.device.rows import RowCode, copy_ranges, quantize_rows, sum_rows
from mori_shmem.errors import ArgumentError
from mori_shmem.settings import Snapshot

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import CALL_SHIFT, Layout
from mori_ep.plan import Plan, Way
from mori_ep.problem import WEIGHT_BYTES
from mori_ep.settings import FP8_COMBINE_SCALE_DIM
from mori_ep.signs import compare_signs, said_of_weights, sign_of
from mori_ep.targets import CombineCall, CombineShape
from mori_ep.targets.host.dispatch import NOT_HERE
from mori_ep.targets.host.flags import Flags
from mori_ep.targets.host.limits import KINDS, wire_for
from mori_ep.targets.host.marks import Marks
from mori_ep.targets.host.routes import Routes


class CombineLaunch(NamedTuple):
    """What a combine of one shape needs."""

    shape: CombineShape
    wire: RowCode
    wire_bytes: int
    kind: str  # of the result
    quantised: bool
    sign: int


class Combiner:
    """The combines of one op on this rank."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        config: EpDispatchCombineConfig,
        plan: Plan,
        values: Snapshot,
        flags: Flags,
        marks: Marks,
    ) -> None:
        self._comm, self._window, self._layout = comm, window, layout
        self._config, self._plan, self._flags, self._marks = config, plan, flags, marks
        self._scale_dim = values[FP8_COMBINE_SCALE_DIM]
        self._me, self._bases = comm.rank, window.addresses
        self._weight_bytes = config.num_experts_per_token * WEIGHT_BYTES
        self._weight_code = RowCode("fp32", config.num_experts_per_token)
        self._due: tuple[CombineLaunch, CombineCall, Routes] | None = None
        self.calls = 0
        self._lent = False  # the registered buffer: its caller may fill it between any two calls

    def _mine(self, offset_bytes: int) -> int:
        return self._bases[self._me] + offset_bytes

    def prepare(self, shape: CombineShape) -> CombineLaunch:
        wire = wire_for(self._config, shape.hidden, shape.dtype, self._scale_dim)
        quantised = self._config.quant_type != "none"
        return CombineLaunch(shape, wire, wire.nbytes, KINDS[shape.dtype], quantised, sign_of(shape))

    def lend_input(self) -> None:
        """The caller gets y, to be filled from now on whenever no call is under way."""
        if not self._lent and self._due is None:
            self._await_readers()
        self._lent = True

    def _await_readers(self) -> None:
        """Until nobody reads my y any more: by QUEUES only my own queues do."""
        if self._plan.combine is not Way.QUEUES:
            self._flags.wait("finished", self.calls, "combine")
            return
        for peer in range(self._comm.world_size):
            for index in range(self._plan.num_queues if peer != self._me else 0):
                self._comm.queue(peer, index).quiet()

    def send(self, launch: CombineLaunch, call: CombineCall, routes: Routes) -> None:
        """Stage this rank's rows; by QUEUES put them on their way."""
        self._check(launch, call, routes)
        self.calls += 1
        self._flags.wait("finished", self.calls - 1, "combine")
        self._stage(launch, call, routes)
        self._flags.set(
            "staged", self.calls, launch.sign | said_of_weights(launch.shape, routes.num_received)
        )
        begin = 0
        for source, rows in enumerate(routes.received):
            if self._plan.combine is Way.QUEUES and source != self._me:
                self._put_back(launch, source, begin, rows)
            begin += rows
        self._due = launch, call, routes
        self._marks.add("stage rows")

    def receive(self) -> None:
        """Add up."""
        if self._due is None:
            return
        (launch, call, routes), self._due = self._due, None
        if self._plan.combine is Way.QUEUES:
            self._flags.wait("returned", self.calls, "combine")
        self._flags.wait("staged", self.calls, "combine")
        self._marks.add("wait for rows")
        self._compare(launch, routes)
        self._add_up(launch, call, routes)
        self._flags.set("finished", self.calls)
        self._marks.add("add up")
        if self._lent:
            self._await_readers()

    # ---- first half ----

    def _check(self, launch: CombineLaunch, call: CombineCall, routes: Routes) -> None:
        for name, tensor in (("input", call.rows), ("weights", call.weights)):
            if tensor is not None and tensor.shape[0] < routes.num_received:
                raise ArgumentError(
                    f"{name} has {tensor.shape[0]} rows, the dispatch that this combine belongs to brought "
                    f"{routes.num_received} to rank {self._me}: all of them are needed"
                )
        if launch.shape.registered and call.rows.data_ptr() != self._mine(self._layout.y.offset_bytes):
            raise ArgumentError(
                "use_external_inp_buf=0, but input is not the registered buffer: pass the tensor of "
                "get_registered_combine_input_buffer, or rows of your own with use_external_inp_buf=1"
            )

    def _stage(self, launch: CombineLaunch, call: CombineCall, routes: Routes) -> None:
        """The rows to be added, and their weights, where other ranks or queues read them."""
        y, source, rows = self._mine(self._layout.y.offset_bytes), call.rows.data_ptr(), routes.num_received
        if launch.quantised:
            quantize_rows(y, source, rows, launch.wire)
        elif source != y:
            copy_ranges([(y, source, rows * launch.wire_bytes)])
        if call.weights is not None:
            to = self._mine(self._layout.y_weights.offset_bytes)
            copy_ranges([(to, call.weights.data_ptr(), rows * self._weight_bytes)])

    def _put_back(self, launch: CombineLaunch, source: int, begin: int, rows: int) -> None:
        """A source's rows, which lie together in y, back to it: all rows first, then all their weights."""
        layout, window, queues = self._layout, self._window, self._plan.num_queues
        block = layout.returned_block(self.calls, self._me)
        parts = [(layout.y, launch.wire_bytes, block)]
        if launch.shape.weights:
            parts.append((layout.y_weights, self._weight_bytes, block + rows * launch.wire_bytes))
        for index in range(queues):
            queue = self._comm.queue(source, index)
            low, high = rows * index // queues, rows * (index + 1) // queues
            for region, pitch, to in parts if high > low else ():
                come_from = window.at(region.offset_bytes + (begin + low) * pitch)
                queue.put(window.at(to + low * pitch, source), come_from, (high - low) * pitch)
            flag = window.at(layout.queue_flag(layout.returned, self._me, index), source)
            queue.signal(flag, self.calls << CALL_SHIFT)

    # ---- second half ----

    def _compare(self, launch: CombineLaunch, routes: Routes) -> None:
        """Hidden size, dtype and whether there are weights must be the same everywhere. All ranks look at
        all, so that all are told."""
        signs = [(self._me, launch.sign | said_of_weights(launch.shape, routes.num_received))]
        for peer, call, sign in self._flags.read("staged"):
            if call == self.calls:  # else the peer is a call ahead: it has finished with this one
                signs.append((peer, sign))
        compare_signs(self.calls, signs)

    def _add_up(self, launch: CombineLaunch, call: CombineCall, routes: Routes) -> None:
        slot_map, layout = routes.slot_map(self._config), self._layout
        rows, weights = self._tables(launch, routes)
        out = self._mine(layout.result.offset_bytes)
        sum_rows(out, launch.kind, slot_map, rows, launch.wire_bytes, launch.wire)
        if call.weights is not None:
            out = self._mine(layout.result_weights.offset_bytes)
            sum_rows(out, "fp32", slot_map, weights, self._weight_bytes, self._weight_code)

    def _tables(self, launch: CombineLaunch, routes: Routes) -> tuple[list[int], list[int]]:
        """By rank, where row 0 of the map lies, of the rows and of their weights; 0: left out."""
        layout, pitch, weight_pitch = self._layout, launch.wire_bytes, self._weight_bytes
        rows = [base + layout.y.offset_bytes for base in self._bases]
        weights = [base + layout.y_weights.offset_bytes for base in self._bases]
        for rank in range(len(rows)):
            if self._config.elastic:
                call, first = self._flags.read_of("arrived", rank)
                if self._flags.masked[rank] or call != routes.dispatch or first == NOT_HERE:
                    rows[rank] = weights[rank] = 0
                else:
                    rows[rank] += first * pitch
                    weights[rank] += first * weight_pitch
            elif self._plan.combine is Way.QUEUES and rank != self._me:
                block, first = self._mine(layout.returned_block(self.calls, rank)), routes.first[rank]
                rows[rank] = block - first * pitch
                weights[rank] = block + routes.sent[rank] * pitch - first * weight_pitch
        return rows, weights
