"""Stage1 on the cuda target: from a rank's tokens to its experts' hidden rows, requantised.

    fused      prepare | stage1     some blocks send rows to their owners while all others multiply what has
               come
    copies     prepare | pack | stage1   the same, but copy engines carry the rows (slots.cuh)
    baseline   prepare | dispatch | gemm1

prepare makes the plan of the call and my operand rows (prepare.cu; the protocol stands in plan.cuh). They
are kernels on the caller's stream, their arguments made once; nothing is allocated and nothing waits on
the host, so that a call can be captured in a graph and replayed, between eager calls too. What went wrong in
a kernel is raised by the next call.

All ways share plan, rows and GEMM, so their bytes agree; a row's bytes depend on the row and its expert
only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError, ClosedError, LayoutError
from mori_shmem.targets.fault_record import CallFaults

from mori_megamoe.targets.cuda import faults, limits
from mori_megamoe.targets.cuda.gemm1 import params_of
from mori_megamoe.targets.cuda.kernels import Kernels
from mori_megamoe.targets.cuda.layout import Shape, offsets_of
from mori_megamoe.targets.cuda.memory import Landed, Local, Place
from mori_megamoe.targets.cuda.operand_rows import rows_params
from mori_megamoe.targets.cuda.params import NUM_ROWS, RowsParams
from mori_megamoe.targets.cuda.slots import Copies, SlotSizes
from mori_megamoe.targets.cuda.tiles import TileArrays
from mori_megamoe.targets.cuda.weights import prepare_weights

MODES = ("signals", "queue", "baseline", "copies", "copies-in-launch")
Mark = Callable[[str], None]  # told the name of each phase behind its last operation


def unmarked(phase: str) -> None:
    """For who does not want to know."""


class Hidden(NamedTuple):
    """What Stage1 made on this rank: views that the next call overwrites. Rows in tiles of experts; padding
    holds anything. How many there are is on the device: tiles.counts[NUM_ROWS]."""

    codes: torch.Tensor  # [rows, I] uint8 e4m3
    scales: torch.Tensor  # [rows, I / 32] uint8 e8m0
    shuffled_scales: torch.Tensor  # [rows * I / 32] uint8, mx.ActivationScales
    source: (
        torch.Tensor
    )  # [rows] int32: rank * max_tokens + token, slot above bit 24; padding world * max_tokens
    weight: torch.Tensor  # [rows] fp32: the router's
    tiles: TileArrays

    def num_rows(self) -> int:
        """With padding. Waits for the device."""
        return int(self.tiles.counts[NUM_ROWS].item())


class Stage1:
    """Collective: all ranks make it alike and make the same calls."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        *,
        model_dim: int,
        inter_dim: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        w1: torch.Tensor,
        w1_scale: torch.Tensor,
        swiglu_limit: float = 0.0,
        body: str = "auto",
        mode: str = "signals",
        tile_rows: int = 128,
        capacity: int = 0,
        send_blocks: int = limits.SEND_BLOCKS,
        slot_experts: int = 0,
        slot_slack: float = limits.SLOT_SLACK,
    ) -> None:
        """
        w1, w1_scale  this rank's experts, as mori_megamoe.shuffle_weights makes them
        body          "R" (fp8, error about 5e-5), "A" (bf16, exact products), or "auto": R, unless a rank's
                      weights need A
        mode          "signals": items in the order of experts; "queue": in the order in which rows come;
                      "baseline"; "copies": as "signals", over copy engines, "copies-in-launch" with
                      packing in the kernel that multiplies
        capacity      rows that a rank can receive in a call; 0: whatever the router may choose
        send_blocks   blocks that send in the fused modes, an even number
        slot_experts, slot_slack   as MegaMoEStage1Sdma has them
        """
        if comm.device.type != "cuda":
            raise ArgumentError(f"this Stage1 is for the cuda backend, the communicator is on {comm.device}")
        if mode not in MODES:
            raise ArgumentError(f"mode={mode!r}: one of {', '.join(MODES)}")
        self.comm, self.mode = comm, mode
        weights = prepare_weights(w1, w1_scale, model_dim=model_dim, inter_dim=inter_dim, body=body)
        bodies = comm.all_gather(weights.body)
        if len(set(bodies)) > 1:  # what travels is the body's own form, so all ranks have the same
            weights = prepare_weights(w1, w1_scale, model_dim=model_dim, inter_dim=inter_dim, body="A")
        self.weights = weights
        self.shape = Shape(
            *(comm.world_size, model_dim, inter_dim, num_experts, topk, max_tokens),
            body=weights.body,
            tile_rows=tile_rows,
            capacity=capacity,
        )
        self.shape.check()
        given = (self.shape, swiglu_limit, mode, send_blocks, slot_experts, slot_slack)
        if any(other != given for other in comm.all_gather(given)):
            raise ArgumentError(f"the ranks make different Stage1s: {comm.all_gather(given)}, in rank order")
        self._closed = False
        self._sizes = SlotSizes.of(self.shape, slot_experts, slot_slack)
        self._copies: Copies | None = None
        self._faults = CallFaults(comm, faults.OURS, faults.error_of)
        with torch.cuda.device(comm.device):
            self._make(swiglu_limit, send_blocks)
        comm.barrier()  # nobody's first counts may come before everybody's window is there

    def _make(self, limit: float, send_blocks: int) -> None:
        comm, shape = self.comm, self.shape
        _, nbytes = offsets_of(shape)
        self._window = comm.alloc(nbytes)
        self.place = place = Place(
            shape,
            comm.rank,
            list(self._window.addresses),
            Local.empty(shape, comm.device),
            Landed.of(shape, self._window.tensor((nbytes,), torch.uint8)),
            comm.core.record.address,
            comm.timeout_s,
        )
        buffers = place.buffers()
        assert buffers.scales is not None
        assert buffers.shuffled_scales is not None
        self.hidden = Hidden(
            *(buffers.out, buffers.scales, buffers.shuffled_scales),
            *(place.landed.source, place.landed.weight, place.local.tiles),
        )
        kernels = Kernels(comm, shape)
        grid = kernels.blocks
        self._plan, self._rows = place.plan(), RowsParams(nbytes=ctypes.sizeof(RowsParams))
        self._prepare = {
            quantised: kernels.launch(f"prepare-{kind}", grid, [self._plan, self._rows])
            for quantised, kind in ((False, "bf16"), (True, "codes"))
        }
        self._kept = (buffers, self.weights)
        is_baseline = self.mode == "baseline"
        arrivals = None if is_baseline else place.arrivals()
        gemm = [
            kernels.maps(buffers),
            params_of(self.weights, buffers, place.local.tiles, limit=limit, arrivals=arrivals),
        ]
        if is_baseline:
            self._send = place.send(grid, limits.DISPATCH_THREADS)
            self._moves = kernels.launch("dispatch", grid, [self._send])
            self._gemm = kernels.launch("gemm1", grid, gemm)
        else:
            self._send = place.send(min(send_blocks, grid) // 2 * 2 or 2, limits.SEND_THREADS)
            wait = "queue" if self.mode == "queue" else "signals"
            self._gemm = kernels.launch(f"stage1-{wait}", grid, [*gemm, self._send])
        if self.mode.startswith("copies"):
            self._copies = Copies(comm, self._sizes)
            self._packed = place.send(grid, limits.DISPATCH_THREADS)
            self._pack = kernels.launch("pack", grid, [self._packed])

    # ---- calls ----

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        mark: Mark = unmarked,
    ) -> Hidden:
        """One call, on the current stream. x [n, D] bf16, or e4m3 with scales [n, D / 32] uint8; weights [n,
        k] fp32; ids [n, k] int32, those outside the experts go nowhere. The tensors have to stay until the
        call is done."""
        self._check(x, weights, ids, scales)
        self._plan.ids, self._plan.tokens = ids.data_ptr(), len(ids)
        self._send.weights = weights.data_ptr()
        local = self.place.local
        given = rows_params(x, scales, local.rows, local.row_scale)
        ctypes.memmove(ctypes.addressof(self._rows), ctypes.addressof(given), ctypes.sizeof(given))
        if self._copies is not None:
            self._packed.weights = weights.data_ptr()
            for params in (self._plan, self._packed, self._send):
                self._copies.memory.put_into(params, len(ids))
        stream = torch.cuda.current_stream(self.comm.device).cuda_stream
        self._prepare[scales is not None].launch(stream)
        mark("prepare")
        if self.mode == "baseline":
            self._moves.launch(stream)
            mark("dispatch")
        if self._copies is not None:
            self._copies.enqueue(len(ids))  # before what they wait for
            if self.mode == "copies":
                self._pack.launch(stream)
                mark("pack")
        self._gemm.launch(stream)
        if self._copies is not None:
            self._copies.join()
        mark("gemm1" if self.mode == "baseline" else "stage1")
        return self.hidden

    def _check(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        shape, n = self.shape, len(ids)
        if self._closed:
            raise ClosedError("this Stage1 is closed")
        self.raise_faults()
        kind = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        wanted = [("x", x, kind, (n, shape.model_dim)), ("weights", weights, torch.float32, (n, shape.topk))]
        wanted.append(("ids", ids, torch.int32, (n, shape.topk)))
        if scales is not None:
            wanted.append(("scales", scales, torch.uint8, (n, shape.model_dim // 32)))
        for name, tensor, dtype, sizes in wanted:
            if tensor.dtype != dtype or tuple(tensor.shape) != sizes or not tensor.is_contiguous():
                raise LayoutError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}: "
                    f"contiguous {dtype} {sizes} is needed"
                )
            if tensor.device != self.comm.device or tensor.data_ptr() % 16:
                raise LayoutError(
                    f"{name} is on {tensor.device} at {tensor.data_ptr():#x}: this Stage1 is on "
                    f"{self.comm.device}, and addresses are multiples of 16"
                )
        if n > shape.max_tokens:
            raise ArgumentError(f"{n} tokens: this Stage1 was made for max_tokens={shape.max_tokens}")

    def raise_faults(self) -> None:
        """What a kernel of an earlier call has left; from then on in every call, since ranks find out at
        different ones."""
        self._faults.check()

    def close(self) -> None:
        """Give the window back. Local; twice is fine. Calls under way still end."""
        if not self._closed:
            self._closed = True
            self._window.close()
            if self._copies is not None:
                self._copies.close()

    def __enter__(self) -> Stage1:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
