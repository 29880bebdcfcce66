"""The compiled variants: a GEMM for each body, tile and way to wait; what prepares and sends for each body.

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
    return Variant(PACKAGE, _source("dispatch.cu"), (), ARCH)


def _all() -> Iterator[tuple[str, Variant]]:
    for body in BODIES:
        for tile_rows in limits.TILE_ROWS:
            for wait in WAITS:
                yield f"gemm1-{body}-{tile_rows}-{wait}", gemm1_variant(body, tile_rows, wait)
        yield f"gemm1-{body}-128-sums", gemm1_variant(body, 128, sums=True)
        for quantised in (False, True):
            name = f"prepare-{body}-{'codes' if quantised else 'bf16'}"
            yield name, prepare_variant(body, quantised=quantised)
    yield "dispatch", dispatch_variant()


VARIANTS = tuple(_all())
