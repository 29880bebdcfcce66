"""From a problem and a choice of options to what happens: phases, bands, chunks. Pure; chosen once per shape.

    slice    the rows that one rank owns: sums up, and sends to everyone (problem.py)
    band     the rows that one GEMM step computes; never reaches over a slice. Bands follow from the shape
    alone,
             not from the mode: with another split of M a GEMM library may take another kernel, and modes that
             must agree bit for bit would not.
    chunk    a run of bands of one slice that travels as one put and has one flag
    part     a run of rows of a finished slice that is pushed as one put and has one flag

A rank computes the rows of the next rank first, then of the one after, and its own last: the puts then have
the whole GEMM to fly in, and no two ranks begin with the same destination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from mori_gemm_ar.options import DEFAULT_CHUNKS, Options
from mori_gemm_ar.problem import Problem, Rows


class Phase(StrEnum):
    """What a rank does, in order; `Plan.phases` says which of them a mode has."""

    GEMM = "gemm"  # its partial sums, rounded to bf16 once; fused modes send them from here
    SCATTER = "scatter"  # start the puts of partial sums to their owners
    DRAIN = "drain"  # until all partial sums of my slice are where I can read them
    REDUCE = "reduce"  # add them in fp32 in rank order, round to bf16 once
    QUANTIZE = "quantize"  # my finished slice to e4m3fn, one scale per row
    GATHER = "gather"  # push it to every peer, until theirs are here
    DEQUANTIZE = "dequantize"  # widen what landed
    PULL = "pull"  # read finished slices from the peers, widening on the way


class Wire(StrEnum):
    """Where the GEMM's bf16 partial sums go."""

    OUTPUT = "output"  # gemm-only: they are the result
    QUEUES = "queues"  # into C, from where copy engines take them to their owners
    PEERS = "peers"  # stored straight into the owners' landing slots
    IN_PLACE = "in place"  # into C, from where their owners read them


WIRES = {
    "gemm-only": Wire.OUTPUT,
    "split-sdma": Wire.QUEUES,
    "fused-sdma": Wire.QUEUES,
    "split-lsa": Wire.IN_PLACE,
    "fused-lsa": Wire.PEERS,
}


@dataclass(frozen=True)
class Plan:
    """How one shape is computed. `max_band_rows` is the target's."""

    problem: Problem
    options: Options
    max_band_rows: int

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """In the order in which a rank goes through them."""
        options = self.options
        phases = [Phase.GEMM]
        if options.mode == "split-sdma":
            phases.append(Phase.SCATTER)
        if options.communicates:
            phases += [Phase.DRAIN, Phase.REDUCE]
        if options.gather_dtype == "fp8" and not options.fuse_quantize:
            phases.append(Phase.QUANTIZE)
        if options.gather_transport == "lsa":
            phases.append(Phase.PULL)
        elif options.gather_transport == "sdma":
            phases.append(Phase.GATHER)
            if options.gather_dtype == "fp8":
                phases.append(Phase.DEQUANTIZE)
        return tuple(phases)

    @property
    def wire(self) -> Wire:
        """Where partial sums go."""
        return WIRES[self.options.mode]

    @cached_property
    def num_bands(self) -> int:
        """Bands of a slice. Above 8 a multiple of 4, so that no slice is one chunk because of a prime."""
        num_bands = -(-self.problem.slice_rows // self.max_band_rows)
        return num_bands if num_bands <= DEFAULT_CHUNKS else -(-num_bands // 4) * 4

    @cached_property
    def num_chunks(self) -> int:
        """Puts per destination for partial sums: the largest divisor of the bands not above `chunks`."""
        if self.options.mode == "split-sdma":
            return self.options.sdma_queues or 1
        most = self.options.chunks or 1
        return max((d for d in range(1, most + 1) if self.num_bands and self.num_bands % d == 0), default=1)

    @cached_property
    def num_parts(self) -> int:
        """Puts per destination for finished rows."""
        return self.options.gather_bands or self.options.sdma_queues or 1

    def bands(self, owner: int) -> tuple[Rows, ...]:
        """The bands of a slice; some are empty in a short slice."""
        return split(self.problem.slice_of(owner), self.problem.slice_rows, self.num_bands)

    def chunks(self, owner: int) -> tuple[Rows, ...]:
        """The chunks of a slice. In fused-sdma each is a run of whole bands."""
        if self.options.mode != "fused-sdma":
            return split(self.problem.slice_of(owner), self.problem.slice_rows, self.num_chunks)
        if not self.num_bands:
            return (self.problem.slice_of(owner),)
        return tuple(Rows(bands[0].start, bands[-1].stop) for bands in self.bands_by_chunk(owner))

    @property
    def bands_per_chunk(self) -> int:
        """How many bands make up a chunk of fused-sdma; 0 where a slice has no bands."""
        return self.num_bands // self.num_chunks

    def bands_by_chunk(self, owner: int) -> tuple[tuple[Rows, ...], ...]:
        """The bands of a slice, in runs after which fused-sdma has something to send; else all in one run."""
        bands = self.bands(owner)
        if self.options.mode != "fused-sdma":
            return (bands,)
        each = self.bands_per_chunk
        return tuple(bands[i * each : (i + 1) * each] for i in range(self.num_chunks))

    def parts(self, owner: int) -> tuple[Rows, ...]:
        """The runs of rows in which a finished slice is pushed."""
        return split(self.problem.slice_of(owner), self.problem.slice_rows, self.num_parts)

    def pull_blocks(self, owner: int) -> tuple[Rows, ...]:
        """The pieces in which a finished slice is pulled; none of an empty slice."""
        blocks = split(
            self.problem.slice_of(owner),
            self.problem.slice_rows,
            -(-(self.options.pull_blocks or 1) // self.problem.num_ranks),
        )
        return tuple(block for block in blocks if block.height)

    def owners_from(self, rank: int) -> Iterator[int]:
        """All ranks in the order in which `rank` computes their rows: the next one first, itself last."""
        return ((rank + 1 + step) % self.problem.num_ranks for step in range(self.problem.num_ranks))


def split(rows: Rows, height: int, pieces: int) -> tuple[Rows, ...]:
    """`rows` cut where a full slice of `height` rows is cut into `pieces` equal runs."""
    step = -(-height // pieces) if pieces else 0
    cuts = [min(rows.stop, rows.start + i * step) for i in range(pieces + 1)]
    return tuple(Rows(start, stop) for start, stop in pairwise(cuts))
