# mypy: disable-error-code="import-untyped"
"""Every kernel of this target, by name: what is compiled ahead of time, and what the resource table lists.

M and K are arguments of kernels; what they are compiled for is n, the number of ranks, and the choices that a
name tells. A kernel that is not listed here is not shipped: test_rocm_resources.py compares with the sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mori_gemm_ar.options import PUBLISH, QUANTS
from mori_gemm_ar.targets.rocm import meet, pull, push, quantize, reduce
from mori_gemm_ar.targets.rocm.gemm import SHAPES
from mori_gemm_ar.targets.rocm.gemm_kernel import Product, gemm_kernel
from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.targets.rocm.runner import OUTPUT, PEERS, QUEUES


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    name: str
    kernel: Kernel
    arguments: Any  # the struct that it takes

    def compile(self) -> None:
        """Into FlyDSL's cache. Needs a linker and no GPU."""
        self.kernel.compile(self.arguments(**dict.fromkeys(self.arguments.__annotations__, 0)), 1)


def variants(n: int, num_ranks: int) -> Iterator[Variant]:
    """All of them for one n."""
    yield from _products(n)
    yield from _meetings(num_ranks)
    yield from _puts(n, num_ranks)
    yield from _rows(n, num_ranks)


def _products(n: int) -> Iterator[Variant]:
    for quant in QUANTS:
        for shape in SHAPES:
            for wire in (OUTPUT, QUEUES, PEERS):
                kernel = gemm_kernel(quant, n, shape, wire)
                yield Variant(f"gemm {quant} {shape} to {wire.name}", kernel, Product)


def _meetings(num_ranks: int) -> Iterator[Variant]:
    yield Variant("start", meet.starter(num_ranks), meet.Start)
    for name, what, tells in (
        ("partials, tell", meet.PARTIALS, True),
        ("partials", meet.PARTIALS, False),
        ("finished, tell", meet.FINISHED, True),
    ):
        yield Variant(f"meet {name}", meet.meeter(num_ranks, what, tells=tells), meet.Meet)


def _puts(n: int, num_ranks: int) -> Iterator[Variant]:
    yield Variant("scatter", push.scatterer(num_ranks, n), push.Scatter)
    for dtype in ("bf16", "fp8"):
        for verb, sends in (("send", True), ("await", False)):
            kernel = push.gatherer(num_ranks, n, fp8=dtype == "fp8", sends=sends)
            yield Variant(f"gather {dtype}, {verb}", kernel, push.Gather)


def _rows(n: int, num_ranks: int) -> Iterator[Variant]:
    for dtype in ("bf16", "fp8"):
        fp8 = dtype == "fp8"
        yield Variant(f"reduce to {dtype}", reduce.reducer(num_ranks, n, quantises=fp8), reduce.Sum)
        for publish in PUBLISH:
            kernel = reduce.pusher(num_ranks, n, quantises=fp8, publish=publish)
            yield Variant(f"reduce to {dtype} and push, {publish}", kernel, reduce.Push)
        yield Variant(f"pull {dtype}", pull.puller(num_ranks, n, fp8=fp8), pull.Pull)
    yield Variant("quantize", quantize.quantizer(n), quantize.Narrow)
    yield Variant("dequantize", quantize.dequantizer(n), quantize.Widen)
