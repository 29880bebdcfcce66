"""The compiled variants: GEMM1 for each body, tile and way to wait; GEMM2 for each body, tile and form of
what it sends back; what comes before, between and after them.

    python -m mori_shmem.jit --cache-dir DIR mori_megamoe.targets.cuda.variants --report

compiles them ahead of time, on any machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from mori_shmem.jit import Source, Variant, cuda_headers

from mori_megamoe.targets.cuda import limits

ARCH = "sm_90a"
PACKAGE = "mori-megamoe"
BODIES = {"A": 0, "R": 1}
PARTIALS = {"bf16": 0, "fp8_blockwise_1x32": 1}
WAITS = {"never": 0, "signals": 1, "queue": 2}


@functools.cache
def _source(name: str) -> Source:
    return Source.read(Path(__file__).parent / name, [cuda_headers()])


def gemm1_variant(body: str, tile_rows: int, wait: str = "never", *, sums: bool = False) -> Variant:
    """`gemm1`, or `stage1` where it waits. sums: the fp32 sums too, for tests."""
    flags = (f"-DBODY={BODIES[body]}", f"-DTILE_ROWS={tile_rows}", f"-DWAIT={WAITS[wait]}")
    return Variant(PACKAGE, _source("gemm1.cu"), (*flags, "-DSUMS=1") if sums else flags, ARCH)


def prepare_variant(body: str, *, quantised: bool) -> Variant:
    """`prepare` and `operand_rows`, from bf16 or from codes and scales."""
    flags = (f"-DBODY={BODIES[body]}", f"-DQUANTISED={int(quantised)}")
    return Variant(PACKAGE, _source("prepare.cu"), flags, ARCH)


def dispatch_variant() -> Variant:
    """`dispatch`, and `pack`."""
    return Variant(PACKAGE, _source("dispatch.cu"), (), ARCH)


def hidden_variant(body: str) -> Variant:
    """What comes before GEMM2."""
    return Variant(PACKAGE, _source("hidden.cu"), (f"-DBODY={BODIES[body]}",), ARCH)


def gemm2_variant(body: str, tile_rows: int, partials: str) -> Variant:
    flags = (f"-DBODY={BODIES[body]}", f"-DTILE_ROWS={tile_rows}", f"-DPARTIALS={PARTIALS[partials]}")
    return Variant(PACKAGE, _source("gemm2.cu"), flags, ARCH)


def combine_variant(partials: str) -> Variant:
    return Variant(PACKAGE, _source("combine.cu"), (f"-DPARTIALS={PARTIALS[partials]}",), ARCH)


def _all() -> Iterator[tuple[str, Variant]]:
    for body in BODIES:
        for tile_rows in limits.TILE_ROWS:
            for wait in WAITS:
                yield f"gemm1-{body}-{tile_rows}-{wait}", gemm1_variant(body, tile_rows, wait)
        yield f"gemm1-{body}-128-sums", gemm1_variant(body, 128, sums=True)
        for quantised in (False, True):
            name = f"prepare-{body}-{'codes' if quantised else 'bf16'}"
            yield name, prepare_variant(body, quantised=quantised)
        for partials in PARTIALS:
            for tile_rows in limits.TILE_ROWS:
                yield f"gemm2-{body}-{tile_rows}-{partials}", gemm2_variant(body, tile_rows, partials)
        yield f"hidden-{body}", hidden_variant(body)
    yield "dispatch", dispatch_variant()
    for partials in PARTIALS:
        yield f"combine-{partials}", combine_variant(partials)


VARIANTS = tuple(_all())
