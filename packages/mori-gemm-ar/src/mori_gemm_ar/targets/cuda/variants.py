"""The compiled variants of the GEMM kernel: scales x tile x what is gathered.

256 x 128 is the tile of choice from M of a few hundred rows on; 128 x 128 wastes less where slices are short.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from mori_shmem.jit import Source, Variant, cuda_headers

ARCH = "sm_90a"
PACKAGE = "mori-gemm-ar"
SCALES = {"blockscale": 0, "ptpc": 1, "mxfp8": 2}
TILE_ROWS = (256, 128)


@functools.cache
def _source() -> Source:
    return Source.read(Path(__file__).parent / "gemm.cu", [cuda_headers()])


def variant(quant: str, tile_rows: int, *, fp8_gather: bool) -> Variant:
    """One of them."""
    flags = (f"-DSCALES={SCALES[quant]}", f"-DHALVES={tile_rows // 128}", f"-DFP8_GATHER={int(fp8_gather)}")
    return Variant(PACKAGE, _source(), flags, ARCH)


def _all() -> Iterator[tuple[str, Variant]]:
    for quant in SCALES:
        for tile_rows in TILE_ROWS:
            for fp8_gather in (False, True):
                name = f"{quant}-{tile_rows}x128-{'fp8' if fp8_gather else 'bf16'}"
                yield name, variant(quant, tile_rows, fp8_gather=fp8_gather)


VARIANTS = tuple(_all())
