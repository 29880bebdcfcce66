"""Dispatch and combine between processes that share memory. What each way is: plan.py. Flags: layout.py.

Dispatch e on rank r, by COUNTS
  1. slots: for every (token, slot) the rank it goes to and its number among r's rows for that rank
  2. r's header (what a row consists of, rows for each rank) to every rank's headers[e & 1][r]; entered[r] = e
     there
  3. wait for entered >= e of every rank. Now all know all counts, and where everybody's rows start
  4. every row to its place in out* of its rank; then arrived[r] = e at every rank
  5. wait for arrived >= e, then for finished >= (combines that r has done): y may be filled from here on
by SLOTS
  2. rows to blocks[e & 1][r] of their rank, field by field; header; entered[r] = e
  3. wait for entered >= e; lay the blocks of all sources together in out*, in rank order; then as 5
by QUEUES the rows are packed in r's own sending block and put from there; the queue sets entered after its
put. The second half starts with 3 and ends when r's queues are idle, so that the sending blocks may be packed
again.

Combine c, by PULL
  1. y = the rows to be added, unless they are there already. Before that: finished >= (c - 1) of every rank
  2. staged[r] = c, with hidden size and dtype, at every rank; wait for staged >= c of every rank
  3. result = for every token the sum of its rows in the ranks' y; then finished[r] = c at every rank
by QUEUES the rows of y are put to returned_rows[c & 1][r] of their source, where they lie in token order; the
queue sets returned after its put.

Who may overwrite what. "p entered e" means that r has seen entered[p] >= e.
  out* of r         Written by s in its dispatch e (COUNTS) after r entered e: r's caller has given its views
                    back. Otherwise by r itself.
  headers, blocks   Parity e & 1, written by s in dispatch e. s has seen everybody enter e - 1, and a rank
                    enters e - 1 after it has read what came with e - 2. A rank makes the second half of a
                    call before the first half of the next.
  y of r            Written by r. Readers have finished c - 1: looked at in combine for rows that are copied,
                    and at the end of dispatch. Once y has been lent to the caller (the registered buffer),
                    also at the end of combine c, for finished >= c: a dispatch may be combined any number of
                    times and in any order with others, so the caller may fill y without a dispatch between,
                    and nothing tells in advance that this will not be. The first loan itself waits likewise.
  returned_rows     Parity c & 1, like blocks.
Flags have one writer and only grow. Every call, with 0 tokens too, sets every flag at every rank.

Elastic: rows go by SLOTS. A rank whose flag does not come in time, or whose process has ended, is masked:
nothing of it is waited for, read or counted any more. Ranks may learn of a death at different calls, so where
a source's rows start at a receiver is told by the receiver (`arrived` holds the first row, or NONE), not
added up by the source. A masked rank still gets all flags, with headers that say that nothing comes: it may
only have been late.
"""

from __future__ import annotations

import mori_shmem
import torch
from mori_shmem.device.rows import count_ids
from mori_shmem.errors import UnsupportedShape
from mori_shmem.settings import Snapshot

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import Layout
from mori_ep.plan import Geometry, Plan
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape
from mori_ep.targets.host.combine import CombineLaunch, Combiner
from mori_ep.targets.host.dispatch import Dispatcher, DispatchLaunch
from mori_ep.targets.host.experts import ExpertRows
from mori_ep.targets.host.flags import Flags
from mori_ep.targets.host.marks import Marks
from mori_ep.targets.host.routes import routes_of


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
        self._window, self._layout, self._config = window, layout, config
        self._memory = window.tensor(window.nbytes, torch.uint8)  # keeps what addresses point to mapped
        self._flags = Flags(comm, window, layout, elastic=config.elastic)
        self._marks = Marks()
        self._dispatcher = Dispatcher(comm, window, layout, config, plan, self._flags, self._marks)
        self._combiner = Combiner(comm, window, layout, config, plan, values, self._flags, self._marks)
        self._experts: ExpertRows | None = None

    def view(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._window.tensor(shape, dtype, self._layout.regions()[region].offset_bytes)

    # ---- dispatch ----

    def prepare_dispatch(self, shape: DispatchShape) -> DispatchLaunch:
        return self._dispatcher.prepare(shape)

    def dispatch(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        self._dispatcher.send(launch, call)
        self._dispatcher.receive(self._combiner.calls)

    def dispatch_send(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        self._dispatcher.send(launch, call)

    def dispatch_recv(self) -> None:
        self._dispatcher.receive(self._combiner.calls)

    def routing(self) -> EpDispatchRoutingHandle:
        positions = self.view("out_positions", (self._config.recv_capacity,), torch.int32)
        return self._dispatcher.routes.handle(positions)

    def received_rows(self) -> int:
        return self._dispatcher.routes.num_received

    def count_experts(self, counts: torch.Tensor) -> None:
        config = self._config
        ids = self._window.addresses[config.rank] + self._layout.out_indices.offset_bytes
        slots = self.received_rows() * config.num_experts_per_token
        first = config.rank * config.num_experts_per_rank
        count_ids(ids, slots, first, config.num_experts_per_rank, counts.data_ptr())

    # ---- rows by expert ----

    def to_experts(
        self, rows: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        if self._experts is None:
            self._experts = ExpertRows(self._config)
        positions = self.view("out_positions", (self._config.recv_capacity,), torch.int32)
        return self._experts.spread(rows, ids, scales, positions, self.received_rows())

    def from_experts(self, packed: torch.Tensor, weights: torch.Tensor | None, into: torch.Tensor) -> None:
        if self._experts is None:
            raise UnsupportedShape("no rows have been laid out by expert yet: nothing to bring back")
        self._experts.gather(packed, weights, into)

    # ---- combine ----

    def repeated_dispatch(self, launch: DispatchLaunch, call: DispatchCall, results: object) -> None:
        """A call is more than a launch here."""

    def repeated_combine(
        self, launch: CombineLaunch, call: CombineCall, indices: torch.Tensor, results: object
    ) -> None: ...

    def dispatched_again(self) -> None: ...

    def combined_again(self, launch: CombineLaunch) -> None: ...

    def lend_combine_input(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._combiner.lend_input()
        return self.view("y", shape, dtype)

    def prepare_combine(self, shape: CombineShape) -> CombineLaunch:
        return self._combiner.prepare(shape)

    def combine(self, launch: CombineLaunch, call: CombineCall) -> None:
        self.combine_send(launch, call)
        self.combine_recv()

    def combine_send(self, launch: CombineLaunch, call: CombineCall) -> None:
        routes = self._dispatcher.routes if call.routing is None else routes_of(call.routing)
        self._combiner.send(launch, call, routes)

    def combine_recv(self) -> None:
        self._combiner.receive()

    def why_not_launch(self, geometry: Geometry) -> str | None:
        return None  # there is no grid here

    def trace_steps(self, on: bool) -> list[tuple[str, int]]:
        ends, self._marks.ends, self._marks.on = self._marks.ends, [], on
        return ends

    # ---- ranks that are left out ----

    def masked(self) -> list[bool]:
        return list(self._flags.masked)

    def set_masked(self, rank: int, value: bool) -> None:
        self._flags.mask([rank], value)

    def take_all_in(self) -> None:
        self._flags.mask(range(self._config.world_size), False)
