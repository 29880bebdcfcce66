"""One package per target, each with the same things; see `target_for`.

What a target's Runner gets is checked: contiguous tensors on its device, shapes and dtypes that fit, ids that
the call may have. It owns the layer's memory, flags and epochs, and is called by one thread at a time.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Protocol

import mori_shmem
import torch
from mori_shmem.errors import TransportInert
from mori_shmem.settings import Snapshot

from mori_megamoe.launch import Call, Launch
from mori_megamoe.layout import Layout
from mori_megamoe.plan import Tile
from mori_megamoe.problem import Problem
from mori_megamoe.weights import StoredWeights

TARGETS = {"host": "mori_megamoe.targets.host", "cuda": "mori_megamoe.targets.cuda"}


class Runner(Protocol):
    """One layer's memory and flags on this rank, and its phases. Stages of Stage1 work with it too."""

    problem: Problem
    layout: Layout
    comm: mori_shmem.Communicator
    window: mori_shmem.Window
    values: Snapshot
    hidden: torch.Tensor  # [capacity, I] uint8: codes between the GEMMs, this rank's
    hidden_scales: torch.Tensor  # [capacity * padded columns] uint8, mx.ActivationScales tile by tile

    @staticmethod
    def layout_for(problem: Problem, values: Snapshot) -> Layout:
        """Of the window that such a layer gets on this target."""

    def take_weights(self, experts: StoredWeights) -> None:
        """The layer has these from its next call on. Local; raises for what the target cannot hold."""

    # ---- phases ----

    def prepare(self, call: Call, *, quantize: bool) -> Launch:
        """Begin the next epoch: counts out and in, plans, my landing rows free. x quantised, if wanted."""

    def stage2(self, launch: Launch) -> None:
        """GEMM2 of every row of my plan; weighted rows to the ranks of their tokens."""

    def combine(self, launch: Launch) -> torch.Tensor:
        """[max tokens, D] bf16: the output, of which the first n rows are this launch's."""

    # ---- for a Stage1: places ----

    def rows(self, rank: int) -> torch.Tensor:
        """[capacity, D] uint8: where inputs land at a rank."""

    def row_scales(self, rank: int) -> torch.Tensor:
        """[capacity, D / 32] uint8, row-major."""

    def at(self, name: str, rank: int, *, row: int, row_bytes: int) -> mori_shmem.Ref:
        """The address of a row of one of the layout's regions, for copy queues."""

    def arrived_at(self, rank: int) -> mori_shmem.Ref:
        """My word at a rank: how far my rows for it have come."""

    def arrived_from(self, source: int) -> mori_shmem.Ref:
        """A source's word here."""

    # ---- for a Stage1: steps ----

    def wait_ready(self, launch: Launch, rank: int) -> None:
        """Until the rank's landing rows and headers may be written."""

    def write_headers(self, launch: Launch, rank: int, number: int) -> None:
        """Origins and weights of my rows of a segment, at the rank, for both experts of a pair."""

    def signal_arrived(self, launch: Launch, rank: int, number: int) -> None:
        """My rows for the rank are there up to and with this segment: a direct store of my word."""

    def wait_arrived(self, launch: Launch, number: int) -> None:
        """Until everybody's rows of a segment are here, with their headers."""

    def gemm1_tile(
        self,
        launch: Launch,
        tile: Tile,
        *,
        rows: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """One tile: GEMM1, SwiGLU, requantise. From several threads, each with a launch of its own `scratch`.

        rows    # [M, D] uint8; None: those that landed
        scales  # [M, D / 32] uint8 row-major; None: those that landed
        """


def target_for(backend: str) -> ModuleType:
    """The module for a communicator's backend. It has
    Runner(comm, window, layout, values, pairs)   see above
    DirectStores()   its baseline, a Stage1
    CopyEngines(options)   Stage1 over copy engines, where the target has it; see stage1/options.py
    check_ids(...)   what it can see of a call's ids before anybody waits
    """
    if backend not in TARGETS:
        raise TransportInert(
            f"backend {backend!r} is not part of this version of mori-megamoe; it has: {', '.join(TARGETS)}"
        )
    return importlib.import_module(TARGETS[backend])
