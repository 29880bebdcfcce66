"""The fused GEMM + all-reduce: tile, chunks, queues, reduce grid, pull blocks, bands.

A mode has only the parameters that its phases read on that backend, so that no sweep measures the same thing
twice:

    parameter       backend     where               what it is
    tile            rocm        every mode          rows x columns x depth of a workgroup's tile
    chunks          host, rocm  fused-sdma          puts per destination; each is a whole number of row bands
    sdma_queues     rocm        sdma carries        copy queues to each peer
    reduce_blocks   rocm        ranks meet          grid of the reduction
    pull_blocks     all         gather by lsa; of   pieces of a pull (host), or blocks that pull: throttles
                                cuda's, split-lsa   the outstanding remote requests
    gather_bands    rocm        gather by sdma      pieces in which reduced rows leave early; 0 = all at once
    band_rows       cuda        fused modes         rows of a band, which is signalled, or copied, as one
    lag             cuda        fused-lsa by lsa    bands that local tiles stay behind remote ones

What cuda leaves out, and why: a fused call is one persistent kernel, so it has no reduction grid and pulls
nothing; what engines copy is told by its rows, since each copy costs as much whatever the call. The tile
follows from the slice: 256 x 128 from 512 rows on (2x H200, N=7168, K=2048: 111, 208, 402 us against 118,
223, 436 at M = 4096, 8192, 16384), 128 x 128 below, where whole tiles waste more. More than one pair of
copy queues a peer is 12 % slower, one band of lag 5 %. With all of these a sweep of fused-sdma had 480
candidates, of which 4 differ in what they do.

On the host queues are threads of the same cores, and the reduction reads rows where they lie: what is left is
chunks and pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mori_tune.errors import SpaceError
from mori_tune.spaces.hardware import Hardware, split_workers
from mori_tune.spaces.space import Constraint, Parameter, Space, Value

MODES = ("gemm-only", "split-sdma", "fused-sdma", "split-lsa", "fused-lsa")
TILES = {  # by backend; the first is what runs untuned
    "host": (),  # torch chooses there
    "cuda": (),  # follows from the slice, see the top
    "rocm": ("256x256x128", "128x256x128", "256x128x128", "128x128x128"),
}
GRIDS = ("reduce_blocks", "pull_blocks")
PIPELINE_STAGES = 2  # the least that hides a load behind a multiplication
REDUCE_BLOCKS = (24, 64, 128, 256)
PULL_BLOCKS = (32, 48, 64, 80, 128)
HOST_PULL_BLOCKS = (4, 16, 64)
CUDA_PULL_BLOCKS = (32, 64, 96, 132)
BAND_ROWS = (256, 512, 768, 1024)  # of tiles that SMs push
COPIED_ROWS = (256, 512, 1024, 2048, 4096)  # of what a copy engine takes at a time
MOST_COPIES = 16  # of a slice: with 16 in place of 4 fused-sdma took 931 us, not 767 (2x H200, M=16384)
LAGS = (2, 3, 4)


@dataclass(frozen=True)
class GemmArShape:
    """What the constraints need to know of the call; `m` rows in all, a destination owns m / num_ranks."""

    m: int
    num_ranks: int
    mode: str
    backend: str
    gather_dtype: str = "bf16"
    gather_transport: str | None = None  # None: as the op chooses by itself
    element_bytes: int = 1
    band_rows: int = 256  # of one row band, where the tile does not say
    overlapped: bool = False  # the reduction runs inside the GEMM's grid and takes workers from it

    @property
    def communicates(self) -> bool:
        return self.mode != "gemm-only"

    @property
    def transport(self) -> str | None:
        """How finished rows travel; None where nothing does."""
        if not self.communicates:
            return None
        pulled = self.gather_dtype == "fp8" or self.mode.endswith("-lsa")
        return self.gather_transport or ("lsa" if pulled else "sdma")

    def num_bands(self, values: Mapping[str, Any]) -> int:
        """Row bands of one destination."""
        band_rows = tile_of(values["tile"])[0] if "tile" in values else self.band_rows
        return max(1, -(-self.slice_rows // band_rows))

    @property
    def slice_rows(self) -> int:
        """Rows that one destination owns."""
        return -(-self.m // self.num_ranks)

    @property
    def band_choices(self) -> tuple[int, ...]:
        """Rows of a band to try, where calls go band by band; else none."""
        if self.backend != "cuda" or not self.mode.startswith("fused"):
            return ()
        return BAND_ROWS if self.pushes else COPIED_ROWS

    @property
    def pushes(self) -> bool:
        """Whether SMs push tiles as they are finished, both ways, and no copy engine takes part."""
        return self.mode == "fused-lsa" and self.transport == "lsa"


def tile_of(text: str) -> tuple[int, int, int]:
    """ "256x128x128" as (rows, columns, depth)."""
    parts = text.split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise SpaceError(f"tile {text!r}: wanted ROWSxCOLUMNSxDEPTH, for example 128x128x128")
    rows, columns, depth = map(int, parts)
    return rows, columns, depth


def loader_refuses(shape: GemmArShape) -> Callable[[Mapping[str, Any], Hardware], str | None]:
    def refuses(values: Mapping[str, Any], hardware: Hardware) -> str | None:
        rows, columns, depth = tile_of(values["tile"])
        for side, name in ((rows, "rows"), (columns, "columns")):
            nbytes = side * depth * shape.element_bytes
            left = nbytes % hardware.loader_bytes
            if left:
                size = f"{side} {name} x {depth} x {shape.element_bytes} bytes = {nbytes}"
                return f"{size}, of which the loader's steps of {hardware.loader_bytes} leave {left}"
        return None

    return refuses


def shared_memory_refuses(shape: GemmArShape) -> Callable[[Mapping[str, Any], Hardware], str | None]:
    def refuses(values: Mapping[str, Any], hardware: Hardware) -> str | None:
        rows, columns, depth = tile_of(values["tile"])
        nbytes = PIPELINE_STAGES * (rows + columns) * depth * shape.element_bytes
        if nbytes > hardware.shared_bytes:
            return f"{PIPELINE_STAGES} stages take {nbytes} bytes of {hardware.shared_bytes}"
        return None

    return refuses


def chunks_refuse(shape: GemmArShape) -> Callable[[Mapping[str, Any], Hardware], str | None]:
    def refuses(values: Mapping[str, Any], hardware: Hardware) -> str | None:
        bands = shape.num_bands(values)
        if bands % values.get("chunks", 1):
            return f"{bands} row bands of a destination do not divide into {values['chunks']} chunks"
        return None

    return refuses


def bands_refuse(shape: GemmArShape) -> Callable[[Mapping[str, Any], Hardware], str | None]:
    """One band is as good as a larger one, and local tiles cannot stay behind more bands than there are."""

    def refuses(values: Mapping[str, Any], hardware: Hardware) -> str | None:
        if "band_rows" not in values:
            return None
        smaller = [rows for rows in shape.band_choices if shape.slice_rows <= rows < values["band_rows"]]
        if smaller:
            return f"a destination's {shape.slice_rows} rows are one band of {smaller[0]} already"
        bands = -(-shape.slice_rows // values["band_rows"])
        if bands > MOST_COPIES and not shape.pushes:
            return f"{bands} copies of a destination's rows: more than {MOST_COPIES} only cost"
        if values.get("lag", 0) > max(bands, LAGS[0]):
            return f"a lag of {values['lag']} with {bands} bands is the same as one of {bands}"
        return None

    return refuses


def workers_refuse(shape: GemmArShape) -> Callable[[Mapping[str, Any], Hardware], str | None]:
    def refuses(values: Mapping[str, Any], hardware: Hardware) -> str | None:
        if not shape.overlapped or "reduce_blocks" not in values:
            return None
        try:
            split_workers(hardware.compute_units, values["reduce_blocks"])
        except SpaceError as error:
            return str(error)
        return None

    return refuses


def chunk_choices(shape: GemmArShape) -> Callable[[Hardware, Mapping[str, Any]], Iterable[Value]]:
    """One chunk, and the three largest divisors of the bands up to 8; smaller copies no longer pay."""

    def choices(hardware: Hardware, chosen: Mapping[str, Any]) -> list[Value]:
        bands = shape.num_bands(chosen)
        divisors = [c for c in range(2, 9) if bands % c == 0]
        return [1, *divisors[-3:]]

    return choices


def parameters_of(shape: GemmArShape) -> tuple[Parameter, ...]:
    tiles, found = TILES[shape.backend], []
    if tiles:
        found.append(Parameter("tile", tiles, tiles[:1]))
    if shape.mode == "fused-sdma" and shape.backend != "cuda":
        found.append(Parameter("chunks", chunk_choices(shape)))
    if shape.band_choices:
        quick = shape.band_choices[:2] if shape.pushes else shape.band_choices[2:4]
        found.append(Parameter("band_rows", shape.band_choices, quick))
    if shape.band_choices and shape.pushes:
        found.append(Parameter("lag", LAGS, LAGS[:2]))
    if shape.backend == "host" and shape.transport == "lsa":
        found.append(Parameter("pull_blocks", HOST_PULL_BLOCKS, HOST_PULL_BLOCKS[::2]))
    if shape.backend == "cuda" and shape.mode == "split-lsa" and shape.transport == "lsa":
        found.append(Parameter("pull_blocks", CUDA_PULL_BLOCKS, CUDA_PULL_BLOCKS[1::2]))
    return (*found, *(rocm_parameters(shape) if shape.backend == "rocm" else ()))


def rocm_parameters(shape: GemmArShape) -> Iterator[Parameter]:
    """What only kernels of their own for each phase have."""
    if shape.transport == "sdma" or shape.mode.endswith("sdma"):
        yield Parameter("sdma_queues", (1, 2), (1,))
    if shape.communicates:
        yield Parameter("reduce_blocks", REDUCE_BLOCKS, REDUCE_BLOCKS[::2])
    if shape.transport == "lsa":
        yield Parameter("pull_blocks", PULL_BLOCKS, PULL_BLOCKS[::2])
    if shape.transport == "sdma" and shape.gather_dtype == "bf16":
        yield Parameter("gather_bands", (0, 4, 16), (0,))


def grid_size(values: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(
        int(values.get(name, 0))
        for name in (*GRIDS, "sdma_queues", "chunks", "gather_bands", "lag", "band_rows")
    )


def gemm_ar_space(hardware: Hardware, shape: GemmArShape) -> Space:
    if shape.mode not in MODES:
        raise SpaceError(f"mode {shape.mode!r}: wanted one of {', '.join(MODES)}")
    if shape.backend not in TILES:
        raise SpaceError(f"backend {shape.backend!r}: wanted one of {', '.join(TILES)}")
    constraints = [
        Constraint("chunks", chunks_refuse(shape)),
        Constraint("bands", bands_refuse(shape)),
        Constraint("workers", workers_refuse(shape)),
    ]
    if TILES[shape.backend]:
        constraints.append(Constraint("tile", loader_refuses(shape)))
        constraints.append(Constraint("shared memory", shared_memory_refuses(shape)))
    return Space(f"gemm-ar-{shape.mode}", hardware, parameters_of(shape), tuple(constraints), grid_size)
