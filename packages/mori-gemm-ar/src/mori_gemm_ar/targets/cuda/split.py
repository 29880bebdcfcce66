"""The GEMM as one kernel and the all-reduce behind it, as steps on one stream: the split modes, and what
small calls of a fused op may do instead (`one-stage`).

    step        by            what
    gemm        gemm.cu       my partial sums into C
    reduce      split.cu      my slice of everybody's C; one-stage: all rows, and nothing more
    quantize    split.cu      fp8, unless it is part of the reduction (fuse_quantize)
    gather      copy engines  sdma: my slice (fp8: codes and scales) to every peer, then a word that says so
    dequantize  split.cu      sdma, fp8: what came
    pull        split.cu      lsa: peers' slices, fp8: widened on the way

The flags of `reduce` and `pull` are told in split.cu. By copy engine: r sets slice_here[r] of every peer
behind its copies, waits for its own words, and clears them, all by the stream's front end, so nothing depends
on the call. slice_here of the next call cannot come before r has cleared this one's: it comes behind the next
reduction of that peer, which waits for r's c_ready, which r tells behind the clearing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

from mori_shmem.jit import Source, Variant, build, cuda_headers, driver

from mori_gemm_ar.targets.cuda.launch import Call, Mark, unmarked
from mori_gemm_ar.targets.cuda.regions import Regions
from mori_gemm_ar.targets.cuda.split_params import SplitParams

_THREADS = 512
_NAMES = (
    *["sum_slice", "sum_slice_quantised", "sum_slice_quietly", "quantise", "sum_all"],
    *["pull", "pull_codes", "widen"],
)


@functools.cache
def split_variant() -> Variant:
    """All kernels of split.cu."""
    source = Source.read(Path(__file__).parent / "split.cu", [cuda_headers()])
    return Variant("mori-gemm-ar", source, (), "sm_90a")


@functools.cache
def split_kernels(device: int) -> dict[str, driver.Function]:
    """Loaded once a process and device."""
    module = driver.Module(build(split_variant()))
    if module.constant("split_params_bytes") != ctypes.sizeof(SplitParams):
        raise RuntimeError("split_params.py and split.cuh must hold the same fields")
    return {name: module.function(name) for name in _NAMES}


class Split:
    """One shape's steps on one rank."""

    def __init__(
        self,
        product: Call,
        regions: Regions,
        bases: Sequence[int],
        rank: int,
        kernels: dict[str, driver.Function],
        *,
        one_stage: bool = False,
        pulls: bool = True,
        fp8: bool = False,
        row_scale: bool = False,
        fuse_quantize: bool = False,
        grid: int = 132,
        pull_grid: int = 132,
        fault: int,
        timeout_s: float,
    ) -> None:
        self.product = product
        self.is_one_kernel = False
        self._regions, self._bases, self._rank = regions, bases, rank
        self._peers = [(rank + d) % len(bases) for d in range(1, len(bases))]
        self._one_stage, self._pulls, self._fp8 = one_stage, pulls, fp8
        height = -(-product.m // len(bases))
        self._start = [min(product.m, r * height) for r in range(len(bases) + 1)]
        self._row_scale, self._groups = row_scale, 1 if row_scale else -(-product.n // 128)
        self._params = self._make_params(fault, timeout_s)
        if one_stage:
            kinds = [("reduce", "sum_all", grid)]
        elif not fp8:
            kinds = [("reduce", "sum_slice", grid)]
        elif fuse_quantize:
            kinds = [("reduce", "sum_slice_quantised", grid)]
        else:
            kinds = [("reduce", "sum_slice_quietly", grid), ("quantize", "quantise", grid)]
        if pulls and not one_stage:
            kinds.append(("pull", "pull_codes" if fp8 else "pull", pull_grid))
        self._kernels = [(phase, self._prepared(kernels[name], blocks)) for phase, name, blocks in kinds]
        self._widen = self._prepared(kernels["widen"], grid)

    def _prepared(self, function: driver.Function, grid: int) -> driver.PreparedLaunch:
        """No more blocks than there are rows or pieces of work for."""
        columns = self.product.m * self.product.n // 8
        most = max(1, -(-columns // _THREADS))
        return driver.PreparedLaunch(function, min(grid, most), _THREADS, [self._params])

    def _make_params(self, fault: int, timeout_s: float) -> SplitParams:
        p, at, me = SplitParams(), self._regions, self._rank
        p.nbytes, p.n, p.world, p.rank = ctypes.sizeof(p), self.product.n, len(self._bases), me
        p.start[: len(self._start)] = self._start
        p.row_scale, p.groups = self._row_scale, self._groups
        for r, base in enumerate(self._bases):
            p.c[r], p.out[r] = base + at.offsets["c"], base + at.offsets["out"]
            p.codes[r], p.scales[r] = base + at.offsets["codes"], base + at.offsets["scales"]
            p.tell_c[r], p.tell_slice[r] = self._word("c_ready", r, me), self._word("slice_ready", r, me)
        p.heard_c, p.heard_slice = self._word("c_ready", me, 0), self._word("slice_ready", me, 0)
        p.step, p.exits = self._word("split_step", me, 0), self._word("split_exits", me, 0)
        p.fault, p.timeout_ns = fault, int(timeout_s * 1e9)
        return p

    def _word(self, name: str, holder: int, source: int) -> int:
        return self._bases[holder] + self._regions.offsets[name] + 4 * source

    def enqueue(self, stream: int, mark: Mark = unmarked) -> None:
        """Everything of one call, ordered after what `stream` holds and before what follows on it."""
        self.product.enqueue(stream, mark)
        for phase, kernel in self._kernels:
            kernel.launch(stream)
            mark(phase)
        if not self._pulls and not self._one_stage:
            self._push(stream)
            mark("gather")
            if self._fp8:
                self._widen.launch(stream)
                mark("dequantize")

    def _push(self, stream: int) -> None:
        """My slice to every peer by copy engine, until theirs are here."""
        for peer in self._peers:
            for dst, src, nbytes in self._runs_to(peer):
                driver.stream_copy(stream, dst, src, nbytes)
            driver.stream_write(stream, self._word("slice_here", peer, self._rank), 1)
        for peer in self._peers:
            driver.stream_wait(stream, self._word("slice_here", self._rank, peer), 1)
        driver.stream_fill(stream, self._word("slice_here", self._rank, 0), 0, len(self._bases))

    def _runs_to(self, peer: int) -> list[tuple[int, int, int]]:
        first, last = self._start[self._rank], self._start[self._rank + 1]
        n = self.product.n
        row_bytes = {"codes": n, "scales": 4 * self._groups} if self._fp8 else {"out": 2 * n}
        mine, theirs = self._bases[self._rank], self._bases[peer]
        runs = []
        for region, nbytes in row_bytes.items():
            offset = self._regions.offsets[region] + first * nbytes
            runs.append((theirs + offset, mine + offset, (last - first) * nbytes))
        return [run for run in runs if run[2]]
