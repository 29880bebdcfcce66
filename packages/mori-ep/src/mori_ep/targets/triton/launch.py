"""One call as a row of kernels, with barriers between them. Barriers are mori-shmem's, in the order of the
caller's work: on a GPU they are kernels with a deadline, and captured with the rest.

Dispatch                                          Combine
  1. place: the map, rows counted for each rank     1. stage: y, unless it is there, and weights to my window
     tell: my header to every rank                     tell_sign: what I bring, to every rank
  2. barrier: all headers are there                 2. barrier: all rows are there
  3. settle, shift: where my rows go                3. compare_signs, sum_rows
     send_rows, field by field                      4. barrier: nobody reads my y any more
  4. barrier: all rows are there

Who may overwrite what. `headers` and `signs` are written by peers before barrier 2 of a call, when I have
passed the last barrier of the one before, after which I do not read them. `out*` is written after barrier 2,
which I reach when what my stream ran before this call is done. `y` is written by me alone, behind barrier 4.

A replay takes the handle's map, whose rows are at their receivers, and tells the counts that come with it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import mori_shmem
import torch
import triton  # type: ignore[import-untyped]
from mori_shmem.errors import ArgumentError, TransportInert, UnsupportedShape
from mori_shmem.settings import Snapshot

from mori_ep import formats
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.plan import Geometry, Plan
from mori_ep.problem import RowFormat
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.settings import KERNELS
from mori_ep.signs import SIGN_NO_WEIGHTS, SIGN_ROWS, SIGN_WEIGHTS, sign_of
from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape
from mori_ep.targets.triton import faults, kernels
from mori_ep.targets.triton.layout import Layout
from mori_ep.targets.triton.limits import INSTEAD

_LOG = logging.getLogger("mori_ep")
_said: list[bool] = []
INTERPRETED = bool(triton.knobs.runtime.interpret)
BLOCK = 1024  # bytes, elements or entries of a program
TOKENS = 64  # that a program of `place` looks at in one go
_BY_EXPERT = f"the layout by expert {INSTEAD}"


class DispatchLaunch(NamedTuple):
    """What dispatches of one shape have in common."""

    row: RowFormat
    dtype_code: int


class CombineLaunch(NamedTuple):
    """The same of combines."""

    shape: CombineShape
    sign: int


class Runner:
    """One op's window on this rank; see mori_ep.targets.Runner."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        config: EpDispatchCombineConfig,
        plan: Plan,
        values: Snapshot,
    ) -> None:
        if (comm.backend == "host") != INTERPRETED:
            raise TransportInert(
                f"kernels='triton' on the {comm.backend} backend with TRITON_INTERPRET={int(INTERPRETED)}: "
                "the host needs it to be 1 when triton is imported, a GPU needs it unset"
            )
        if not _said and comm.rank == 0:
            _said.append(True)
            _LOG.warning("the Triton kernels were chosen (%s): several launches a call", KERNELS.variable)
        self._comm, self._window, self._config = comm, window, config
        self._regions = layout.regions()
        tokens, topk, world = config.max_num_inp_token_per_rank, config.num_experts_per_token, comm.world_size
        on_gpu = comm.device.type == "cuda"

        def numbers(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=comm.device)

        self._table, self._first, self._received = numbers(tokens, topk), numbers(world), numbers(world)
        self._sent = numbers(world, dtype=torch.int64)
        self._windows = torch.tensor(list(window.addresses), dtype=torch.int64, device=comm.device)
        self._positions = torch.arange(tokens, dtype=torch.int32, device=comm.device)
        self._positions += comm.rank * config.position_stride
        self._record = torch.zeros(
            faults.WORDS, dtype=torch.int64, pin_memory=on_gpu
        )  # that kernels write to
        self._tokens = self._dispatches = 0  # tokens of the last one, and how many there were

    def view(self, region: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._window.tensor(shape, dtype, self._regions[region].offset_bytes)

    # ---- dispatch ----

    def prepare_dispatch(self, shape: DispatchShape) -> DispatchLaunch:
        row = shape.row_format(self._config.num_experts_per_token)
        return DispatchLaunch(row, formats.CODES[shape.dtype])

    def dispatch(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        n = self._tokens = call.x.shape[0]
        self._dispatches += 1
        with self._one_call():
            self._place(call, n)
            self._tell(launch, call, n)
            self._comm.stream_barrier()
            self._settle(call, n)
            self._send(launch.row, call, n)
            self._comm.stream_barrier()

    def dispatch_send(self, launch: DispatchLaunch, call: DispatchCall) -> None:
        self.dispatch(launch, call)

    def dispatch_recv(self) -> None:
        """Nothing is left to be done."""

    def _place(self, call: DispatchCall, n: int) -> None:
        config, topk = self._config, self._config.num_experts_per_token
        if call.replay is not None:
            self._table[:n].copy_(call.replay.disp_dest_tok_id_map)
            self._sent.copy_(call.replay.sent_per_rank)
            return
        self._table[:n].fill_(config.null_position)
        self._run(
            kernels.place,
            (config.world_size,),
            *(call.indices.data_ptr(), self._table.data_ptr(), self._sent.data_ptr(), n),
            *(config.num_experts_per_rank, config.position_stride),
            TOPK=topk,
            SLOTS=triton.next_power_of_2(topk),
            WORLD=config.world_size,
            BLOCK=TOKENS,
        )

    def _tell(self, launch: DispatchLaunch, call: DispatchCall, n: int) -> None:
        row, replay = launch.row, 0 if call.replay is None else call.replay.dispatch or -1
        self._run(
            kernels.tell,
            (self._config.world_size,),
            *(self._sent.data_ptr(), self._windows.data_ptr(), self._regions["headers"].offset_bytes),
            *(self._config.rank, n, row.payload_bytes, launch.dtype_code, row.scale_bytes),
            *(int(row.weights), replay),
            WORLD=self._config.world_size,
        )

    def _settle(self, call: DispatchCall, n: int) -> None:
        config = self._config
        self._run(
            kernels.settle,
            (1,),
            *(self._mine("headers"), self._first.data_ptr(), self._received.data_ptr()),
            *(self._mine("recv_count"), self._record.data_ptr(), config.rank, config.recv_per_source),
            WORLD=config.world_size,
        )
        entries = n * config.num_experts_per_token
        if call.replay is None:
            addresses = (self._table.data_ptr(), self._first.data_ptr())
            sizes = (entries, config.position_stride, config.null_position)
            self._run(kernels.shift, (-(-entries // BLOCK),), *addresses, *sizes, BLOCK=BLOCK)

    def _send(self, row: RowFormat, call: DispatchCall, n: int) -> None:
        """Field by field, as RowFormat orders them."""
        config = self._config
        tensors = (call.x, call.scales, call.weights, call.indices, self._positions)
        regions = ("out", "out_scales", "out_weights", "out_indices", "out_positions")
        for tensor, region, nbytes in zip(tensors, regions, row.field_bytes, strict=True):
            if tensor is None or not nbytes:
                continue
            self._run(
                kernels.send_rows,
                (n, -(-nbytes // BLOCK)),
                *(tensor.data_ptr(), self._table.data_ptr(), self._windows.data_ptr()),
                *(self._regions[region].offset_bytes, nbytes, config.recv_capacity),
                *(config.position_stride, config.null_position),
                TOPK=config.num_experts_per_token,
                BLOCK=BLOCK,
            )

    # ---- combine ----

    def prepare_combine(self, shape: CombineShape) -> CombineLaunch:
        return CombineLaunch(shape, sign_of(shape) | (SIGN_WEIGHTS if shape.weights else 0))

    def lend_combine_input(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.view("y", shape, dtype)  # no combine ends before all have read

    def combine(self, launch: CombineLaunch, call: CombineCall) -> None:
        handle = call.routing
        table = self._table if handle is None else handle.disp_dest_tok_id_map
        count = self._mine("recv_count") if handle is None else handle.recv_count.data_ptr()
        with self._one_call():
            self._stage(launch, call, count)
            self._comm.stream_barrier()
            self._run(
                kernels.compare_signs,
                (1,),
                *(self._mine("signs"), self._record.data_ptr(), SIGN_ROWS, SIGN_WEIGHTS, SIGN_NO_WEIGHTS),
                WORLD=self._config.world_size,
            )
            self._sum(launch.shape, call.num_tokens, table.data_ptr())
            self._comm.stream_barrier()

    def combine_send(self, launch: CombineLaunch, call: CombineCall) -> None:
        self.combine(launch, call)

    def combine_recv(self) -> None:
        """Nothing is left to be done."""

    def _stage(self, launch: CombineLaunch, call: CombineCall, count: int) -> None:
        shape, weights, given = launch.shape, call.weights, call.rows.shape[0]
        if shape.registered and given and call.rows.data_ptr() != self._mine("y"):
            raise ArgumentError(
                "use_external_inp_buf=0, but input is not the registered buffer: pass the tensor of "
                "get_registered_combine_input_buffer, or rows of your own with use_external_inp_buf=1"
            )
        if weights is not None:
            given = min(given, weights.shape[0])
        staged = [] if shape.registered else [("y", call.rows)]
        staged += [] if weights is None else [("y_weights", weights)]
        for region, rows in staged:
            nbytes = rows.shape[1] * rows.dtype.itemsize
            grid = (min(given, self._config.recv_capacity), -(-nbytes // BLOCK))
            addresses = (rows.data_ptr(), self._mine(region))
            self._run(kernels.stage, grid, *addresses, nbytes, count, BLOCK=BLOCK)
        self._run(
            kernels.tell_sign,
            (self._config.world_size,),
            *(self._windows.data_ptr(), self._regions["signs"].offset_bytes, self._config.rank, launch.sign),
            *(0 if shape.weights else SIGN_NO_WEIGHTS, given, count, self._record.data_ptr()),
        )

    def _sum(self, shape: CombineShape, n: int, table: int) -> None:
        topk = self._config.num_experts_per_token
        sums = [("y", "result", shape.hidden, shape.dtype is torch.bfloat16)]
        sums += [("y_weights", "result_weights", topk, False)] if shape.weights else []
        for region, result, size, bf16 in sums:
            self._run(
                kernels.sum_rows,
                (n, -(-size // BLOCK)),
                *(table, self._windows.data_ptr(), self._regions[region].offset_bytes, self._mine(result)),
                *(size, self._config.recv_capacity),
                *(self._config.position_stride, self._config.null_position),
                TOPK=topk,
                BF16=bf16,
                BLOCK=BLOCK,
            )

    def repeated_dispatch(self, launch: DispatchLaunch, call: DispatchCall, results: object) -> None:
        """A call is more than a launch here."""

    def repeated_combine(
        self, launch: CombineLaunch, call: CombineCall, indices: torch.Tensor, results: object
    ) -> None: ...

    def dispatched_again(self) -> None: ...

    def combined_again(self, launch: CombineLaunch) -> None: ...

    # ---- tables ----

    def routing(self) -> EpDispatchRoutingHandle:
        n, rows = self._tokens, self._config.recv_capacity
        return EpDispatchRoutingHandle(
            disp_dest_tok_id_map=self._table[:n].clone(),
            disp_tok_id_to_src_tok_id=self.view("out_positions", (rows,), torch.int32).clone(),
            recv_count=self.view("recv_count", (1,), torch.int32).clone(),
            recv_per_source=self._received.clone(),
            sent_per_rank=self._sent.int(),
            first_rows=self._first.clone(),
            cur_rank_num_token=n,
            dispatch=self._dispatches,
        )

    def received_rows(self) -> int:
        """Waits for the device."""
        count = int(self.view("recv_count", (1,), torch.int32).item())
        self._check()
        return count

    def count_experts(self, counts: torch.Tensor) -> None:
        config = self._config
        self._run(
            kernels.count_experts,
            (config.num_experts_per_rank,),
            *(self._mine("out_indices"), self._mine("recv_count"), counts.data_ptr()),
            config.rank * config.num_experts_per_rank,
            TOPK=config.num_experts_per_token,
            BLOCK=BLOCK,
        )

    # ---- what these kernels do not have ----

    def to_experts(
        self, rows: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        raise UnsupportedShape(_BY_EXPERT)

    def from_experts(self, packed: torch.Tensor, weights: torch.Tensor | None, into: torch.Tensor) -> None:
        raise UnsupportedShape(_BY_EXPERT)

    def why_not_launch(self, geometry: Geometry) -> str | None:
        return None  # no rule is looked up for these

    def trace_steps(self, on: bool) -> list[tuple[str, int]]:
        return []

    def masked(self) -> list[bool]:
        return [False] * self._config.world_size  # limits.py: not elastic

    def set_masked(self, rank: int, value: bool) -> None:
        raise UnsupportedShape(f"elastic=True {INSTEAD}")

    def take_all_in(self) -> None:
        """Nobody is left out."""

    # ---- inside a call ----

    @contextlib.contextmanager
    def _one_call(self) -> Any:
        """On the op's device. What went wrong is raised at its end where it is known then, else by the next
        call."""
        on_gpu = self._comm.device.type == "cuda"
        self._check()
        with torch.cuda.device(self._comm.device) if on_gpu else contextlib.nullcontext():
            yield
        if not on_gpu:
            self._check()

    def _check(self) -> None:
        """Raise what kernels have left: a barrier that was late, or a call that does not go together."""
        self._comm.check()
        if not self._record[0]:
            return
        error = faults.error_of(self._record.tolist())
        if (
            isinstance(error, UnsupportedShape | ArgumentError)
            and self._record.device.type == self._comm.device.type
        ):
            self._record.zero_()  # found by all ranks in the same call: the op stays usable
        raise error

    def _mine(self, region: str) -> int:
        return int(self._window.addresses[self._config.rank]) + self._regions[region].offset_bytes

    def _run(
        self, kernel: Callable[..., None], grid: tuple[int, ...], *arguments: int, **constants: Any
    ) -> None:
        """Over no programs, nothing."""
        if all(grid):
            kernel[grid](*arguments, **constants)  # type: ignore[index]
