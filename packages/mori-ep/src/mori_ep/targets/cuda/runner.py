"""Calls of one op on this rank: a look at the fault record, a few words of arguments, one launch.

A kernel is queued on the caller's stream and nothing is waited for: what a call returns is there in stream
order. What went wrong in a kernel (a peer that is late, too many rows) is raised by the op's next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int, c_void_p
from typing import Any, TypeVar

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError, MoriError, PeerError
from mori_shmem.jit import driver
from mori_shmem.settings import Snapshot
from mori_shmem.targets.fault_record import CallFaults

from mori_ep.again import Repeated
from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.layout import Region
from mori_ep.plan import Geometry, Plan
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.settings import FP8_COMBINE_SCALE_DIM
from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape
from mori_ep.targets.cuda import faults, masks
from mori_ep.targets.cuda.experts import ExpertRows
from mori_ep.targets.cuda.launch import CombineLaunch, DispatchLaunch, Maps
from mori_ep.targets.cuda.layout import Layout
from mori_ep.targets.cuda.masks import Masks
from mori_ep.targets.cuda.params import BOTH, META_MINE, META_SENT, META_WORDS, SEND, STATE_WORDS
from mori_ep.targets.cuda.place import Place, blocks_of, tables_module

_L = TypeVar("_L", DispatchLaunch, CombineLaunch)
_COPY_BLOCKS = 8
_BLOCK_VALUES = 128  # that share a scale in fp8_blockwise, unless the setting says otherwise


class Routing(EpDispatchRoutingHandle):
    """A handle made here also keeps who wants packets; one that a caller puts together does not, and
    pulls."""

    meta: torch.Tensor | None = None


class Runner:
    """One op's window on this rank."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        config: EpDispatchCombineConfig,
        plan: Plan,
        values: Snapshot,
    ) -> None:
        self._comm, self._window, self._layout, self._config = comm, window, layout, config
        self._device: int = comm.device.index or 0
        scales = int(values[FP8_COMBINE_SCALE_DIM])
        self._place = Place(
            config,
            layout,
            list(window.addresses),
            self._device,
            self._blocks(),
            comm.core.record.address,
            comm.timeout_s,
            config.hidden_dim // scales if scales else _BLOCK_VALUES,
            plan.few,
        )
        self._faults = CallFaults(comm, faults.OURS, faults.error_of)
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._in_halves = config.kernel_type is EpDispatchCombineKernelType.AsyncLL
        place = self._place
        self._maps = Maps(
            place.mine(layout.table),
            place.mine(layout.out_positions),
            place.mine(layout.recv_count),
            place.mine(layout.meta),
        )
        self._experts: ExpertRows | None = None
        self._launches: list[DispatchLaunch | CombineLaunch] = []
        self._last: DispatchLaunch | CombineLaunch | None = None
        self._tokens = 0  # of the last dispatch
        self._copied_in = False  # the last combine copied rows into y, and no dispatch has come since: read?
        self._masks = Masks(comm, [self._words(layout.dispatch_state), self._words(layout.combine_state)])

    def _blocks(self) -> int:
        """Blocks of a grid: this rank's share of the SMs of its GPU."""
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return blocks_of(self._device, self._comm.all_gather(uuid).count(uuid))

    def view(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a region, from its start."""
        return self._window.tensor(shape, dtype, self._layout.regions()[region].offset_bytes)

    # ---- calls ----

    def prepare_dispatch(self, shape: DispatchShape) -> DispatchLaunch:
        """Arguments and code for dispatches of this shape."""
        return self._keep(DispatchLaunch(self._place, shape))

    def prepare_combine(self, shape: CombineShape) -> CombineLaunch:
        """The same for combines."""
        return self._keep(CombineLaunch(self._place, shape))

    def _keep(self, launch: _L) -> _L:
        launch.set_alive(self._masks.alive)
        self._launches.append(launch)
        return launch

    def _stream(self) -> int:
        """Where a call goes: after what is wrong has been raised, on the caller's stream."""
        if self._faults.found():
            self._check()
        device = self._device
        if self._current_device() != device:
            raise MoriError(
                f"this op is on cuda:{device}, but cuda:{self._current_device()} is current: call it under "
                f"torch.cuda.device({device})"
            )
        return self._raw_stream(device)

    def dispatch(self, launch: DispatchLaunch, call: DispatchCall, phases: int = BOTH) -> None:
        """One kernel on the current stream."""
        x, weights, scales, indices, replay, geometry, homeward = call
        again = None if replay is None else replay.disp_dest_tok_id_map
        self._tokens = launch.launch(
            self._stream(), x, weights, scales, indices, again, geometry, phases, homeward
        )
        self._last, self._copied_in = launch, False

    def dispatch_send(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        """With AsyncLL, the kernel's sending half. Many tokens wait for the counts of all in this half."""
        self.dispatch(launch, call, SEND if self._in_halves else BOTH)

    def dispatch_recv(self) -> None:
        """The receiving half, with the arguments of the sending one."""
        self._receive()

    def combine(self, launch: CombineLaunch, call: CombineCall, phases: int = BOTH) -> None:
        """One kernel on the current stream."""
        rows, weights, num_tokens, routing, geometry = call
        registered = launch.shape.registered
        if registered and self._copied_in:
            raise ArgumentError(
                "use_external_inp_buf=0 right after a combine of rows of your own: those were copied into "
                "the registered buffer, and other ranks may still read them there. Dispatch between the two, "
                "or give this one rows of your own too"
            )
        maps = self._maps if routing is None else _maps_of(routing)
        # A dispatch would tell that peers have read my rows, but nothing says that one comes before the
        # caller fills the buffer again: every registered combine is guarded.
        launch.launch(self._stream(), rows, weights, num_tokens, maps, registered, geometry, phases)
        self._last, self._copied_in = launch, not registered

    def repeated_dispatch(
        self, launch: DispatchLaunch, call: DispatchCall, results: object
    ) -> Repeated | None:
        """One launch with other addresses."""
        return None if self._in_halves else launch.repeated(call, results)

    def repeated_combine(
        self, launch: CombineLaunch, call: CombineCall, indices: torch.Tensor, results: object
    ) -> Repeated | None:
        return None if self._in_halves else launch.repeated(call, indices, results)

    def dispatched_again(self) -> None:
        self._copied_in = False

    def combined_again(self, launch: CombineLaunch) -> None:
        self._copied_in = not launch.shape.registered

    def combine_send(self, launch: CombineLaunch, call: CombineCall) -> None:
        """With AsyncLL, the kernel's sending half."""
        self.combine(launch, call, SEND if self._in_halves else BOTH)

    def combine_recv(self) -> None:
        """The receiving half, with the arguments of the sending one."""
        self._receive()

    def lend_combine_input(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.view("y", shape, dtype)  # combines of it are guarded, whoever holds it

    def _receive(self) -> None:
        stream = self._stream()
        if self._in_halves and self._last is not None:
            self._last.receive(stream)

    # ---- tables ----

    def routing(self) -> EpDispatchRoutingHandle:
        """A copy of the maps of the last dispatch, made in stream order by one kernel."""
        config, n = self._config, self._tokens
        world, rows, k = config.world_size, config.recv_capacity, config.num_experts_per_token
        sizes = [n * k, rows, 1, META_WORDS]
        with torch.cuda.device(self._device):
            copy = torch.empty(sum(sizes), dtype=torch.int32, device=self._comm.device)
        maps = self._maps
        self._run_table_kernel(
            *("copy_routing", _COPY_BLOCKS, 256),
            [
                *(c_void_p(maps.table), c_int(n * k), c_void_p(maps.source), c_int(rows)),
                *(c_void_p(maps.count), c_void_p(maps.meta), c_int(world), c_void_p(copy.data_ptr())),
            ],
        )
        table, source, count, meta = torch.split(copy, sizes)
        handle = Routing(
            disp_dest_tok_id_map=table.view(n, k),
            disp_tok_id_to_src_tok_id=source,
            recv_count=count,
            recv_per_source=meta[:world],  # where META_FIRST is in the original
            sent_per_rank=meta[META_SENT : META_SENT + world],
            first_rows=meta[META_MINE : META_MINE + world],
            cur_rank_num_token=n,
        )
        handle.meta = meta
        return handle

    def received_rows(self) -> int:
        """Waits for the device."""
        count = int(self.view("recv_count", (1,), torch.int32).item())
        self._check()
        return count

    def count_experts(self, counts: torch.Tensor) -> None:
        """One small kernel of its own."""
        config, experts = self._config, self._config.num_experts_per_rank
        ids = self._place.mine(self._layout.out_indices)
        self._run_table_kernel(
            *("count_experts", 1, 1024),
            [
                *(c_void_p(ids), c_void_p(self._maps.count), c_int(config.num_experts_per_token)),
                *(c_int(config.rank * experts), c_int(experts), c_void_p(counts.data_ptr())),
            ],
        )

    def _run_table_kernel(self, name: str, grid: int, block: int, args: list[Any]) -> None:
        function = tables_module(self._device).function(name)
        driver.PreparedLaunch(function, grid, block, args).launch(self._stream())

    def to_experts(
        self, rows: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Two small kernels."""
        if self._experts is None:
            self._experts = ExpertRows(self._place)
        return self._experts.spread(rows, ids, scales, self._stream())

    def from_experts(self, packed: torch.Tensor, weights: torch.Tensor | None, into: torch.Tensor) -> None:
        """One."""
        if self._experts is None:
            raise ArgumentError("rows by expert have to be laid out before they can be added up")
        self._experts.gather(packed, weights, into, self._stream())

    def why_not_launch(self, geometry: Geometry) -> str | None:
        """Blocks that wait for each other have to be resident together."""
        resident = self._place.blocks
        if geometry.blocks > resident:
            return f"{geometry.blocks} blocks, of which {resident} are resident together on this rank's GPU"
        return None

    def trace_steps(self, on: bool) -> list[tuple[str, int]]:
        """None: a call returns before its work is done."""
        return []

    # ---- ranks that are left out ----

    def masked(self) -> list[bool]:
        """By rank."""
        return self._masks.masked()

    def set_masked(self, rank: int, value: bool) -> None:
        """From the next call on: nothing is sent to the rank or awaited from it. Waits that an earlier call
        gave up are taken up again."""
        if value:
            self._leave_out([rank])
        else:
            self._masks.take_in(rank)
            self._begin_again()

    def take_all_in(self) -> None:
        """All ranks together, whatever calls of before have left."""
        self._masks.take_all_in()
        self._faults.drop()
        self._begin_again()

    def _leave_out(self, ranks: Sequence[int]) -> None:
        self._masks.leave_out(ranks)
        self._begin_again()

    def _begin_again(self) -> None:
        """With the ranks that take part now, whatever has failed before."""
        self._faults.forgive()
        for launch in self._launches:
            launch.set_alive(self._masks.alive)

    def _words(self, state: Region) -> torch.Tensor:
        return self._window.tensor((STATE_WORDS,), torch.int32, state.offset_bytes)

    def _check(self) -> None:
        """Raise what a kernel has left. An elastic op has then masked the rank, and can go on."""
        try:
            self._faults.check()
        except PeerError as error:
            if not self._config.elastic:
                raise
            if self._masks.is_settled(error):
                self._faults.forgive()
                return
            missing = self._masks.missing(error)
            if not missing:  # its own blocks: nobody to go on without
                raise
            self._leave_out(missing)
            torch.cuda.current_stream(self._device).synchronize()  # what was launched with them has ended
            raise masks.named(error, missing) from error


def _maps_of(routing: EpDispatchRoutingHandle) -> Maps:
    """The addresses of a handle's tensors."""
    meta = routing.meta if isinstance(routing, Routing) else None
    return Maps(
        routing.disp_dest_tok_id_map.data_ptr(),
        routing.disp_tok_id_to_src_tok_id.data_ptr(),
        routing.recv_count.data_ptr(),
        None if meta is None else meta.data_ptr(),
    )
