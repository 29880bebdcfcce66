"""Ranks of a Stage1 on the CPU: all in one process, each with a window, a thread and its own copy of the
emulated kernels."""

from __future__ import annotations

import ctypes
import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from cuda_cases import cpu_maps, library, operand_rows
from cuda_emulator import Library
from mori_megamoe import mx
from mori_megamoe.targets.cuda import params
from mori_megamoe.targets.cuda.gemm1 import Buffers, params_of
from mori_megamoe.targets.cuda.layout import Shape, offsets_of
from mori_megamoe.targets.cuda.memory import Landed, Local, Place
from mori_megamoe.targets.cuda.operand_rows import rows_params
from mori_megamoe.targets.cuda.slots import Copies, SlotSizes
from mori_megamoe.targets.cuda.variants import BODIES
from mori_megamoe.targets.cuda.weights import PreparedWeights
from mori_shmem.targets.fault_record import FIELDS

STALE = 0x7F


class EmulatedProgram:
    """In the place of a mori_shmem.PutProgram; addresses are integers."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def wait(self, where: int, value: int) -> None:
        def wait() -> None:
            while ctypes.c_uint64.from_address(where).value < value:
                time.sleep(1e-4)

        self.steps.append(wait)

    def put(self, dst: int, src: int, nbytes: int) -> None:
        self.steps.append(lambda: ctypes.memmove(dst, src, nbytes) and None)

    def signal(self, where: int, value: int) -> None:
        def signal() -> None:
            ctypes.c_uint64.from_address(where).value = value

        self.steps.append(signal)


class EmulatedQueue:
    """A copy engine: a thread."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self._delay_s, self._threads = delay_s, list[threading.Thread]()

    def submit(self, program: EmulatedProgram) -> None:
        def run() -> None:
            for step in program.steps:
                time.sleep(self._delay_s())
                step()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads.clear()


@functools.cache
def prepare_library(body: str, quantised: bool = False) -> Library:
    flags = (f"-DBODY={BODIES[body]}", f"-DQUANTISED={int(quantised)}")
    kernels = {"prepare": ["PlanParams", "RowsParams"], "operand_rows": ["RowsParams"]}
    return Library("prepare.cu", flags, kernels)


@functools.cache
def dispatch_library() -> Library:
    return Library("dispatch.cu", (), {"dispatch": ["SendParams"], "pack": ["SendParams"]})


@dataclass
class RankCall:
    """What one rank gives to a call."""

    x: torch.Tensor  # [n, D] bf16
    weights: torch.Tensor  # [n, k] fp32
    ids: torch.Tensor  # [n, k] int32


class Ranks:
    """All ranks of one Stage1."""

    def __init__(
        self,
        shape: Shape,
        *,
        timeout_s: float = 60.0,
        slots: SlotSizes | None = None,
        delay_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """slots  of copy engines that need `delay_s()` for each step; EmulatedProgram has to be in the place
        of PutProgram
        """
        shape.check()
        self.shape = shape
        _, nbytes = offsets_of(shape)
        self.parts = [_aligned(nbytes) for _ in range(shape.world_size)]
        bases = [part.data_ptr() for part in self.parts]
        self.faults = [torch.zeros(8, dtype=torch.int32) for _ in self.parts]
        self.places = [
            Place(
                shape,
                rank,
                bases,
                Local.empty(shape, "cpu"),
                Landed.of(shape, self.parts[rank]),
                self.faults[rank].data_ptr(),
                timeout_s,
            )
            for rank in range(shape.world_size)
        ]
        self.copies = [] if slots is None else self._copies(slots, delay_s)

    def _copies(self, sizes: SlotSizes, delay_s: Callable[[], float]) -> list[Copies]:
        parts = [_aligned(max(1, sizes.offsets()[1])) for _ in self.parts]
        self.slot_parts, addresses = parts, [part.data_ptr() for part in parts]

        def comm(rank: int) -> Any:
            window = SimpleNamespace(
                addresses=addresses, at=lambda offset, peer=rank: addresses[peer] + offset, close=lambda: None
            )
            return SimpleNamespace(
                rank=rank,
                world_size=len(parts),
                device="cpu",
                alloc=lambda nbytes: window,
                queue=lambda peer: EmulatedQueue(delay_s),
            )

        return [Copies(comm(rank), sizes) for rank in range(len(parts))]

    def each(self, job: Callable[[int], object], delays: random.Random | None = None) -> None:
        """The job of every rank, at the same time."""
        ranks = list(range(self.shape.world_size))
        if delays:
            delays.shuffle(ranks)
        with ThreadPoolExecutor(len(ranks)) as pool:
            for done in [pool.submit(job, rank) for rank in ranks]:
                done.result()

    def fault(self, rank: int) -> dict[str, int]:
        """The record of a rank."""
        words = [int(v) & 0xFFFFFFFF for v in self.faults[rank]]
        return dict(zip(FIELDS, words, strict=True))

    # ---- one rank's steps ----

    def prepare(self, rank: int, call: RankCall, grid: int = 2) -> None:
        place = self.places[rank]
        plan = place.plan()
        plan.ids, plan.tokens = call.ids.data_ptr(), len(call.ids)
        if self.copies:
            self.copies[rank].memory.put_into(plan, len(call.ids))
        rows = rows_params(call.x, None, place.local.rows, place.local.row_scale)
        prepare_library(self.shape.body).of_rank(rank).run("prepare", [plan, rows], grid, 1024)

    def plan_only(self, rank: int, call: RankCall) -> None:
        """Without rows: one block."""
        self.prepare(rank, call, grid=1)

    def set_rows(self, rank: int, call: RankCall) -> None:
        """Operand rows by torch instead of the kernel."""
        rows, scale = operand_rows(self.shape.body, *mx.quantize_input(call.x))
        local = self.places[rank].local
        local.rows[: len(rows)] = rows
        if scale is not None:
            local.row_scale[: len(rows)] = scale

    def send_params(self, rank: int, call: RankCall, blocks: int) -> params.SendParams:
        send = self.places[rank].send(blocks, 128)
        send.weights = call.weights.data_ptr()
        if self.copies:
            self.copies[rank].memory.put_into(send, len(call.ids))
        return send

    def pack(self, rank: int, call: RankCall, grid: int = 2) -> None:
        send = self.send_params(rank, call, grid)
        dispatch_library().of_rank(rank).run("pack", [send], grid, 128)

    def dispatch(self, rank: int, call: RankCall, grid: int = 2) -> None:
        send = self.send_params(rank, call, grid)
        dispatch_library().of_rank(rank).run("dispatch", [send], grid, 128)

    def gemm1(self, rank: int, weights: PreparedWeights, buffers: Buffers, limit: float) -> None:
        shape, place = self.shape, self.places[rank]
        maps = cpu_maps(shape.body, buffers, shape.tile_rows)
        given = params_of(weights, buffers, place.local.tiles, limit=limit)
        library(shape.body, shape.tile_rows).of_rank(rank).run("gemm1", [maps, given], 2, 384)

    def stage1(
        self,
        rank: int,
        call: RankCall,
        weights: PreparedWeights,
        buffers: Buffers,
        limit: float,
        wait: str,
        *,
        grid: int = 4,
        blocks: int = 2,
    ) -> None:
        shape, place = self.shape, self.places[rank]
        maps = cpu_maps(shape.body, buffers, shape.tile_rows)
        given = params_of(weights, buffers, place.local.tiles, limit=limit, arrivals=place.arrivals())
        send = self.send_params(rank, call, blocks)
        library(shape.body, shape.tile_rows, wait).of_rank(rank).run("stage1", [maps, given, send], grid, 384)

    def buffers(self, rank: int) -> Buffers:
        shape = self.shape
        made = self.places[rank].buffers(sums=torch.zeros(shape.rows, 2 * shape.inter_dim))
        made.out.fill_(STALE)
        return made


def _aligned(nbytes: int) -> torch.Tensor:
    whole = torch.zeros(nbytes + 1024, dtype=torch.uint8)
    start = -whole.data_ptr() % 1024
    return whole[start : start + nbytes]


def random_call(shape: Shape, tokens: int, seed: int, *, invalid: float = 0.1) -> RankCall:
    """Distinct experts in a token, a few slots that name none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, shape.num_experts, generator=generator)
    ids = scores.topk(shape.topk, dim=1).indices.to(torch.int32) if tokens else torch.empty(0, shape.topk)
    ids = ids.to(torch.int32)
    ids[torch.rand(ids.shape, generator=generator) < invalid] = -1
    x = torch.randn(tokens, shape.model_dim, generator=generator).bfloat16()
    weights = torch.rand(tokens, shape.topk, generator=generator)
    return RankCall(x, weights, ids.contiguous())


# ---- the plan in Python ----


@dataclass(frozen=True)
class WantedRow:
    """A routed row."""

    rank: int
    token: int
    slot: int


def routes_by_expert(shape: Shape, calls: Sequence[RankCall]) -> list[list[WantedRow]]:
    """Of each expert of all: its rows by (source, token, slot)."""
    rows: list[list[WantedRow]] = [[] for _ in range(shape.num_experts)]
    for rank, call in enumerate(calls):
        for token, slots in enumerate(call.ids.tolist()):
            for slot, expert in enumerate(slots):
                if 0 <= expert < shape.num_experts:
                    rows[expert].append(WantedRow(rank, token, slot))
    return rows
