"""The layer on GPUs of one host: every phase is a kernel or two on the caller's stream.

    prepare    prepare              plan of the call, from everybody's counts; my operand rows   plan.cuh
    Stage1     dispatch, gemm1      or one kernel that does both                      send.cuh, gemm1.cu
               pack, stage1         the same, with copy engines beside it             slots.cuh
    stage2     hidden, gemm2        hidden rows for GEMM2; weighted rows to their tokens' ranks  gemm2.cu
    combine    combine              wait for everybody's weighted rows; sum                     combine.cu

Plans, epochs and flags are on the device (plan.cuh and combine.cu have the protocol), so nothing waits on the
host and nothing is allocated: a call can be captured in a graph and replayed, between eager calls too, as
long as all ranks make the same calls in the same order. What went wrong in a kernel is raised by the next
call.

What differs from the host target
  bytes    products are summed in another order (tile.cuh: bodies R and A). All ways of Stage1 share GEMMs and
           plan, so among themselves their bytes agree; MORI_MEGAMOE_BODY chooses the body
  ids      are not looked at before the call. Those that name no expert go nowhere, with mask_invalid_slots or
           without; an expert twice in a token is two rows
  pairs    a token that goes to two experts of a rank sends two rows; `fanout_masks` has no effect
  tiles    of 32, 64 or 128 rows, by max_tok_per_rank: a layer for few tokens multiplies less padding
  weights  are brought into the kernels' order (weights.py) when the layer is made, or is given others, and
           kept: as much memory again. What a body cannot hold is refused there: when the layer is made on
           all ranks, later on the rank that gives it. Weights that were changed in place need an eager call
           before they are captured. A graph computes with those of its capture
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mori_shmem
import torch
from mori_shmem.errors import LayoutError, MoriError
from mori_shmem.settings import Snapshot
from mori_shmem.targets.fault_record import CallFaults

from mori_megamoe.launch import Call, Launch
from mori_megamoe.layout import Layout
from mori_megamoe.plan import Destination, destination
from mori_megamoe.problem import Problem
from mori_megamoe.routing import Pair, Routes
from mori_megamoe.settings import BODY, POISON
from mori_megamoe.targets.cuda import faults, kernels, limits
from mori_megamoe.targets.cuda.back import Back
from mori_megamoe.targets.cuda.gemm1 import params_of
from mori_megamoe.targets.cuda.layout import LayerLayout, layout_for
from mori_megamoe.targets.cuda.memory import Landed, Local, Place
from mori_megamoe.targets.cuda.operand_rows import rows_params
from mori_megamoe.targets.cuda.params import EPOCH, NUM_ROWS, NUM_TILES, RowsParams
from mori_megamoe.targets.cuda.slots import Copies, SlotSizes, take_out
from mori_megamoe.targets.cuda.weights import PreparedWeights, prepare_back_weights, prepare_weights
from mori_megamoe.weights import StoredWeights

WAYS = ("signals", "queue")  # of waiting for rows in the one kernel: gemm1.cu
_POISON = 0xFF
_NO_ROUTES = Routes([], [], *[torch.empty(0, dtype=torch.int64)] * 3)


class Gemms(NamedTuple):
    """One layer's weights, and the launches that multiply by them."""

    versions: tuple[int, ...]  # of the caller's tensors
    given: StoredWeights  # kept, so that no other tensor comes to lie where they do
    prepared: tuple[PreparedWeights, PreparedWeights]
    gemm1: dict[str, kernels.Launch]  # "": everything is there; or a way of waiting
    gemm2: kernels.Launch


@dataclass
class DeviceLaunch(Launch):
    """Counts and plans are on the device; `plan` fetches this rank's."""

    place: Place | None = None
    problem: Problem | None = None

    @property
    def plan(self) -> Destination:
        """Waits for the device. For tests and benches."""
        assert self.place is not None
        assert self.problem is not None
        shape, landed, words = self.place.shape, self.place.landed, self.place.local.tiles.counts.tolist()
        rows = landed.counts[words[EPOCH] & 1].tolist()
        counts = [[*row[:-1], *[0] * shape.world_size] for row in rows]  # no pairs
        made = destination(counts, self.problem, self.rank, shape.tile_rows, None)
        assert (made.num_rows, len(made.tiles)) == (words[NUM_ROWS], words[NUM_TILES])
        return made


class Runner:
    """One layer's memory and flags on this rank; see mori_megamoe.targets.Runner. Stages of Stage1 use
    `dispatch`, `gemm1` and `fused`."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        window: mori_shmem.Window,
        layout: Layout,
        values: Snapshot,
        pairs: Sequence[Pair | None],
    ) -> None:
        assert isinstance(layout, LayerLayout)
        self.comm, self.window, self.layout, self.values = comm, window, layout, values
        self.problem = layout.problem
        self.epoch = 0  # calls from this process; replays of graphs are counted on the device
        self._kernels = kernels.Kernels(comm, layout.shape)  # collective: before what may fail here alone
        self._faults = CallFaults(comm, faults.OURS, faults.error_of)
        self._gemms: dict[tuple[int, ...], Gemms] = {}
        self._now: Gemms | None = None
        self.place = place = Place(
            layout.shape,
            comm.rank,
            list(window.addresses),
            Local.empty(layout.shape, comm.device),
            Landed.of(layout.shape, window.tensor((layout.nbytes,), torch.uint8)),
            comm.core.record.address,
            comm.timeout_s,
        )
        buffers = place.buffers()
        assert buffers.shuffled_scales is not None
        self.back = Back.empty(place, buffers)
        self.hidden, self.hidden_scales = buffers.out, buffers.shuffled_scales
        blocks = self._kernels.blocks
        self._plan, self._rows = place.plan(), RowsParams(nbytes=ctypes.sizeof(RowsParams))
        self._dispatched = place.send(blocks, limits.DISPATCH_THREADS)
        self._packed = place.send(blocks, limits.DISPATCH_THREADS)
        self._sent = place.send(min(limits.SEND_BLOCKS, blocks), limits.SEND_THREADS)
        self._copies: Copies | None = None
        self._combined = self.back.combine_params()
        launch = self._kernels.launch
        self._prepare = {
            kind: launch(f"prepare-{kind}", blocks, [self._plan, self._rows]) for kind in ("bf16", "codes")
        }
        self._dispatch = launch("dispatch", blocks, [self._dispatched])
        self._pack = launch("pack", blocks, [self._packed])
        self._hidden = launch("hidden", limits.SMALL_BLOCKS * blocks, self.back.hidden_params())
        self._combine = launch("combine", limits.SMALL_BLOCKS * blocks, [self._combined])
        self._kernels.load("gemm1", *[f"stage1-{way}" for way in WAYS], "gemm2")
        self._kernels.finish()

    @staticmethod
    def layout_for(problem: Problem, values: Snapshot) -> LayerLayout:
        return layout_for(problem, values[BODY])

    # ---- phases ----

    def prepare(self, call: Call, *, quantize: bool) -> Launch:
        """Rows are always made here: `quantize` is what other targets' stages may do without."""
        self._faults.check()
        rows, kind = (call.x, "bf16") if call.x is not None else (call.x_q, "codes")
        assert rows is not None
        if rows.data_ptr() % 16:
            raise LayoutError(f"rows at {rows.data_ptr():#x}: the cuda target needs a multiple of 16")
        self._now = self._gemms_of(call.experts)
        self.epoch += 1
        self._plan.ids, self._plan.tokens = call.ids.data_ptr(), call.num_tokens
        self._combined.ids, self._combined.tokens = call.ids.data_ptr(), call.num_tokens
        for params in (self._dispatched, self._packed, self._sent):
            params.weights = call.weights.data_ptr()
        if self._copies is not None:
            self._use_slots(self._copies, call.num_tokens)
        local = self.place.local
        given = rows_params(rows, call.x_scales, local.rows, local.row_scale)
        ctypes.memmove(ctypes.addressof(self._rows), ctypes.addressof(given), ctypes.sizeof(given))
        if self.values[POISON]:
            self._poison()
        self._prepare[kind].launch(self._kernels.stream)
        return DeviceLaunch(
            *(call, self.epoch, self.comm.rank, [], [], _NO_ROUTES, [], None, None),
            place=self.place,
            problem=self.problem,
        )

    def stage2(self, launch: Launch) -> None:
        assert self._now is not None
        self._hidden.launch(self._kernels.stream)
        self._now.gemm2.launch(self._kernels.stream)

    def combine(self, launch: Launch) -> torch.Tensor:
        self._combine.launch(self._kernels.stream)
        return self.back.output

    # ---- for a Stage1 ----

    def dispatch(self) -> None:
        """My rows to their experts' ranks; ends when all of this rank's are here."""
        self._dispatch.launch(self._kernels.stream)

    def gemm1(self) -> None:
        assert self._now is not None
        self._now.gemm1[""].launch(self._kernels.stream)

    def fused(self, way: str) -> None:
        """Both at once; rows are stored where they land."""
        assert self._now is not None
        self._now.gemm1[way].launch(self._kernels.stream)

    def fused_with_copies(self, way: str, tokens: int, *, packs_in_launch: bool) -> None:
        """The same over copy engines: `send` has chosen them."""
        assert self._copies is not None
        self._copies.enqueue(tokens)  # before what they wait for
        if not packs_in_launch:
            self._pack.launch(self._kernels.stream)
        self.fused(way)
        self._copies.join()

    def new_copies(self, experts: int, slack: float) -> Copies:
        """Collective: slots of these sizes, for a stage that gives them back."""
        return Copies(self.comm, SlotSizes.of(self.layout.shape, experts, slack))

    def send(self, blocks: int, copies: Copies | None) -> None:
        """How rows leave from the next call on: so many blocks (0: as many as suit) in the kernel that
        multiplies; by copy engines, or stored."""
        most = self._kernels.blocks
        self._sent.blocks = min(blocks or limits.SEND_BLOCKS, most) // 2 * 2 or 2
        self._copies = copies
        for params in (self._plan, self._packed, self._sent):
            take_out(params)

    def _use_slots(self, copies: Copies, tokens: int) -> None:
        for params in (self._plan, self._packed, self._sent):
            copies.memory.put_into(params, tokens)

    # ---- weights ----

    def take_weights(self, experts: StoredWeights) -> None:
        """Before the first call that has them: refuses what the body cannot hold."""
        self._gemms_of(experts)

    def _gemms_of(self, experts: StoredWeights) -> Gemms:
        """What multiplies by a call's weights; made when they, or what is in them, are new."""
        where = tuple(part.data_ptr() for part in experts)
        versions = tuple(0 if part.is_inference() else part._version for part in experts)
        found = self._gemms.get(where)
        if found is None or found.versions != versions:
            if self._kernels.is_capturing:
                raise MoriError(
                    "this graph is captured with weights that are new, or were changed in place: give them "
                    "to the layer, or make one call with them, before the capture, so that they are brought "
                    "into the kernels' order"
                )
            found = self._gemms[where] = self._made_of(experts, versions)
        return found

    def _made_of(self, experts: StoredWeights, versions: tuple[int, ...]) -> Gemms:
        shape, back, launch = self.place.shape, self.back, self._kernels.launch
        sizes = {"model_dim": shape.model_dim, "inter_dim": shape.inter_dim}
        first = prepare_weights(experts.w1, experts.w1_scale, **sizes, body=shape.body)
        second = prepare_back_weights(experts.w2, experts.w2_scale, **sizes, body=shape.body)
        tiles, limit = self.place.local.tiles, self.problem.swiglu_limit
        maps, blocks = self._kernels.maps(back.hidden), self._kernels.blocks
        gemm1 = {"": launch("gemm1", blocks, [maps, params_of(first, back.hidden, tiles, limit=limit)])}
        for way in WAYS:
            given = params_of(first, back.hidden, tiles, limit=limit, arrivals=self.place.arrivals())
            gemm1[way] = launch(f"stage1-{way}", blocks, [maps, given, self._sent])
        self._kernels.finish()
        gemm2 = launch("gemm2", blocks, [self._kernels.maps(back.buffers), *back.gemm2_params(second)])
        return Gemms(versions, experts, (first, second), gemm1, gemm2)

    def _poison(self) -> None:
        """What this rank and others will write, before it tells its counts: NaN."""
        landed, back = self.place.landed, self.back
        for codes in (landed.row_scale, landed.partials, self.hidden, self.hidden_scales):
            codes.fill_(_POISON)
        for rows in (landed.rows, back.rows):
            rows.fill_(_POISON if rows.dtype == torch.uint8 else torch.nan)
        landed.weight.fill_(torch.nan)
        if self._copies is not None:
            self._copies.poison()
