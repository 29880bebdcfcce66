"""Where each buffer and each flag lies in the window, in bytes. Pure integers.

    flags     done      [owner][chunk]   mine: my C rows of this chunk are computed, its put may start
              arrived   [source][chunk]  written by the source: its partial sums of my slice are here
              pushed    [part]           mine: this part of my finished slice may be pushed
              gathered  [source][part]   written by the source: this part of its finished slice is here
              ready     [source]         written by the source: its finished slice may be pulled
    stamps    when each put began and ended, written by the copy engine
    c         [m_max, N] bf16: my partial sums where others, or copy engines, read them
    landing   [W][slice, N] bf16: the partial sums of my slice, one slot per source
    staging   my finished slice in the form in which it is pulled; or [W] finished slices as fp8 was pushed
    scales    fp32, one per row of staging where it is fp8
    output    [m_max, N] bf16: what the caller gets a view of

Every offset follows from m_max, never from the M of a call: with two Ms in turn on one window, one call's
data would otherwise lie where the other expects its own. Regions that a mode does not use have no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mori_gemm_ar.options import MAX_PARTS, Options
from mori_gemm_ar.plan import WIRES, Wire
from mori_gemm_ar.problem import BF16_BYTES, FP8_BYTES, ROW_SCALE_BYTES, Problem

FLAG_BYTES = 8
ALIGNMENT = 256
MAX_ROWS = (1 << 24) - 1  # a flag's value holds the call's M in its low 24 bits, see targets/host.py


@dataclass(frozen=True)
class Region:
    """A run of bytes of the window."""

    offset_bytes: int
    nbytes: int

    @property
    def end_bytes(self) -> int:
        """Where the next one may begin."""
        return self.offset_bytes + self.nbytes


@dataclass(frozen=True)
class Layout:
    """The regions of one rank's part of the window; the same on every rank."""

    num_ranks: int
    n: int
    slice_rows: int
    done: Region
    arrived: Region
    pushed: Region
    gathered: Region
    ready: Region
    stamps: Region
    c: Region
    landing: Region
    staging: Region
    scales: Region
    output: Region

    @property
    def nbytes(self) -> int:
        """The size of the window."""
        return self.output.end_bytes

    def regions(self) -> dict[str, Region]:
        """All regions by name, in the order in which they lie."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: region for name, region in named if isinstance(region, Region)}

    def done_flag(self, owner: int, chunk: int) -> int:
        """Offset in my part."""
        return self.done.offset_bytes + (owner * MAX_PARTS + chunk) * FLAG_BYTES

    def arrived_flag(self, source: int, chunk: int) -> int:
        """Offset in the owner's part."""
        return self.arrived.offset_bytes + (source * MAX_PARTS + chunk) * FLAG_BYTES

    def pushed_flag(self, part: int) -> int:
        """Offset in my part."""
        return self.pushed.offset_bytes + part * FLAG_BYTES

    def gathered_flag(self, source: int, part: int) -> int:
        """Offset in the receiver's part."""
        return self.gathered.offset_bytes + (source * MAX_PARTS + part) * FLAG_BYTES

    def ready_flag(self, source: int) -> int:
        """Offset in the part of the rank that wants to pull."""
        return self.ready.offset_bytes + source * FLAG_BYTES

    def stamp(self, leg: int, peer: int, part: int) -> int:
        """Offset in my part of (began, ended) of one put; leg 0 carries partial sums, leg 1 finished rows."""
        return self.stamps.offset_bytes + ((leg * self.num_ranks + peer) * MAX_PARTS + part) * 2 * FLAG_BYTES

    def c_row(self, row: int) -> int:
        """Offset of a row of the whole matrix in C."""
        return self.c.offset_bytes + row * self.n * BF16_BYTES

    def output_row(self, row: int) -> int:
        """Offset of a row of the whole matrix in the output."""
        return self.output.offset_bytes + row * self.n * BF16_BYTES

    def landing_row(self, source: int, row_of_slice: int) -> int:
        """Offset of a row of my slice in the slot of a source."""
        return self.landing.offset_bytes + (source * self.slice_rows + row_of_slice) * self.n * BF16_BYTES

    def staging_row(self, source: int, row_of_slice: int) -> int:
        """Offset of a row of fp8 codes in the slot of a source (pushed fp8 only)."""
        return self.staging.offset_bytes + (source * self.slice_rows + row_of_slice) * self.n * FP8_BYTES

    def scale_row(self, source: int, row_of_slice: int) -> int:
        """Offset of the scale of such a row."""
        return self.scales.offset_bytes + (source * self.slice_rows + row_of_slice) * ROW_SCALE_BYTES


def layout_for(m_max: int, n: int, num_ranks: int, options: Options) -> Layout:
    """The layout of the window for every M up to m_max."""
    slice_rows = Problem(m_max, n, 1, num_ranks).slice_rows
    wire, fp8, pulled = WIRES[options.mode], options.gather_dtype == "fp8", options.gather_transport == "lsa"
    flags = num_ranks * MAX_PARTS * FLAG_BYTES
    staged_slices = 1 if pulled else num_ranks if fp8 else 0
    staged_row_bytes = n * (FP8_BYTES if fp8 else BF16_BYTES)
    sizes = {
        "done": flags,
        "arrived": flags,
        "pushed": MAX_PARTS * FLAG_BYTES,
        "gathered": flags,
        "ready": num_ranks * FLAG_BYTES,
        "stamps": 2 * 2 * flags,
        "c": m_max * n * BF16_BYTES if wire in (Wire.QUEUES, Wire.IN_PLACE) else 0,
        "landing": num_ranks * slice_rows * n * BF16_BYTES if wire in (Wire.QUEUES, Wire.PEERS) else 0,
        "staging": staged_slices * slice_rows * staged_row_bytes,
        "scales": staged_slices * slice_rows * ROW_SCALE_BYTES if fp8 else 0,
        "output": m_max * n * BF16_BYTES,
    }
    offset, regions = 0, {}
    for name, nbytes in sizes.items():
        regions[name] = Region(offset, nbytes)
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(num_ranks=num_ranks, n=n, slice_rows=slice_rows, **regions)
