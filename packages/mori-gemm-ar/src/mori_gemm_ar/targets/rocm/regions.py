"""Where the rocm target's flags and buffers lie in the window, in bytes. Pure integers; launch.py has the
protocol.

    epoch, arrived_due, finished_due   this rank's own counts, 64 bits each
    called    [source] u64, written by the source: which call it is in, and with which M
    arrived   [source] u64, written by the source or its copy engine: puts of partial sums of my slice that
              are here
    finished  [source] u64, the same of finished rows: puts that are here, or (pulled) slices that may be read
    counters  [owner][chunk] u64, mine: tiles of the chunk that are stored (`tiles`), and
              [part] workgroups that have reduced their share of a part (`blocks`)
    counters_then   where they stood when this call began
    c         [m_max, N] bf16: my partial sums where others, or copy engines, read them
    landing   [source][slice, N] bf16: the partial sums of my slice
    staging   my finished slice in the form in which it is pulled; or [W] finished slices as fp8 was pushed
    scales    fp32, one per row of staging where it is fp8
    output    [m_max, N] bf16: what the caller gets a view of

Every offset follows from m_max, never from the M of a call: with two Ms in turn on one window, one call's
data would otherwise lie where the other expects its own. Regions that a mode does not use have no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mori_gemm_ar.options import MAX_PARTS, Options
from mori_gemm_ar.plan import WIRES, Wire
from mori_gemm_ar.problem import BF16_BYTES, FP8_BYTES, ROW_SCALE_BYTES, Problem

WORD_BYTES = 8
ALIGNMENT = 256
LINE_WORDS = 16  # words of one writer do not share a cache line with those of another kind
M_BITS = 24  # of `called`: the call's M; the call's number is above


@dataclass(frozen=True)
class Control:
    """Offsets of the words. They come first in a part and depend on the number of ranks alone: kernels have
    them as constants."""

    num_ranks: int
    epoch: int
    arrived_due: int
    finished_due: int
    called: int
    arrived: int
    finished: int
    counters: int
    counters_then: int
    nbytes: int

    @property
    def num_counters(self) -> int:
        """One for each chunk of each owner, and one for each part."""
        return (self.num_ranks + 1) * MAX_PARTS

    def tiles(self, owner: Any) -> Any:
        """The counters of an owner's chunks. Also of DSL values."""
        return owner * (MAX_PARTS * WORD_BYTES) + self.counters

    @property
    def blocks(self) -> int:
        """The counters of the parts of my finished slice."""
        return int(self.tiles(self.num_ranks))

    @property
    def then(self) -> int:
        """How far behind a counter the word lies that says where it stood when this call began."""
        return self.counters_then - self.counters


def control_of(num_ranks: int) -> Control:
    """Where the words of a part lie."""
    counters = (num_ranks + 1) * MAX_PARTS
    sizes = {
        **dict.fromkeys(("epoch", "arrived_due", "finished_due"), 1),
        **dict.fromkeys(("called", "arrived", "finished"), num_ranks),
        **dict.fromkeys(("counters", "counters_then"), counters),
    }
    offset, offsets = 0, {}
    for name, words in sizes.items():
        offsets[name] = offset
        offset += -(-words // LINE_WORDS) * LINE_WORDS * WORD_BYTES
    return Control(num_ranks, **offsets, nbytes=offset)


@dataclass(frozen=True)
class Regions:
    """Offsets of one rank's part; the same on every rank."""

    num_ranks: int
    n: int
    slice_rows: int
    offsets: dict[str, int]
    nbytes: int

    def c_row(self, row: int) -> int:
        """A row of the whole matrix in C."""
        return self.offsets["c"] + row * self.n * BF16_BYTES

    def output_row(self, row: int) -> int:
        """A row of the whole matrix in the output."""
        return self.offsets["output"] + row * self.n * BF16_BYTES

    def landing_row(self, source: int, row_of_slice: int = 0) -> int:
        """A row of my slice in the slot of a source."""
        return self.offsets["landing"] + (source * self.slice_rows + row_of_slice) * self.n * BF16_BYTES

    def staging_row(self, slot: int, row_of_slice: int, row_bytes: int) -> int:
        """A row of a slot of staging."""
        return self.offsets["staging"] + (slot * self.slice_rows + row_of_slice) * row_bytes

    def scale_row(self, slot: int, row_of_slice: int = 0) -> int:
        """The scale of such a row."""
        return self.offsets["scales"] + (slot * self.slice_rows + row_of_slice) * ROW_SCALE_BYTES


def layout_for(m_max: int, n: int, num_ranks: int, options: Options) -> Regions:
    """The layout of the window for every M up to m_max."""
    slice_rows = Problem(m_max, n, 1, num_ranks).slice_rows
    wire, fp8, pulled = WIRES[options.mode], options.gather_dtype == "fp8", options.gather_transport == "lsa"
    staged_slices = 1 if pulled else num_ranks if fp8 else 0
    sizes = {
        "control": control_of(num_ranks).nbytes,
        "c": m_max * n * BF16_BYTES if wire in (Wire.QUEUES, Wire.IN_PLACE) else 0,
        "landing": num_ranks * slice_rows * n * BF16_BYTES if wire in (Wire.QUEUES, Wire.PEERS) else 0,
        "staging": staged_slices * slice_rows * n * (FP8_BYTES if fp8 else BF16_BYTES),
        "scales": staged_slices * slice_rows * ROW_SCALE_BYTES if fp8 else 0,
        "output": m_max * n * BF16_BYTES,
    }
    offset, offsets = 0, {}
    for name, nbytes in sizes.items():
        offsets[name] = offset
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Regions(num_ranks, n, slice_rows, offsets, offset)
