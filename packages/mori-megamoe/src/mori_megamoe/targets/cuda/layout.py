"""Where the cuda target keeps what peers write, in bytes of a rank's part of the window. Pure
integers, the same on every rank.

    told       u32 [source]                       the epoch whose counts of the source are here
    counts     u32 [2][source][experts of all + 1]  rows that the source sends to each expert, then how many
               each of its copies carries (slots.cuh), by parity of the epoch
    arrived    u32 [expert][source]               rows that have come, since the beginning
    source     u32 [capacity]                     rank * max_tokens + token, slot above bit 24; padding: world
               * max_tokens
    weight     fp32 [capacity]                    the router's weight
    row_scale  u8 [capacity]                      body R: e8m0
    rows       [capacity][row_bytes]              operand rows: e4m3 (R) or bf16 (A)
and, where a whole layer is made and not only Stage1,
    returned   u32 [rank]                         the epoch whose weighted rows of the rank's experts are here
    partials   [max_tokens * topk][partial_bytes] weighted rows that came back (arithmetic.partial_rows)
"""

from __future__ import annotations

from dataclasses import dataclass

from mori_shmem.errors import UnsupportedShape

from mori_megamoe import layout
from mori_megamoe.problem import Problem
from mori_megamoe.targets.cuda import limits

_ALIGNMENT = 1024


@dataclass(frozen=True)
class Shape:
    """Sizes of a Stage1, or of a layer, equal on all ranks."""

    world_size: int
    model_dim: int
    inter_dim: int
    num_experts: int  # of all ranks
    topk: int
    max_tokens: int  # of one rank in one call
    body: str
    tile_rows: int = 128
    capacity: int = 0  # rows of a rank's landing; 0: enough for any routing
    partials: str = ""  # how weighted rows come back; "": Stage1 alone

    @property
    def experts(self) -> int:
        """Of one rank."""
        return self.num_experts // self.world_size

    @property
    def pairs(self) -> int:
        """Items of a tile: 512 rows of weights each."""
        return self.inter_dim // 256

    @property
    def back_pairs(self) -> int:
        """Items of a tile in GEMM2: 512 columns each, the last perhaps half empty."""
        return -(-self.model_dim // 512)

    @property
    def partial_bytes(self) -> int:
        """From one weighted row to the next: a multiple of 16, so that 16 bytes are stored at a time."""
        if self.partials == "bf16":
            return 2 * self.model_dim
        return -(-(self.model_dim + self.model_dim // 32) // 16) * 16

    @property
    def row_bytes(self) -> int:
        return self.model_dim * limits.ROW_BYTES_PER_VALUE[self.body]

    @property
    def rows(self) -> int:
        """Of a rank's landing: what can come at most, or what was asked for; whole tiles."""
        routed = self.world_size * self.max_tokens * min(self.topk, self.experts)
        padding = min(self.experts, routed) * (self.tile_rows - 1)
        wanted = self.capacity or routed + padding
        return max(1, -(-wanted // self.tile_rows)) * self.tile_rows

    @property
    def max_tiles(self) -> int:
        return self.rows // self.tile_rows

    @property
    def max_routes(self) -> int:
        return self.max_tokens * self.topk

    @property
    def max_units(self) -> int:
        """That one rank sends."""
        return -(-self.max_routes // limits.UNIT_ROWS) + min(self.num_experts, self.max_routes)

    def check(self) -> None:
        """Raise for what the kernels cannot do, before any rank waits."""
        for name, value in (("model_dim", self.model_dim), ("inter_dim", self.inter_dim)):
            if value < 256 or value % 256:
                raise UnsupportedShape(f"{name}={value}: a multiple of 256 is needed")
        if self.body not in limits.BODIES:
            raise UnsupportedShape(f"body={self.body!r}: one of {', '.join(limits.BODIES)}")
        if self.tile_rows not in limits.TILE_ROWS:
            raise UnsupportedShape(f"tile_rows={self.tile_rows}: one of {limits.TILE_ROWS}")
        if not 1 <= self.world_size <= limits.MAX_RANKS or self.num_experts % self.world_size:
            raise UnsupportedShape(
                f"{self.num_experts} experts on {self.world_size} ranks: at most {limits.MAX_RANKS} ranks, "
                f"each with the same number"
            )
        if self.num_experts > limits.MAX_EXPERTS:
            raise UnsupportedShape(f"{self.num_experts} experts: at most {limits.MAX_EXPERTS}")
        if self.world_size * self.max_tokens > 1 << 24:
            raise UnsupportedShape(
                f"{self.world_size} ranks of {self.max_tokens} tokens: at most 2^24 tokens in all"
            )
        if not 1 <= self.topk <= 255:
            raise UnsupportedShape(f"topk={self.topk}: 1 to 255")
        most_pairs = max(self.pairs, self.back_pairs)
        if self.max_tiles > limits.MAX_TILES or most_pairs > limits.MAX_PAIRS:
            raise UnsupportedShape(
                f"{self.max_tiles} tiles of {most_pairs} items: at most {limits.MAX_TILES}, "
                f"{limits.MAX_PAIRS}"
            )


def offsets_of(shape: Shape) -> tuple[dict[str, int], int]:
    """(where each region begins, bytes in all)."""
    world, rows = shape.world_size, shape.rows
    sizes = {
        "told": 4 * world,
        "counts": 2 * world * (shape.num_experts + 1) * 4,
        "arrived": shape.experts * world * 4,
        "source": rows * 4,
        "weight": rows * 4,
        "row_scale": rows,
        "rows": rows * shape.row_bytes,
        "returned": 4 * world if shape.partials else 0,
        "partials": shape.max_routes * shape.partial_bytes if shape.partials else 0,
    }
    offset, offsets = 0, {}
    for name, nbytes in sizes.items():
        offsets[name] = offset
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, offset


@dataclass(frozen=True)
class LayerLayout(layout.Layout):
    """A whole layer's. The flags are words here (see the module), not those of the host target."""

    shape: Shape


def layout_for(problem: Problem, body: str) -> LayerLayout:
    """Of a layer of these sizes: landing memory for whatever the router may choose, tiles for even routing
    of as many tokens as there may be."""
    rows_per_expert = problem.num_ranks * problem.max_tokens * problem.topk / problem.num_experts
    shape = Shape(
        *(problem.num_ranks, problem.model_dim, problem.inter_dim, problem.num_experts, problem.topk),
        max_tokens=problem.max_tokens,
        body=body,
        tile_rows=limits.tile_rows_for(rows_per_expert),
        partials=problem.partial_format,
    )
    shape.check()
    offsets, nbytes = offsets_of(shape)
    ends = [*list(offsets.values())[1:], nbytes]
    regions = {
        name: layout.Region(offset, end - offset)
        for (name, offset), end in zip(offsets.items(), ends, strict=True)
    }
    return LayerLayout(problem, regions, nbytes, shape)
