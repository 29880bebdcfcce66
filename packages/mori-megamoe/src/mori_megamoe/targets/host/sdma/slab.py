"""Where rows lie before they are put, and where they land: two forms of both.

    apart   rows [.., D] and scales [.., D / 32] each by themselves. They land where the layer keeps them; a
            segment is two copies
    joined  a row, then its scales, one after the other. They land in a window of the stage's own, in rows of
            the same numbers; a segment is one copy. More than the layer's own memory: one more landing window

Besides, two stamps for each segment, into which the queues write when they begin and end it.
"""

from __future__ import annotations

from typing import NamedTuple

import mori_shmem
import torch

from mori_megamoe.problem import Problem
from mori_megamoe.stage1.sends import Send
from mori_megamoe.targets import Runner

STAMP_BYTES = 8
POISON = 0xFF


class Rows(NamedTuple):
    """Memory for rows, on this rank."""

    codes: torch.Tensor  # [rows, D] uint8
    scales: torch.Tensor  # [rows, D / 32] uint8


class Copy(NamedTuple):
    """Arguments of a put."""

    to: mori_shmem.Ref
    source: mori_shmem.Ref
    nbytes: int


class Slab:
    """Symmetric memory of one stage. Collective to make."""

    def __init__(self, runner: Runner, *, joined: bool) -> None:
        self.runner, self.problem, self.joined = runner, runner.problem, joined
        p, comm = runner.problem, runner.comm
        self.rows_at_most = p.max_tokens * p.topk
        self.window = comm.alloc(self.rows_at_most * p.row_bytes)
        self.stamps = comm.alloc(p.num_ranks * p.sends_per_rank * 2 * STAMP_BYTES)
        self.own_landing = comm.alloc(p.capacity_rows * p.row_bytes) if joined else None
        self.packed = _rows(self.window, self.rows_at_most, p, joined=joined)
        if self.own_landing is None:
            self.landed = Rows(runner.rows(comm.rank), runner.row_scales(comm.rank))
        else:
            self.landed = _rows(self.own_landing, p.capacity_rows, p, joined=True)

    def place(self, send: Send) -> tuple[Rows, int]:
        """Where this rank stores the rows of a segment: in the slab, its own where they land."""
        if send.slab_row is None:
            return self.landed, send.landing_row
        return self.packed, send.slab_row

    def copies(self, send: Send) -> list[Copy]:
        """What moves a packed segment to its rank."""
        p, row = self.problem, send.slab_row
        assert row is not None
        if self.own_landing is not None:
            there = self.own_landing.at(send.landing_row * p.row_bytes, send.rank)
            return [Copy(there, self.window.at(row * p.row_bytes), send.rows * p.row_bytes)]
        scales = self.rows_at_most * p.model_dim + row * p.model_scales
        return [
            self._apart("rows", send, row * p.model_dim, p.model_dim),
            self._apart("row_scales", send, scales, p.model_scales),
        ]

    def _apart(self, name: str, send: Send, offset_bytes: int, row_bytes: int) -> Copy:
        there = self.runner.at(name, send.rank, row=send.landing_row, row_bytes=row_bytes)
        return Copy(there, self.window.at(offset_bytes), send.rows * row_bytes)

    def stamp(self, send: Send, *, end: bool) -> mori_shmem.Ref:
        """Where the queue writes the time of its begin or end."""
        number = send.rank * self.problem.sends_per_rank + send.number
        return self.stamps.at((2 * number + end) * STAMP_BYTES)

    def times_ns(self, send: Send) -> tuple[int, int]:
        """(begin, end) of a segment that was put with stamps."""
        begin = self.stamp(send, end=False).offset_bytes
        first, last = self.stamps.tensor(2, torch.int64, begin).tolist()
        return first, last

    def poison_packed(self) -> None:
        """Nothing old may pass for new: what has been put."""
        self.window.tensor(self.window.nbytes, torch.uint8).fill_(POISON)

    def poison_landed(self) -> None:
        """What has been multiplied; the layer does this for its own memory."""
        if self.own_landing is not None:
            self.own_landing.tensor(self.own_landing.nbytes, torch.uint8).fill_(POISON)

    def close(self) -> None:
        for window in (self.window, self.stamps, self.own_landing):
            if window is not None:
                window.close()


def _rows(window: mori_shmem.Window, rows: int, problem: Problem, *, joined: bool) -> Rows:
    """Views of a window that begins with so many rows."""
    d, s = problem.model_dim, problem.model_scales
    if joined:
        whole = window.tensor((rows, d + s), torch.uint8)
        return Rows(whole[:, :d], whole[:, d:])
    return Rows(window.tensor((rows, d), torch.uint8), window.tensor((rows, s), torch.uint8, rows * d))
