"""One package per target. Each offers the same things, to be read side by side; see `target_for`."""

from __future__ import annotations

import importlib
from types import ModuleType

from mori_shmem.errors import ArgumentError, TransportInert

TARGETS = {
    "host": "mori_gemm_ar.targets.host",
    "cuda": "mori_gemm_ar.targets.cuda",
    "rocm": "mori_gemm_ar.targets.rocm",
}


def target_name(backend: str, kernels: str) -> str:
    """What `target_for` takes for a choice of kernels on a backend."""
    target_for(backend)
    if (backend, kernels) == ("rocm", "triton"):
        raise ArgumentError(
            "kernels='triton' on backend 'rocm': the Triton kernels have never run there; they are for host "
            "and cuda. Leave kernels (MORI_GEMM_AR_KERNELS) unset, or 'own'"
        )
    return backend if kernels == "own" else kernels


def target_for(backend: str) -> ModuleType:
    """The module that runs plans on a communicator's backend, or "triton" (see target_name). It has
    Runner            one op's buffers and flags on this rank: `run(plan, call, partials)`; `ready(plan,
                      partials)`, what spares later calls that look alike, or None; `ran(m)`; `close()`
    Gemm              the matrix product band by band: `partials(a, b, a_grid, b_grid)`
    MAX_BAND_ROWS     rows of a band, ROW_MULTIPLE what padded_m rounds up to
    layout_for(...)   what lies where in the window, with its size as `nbytes`
    DEFAULT_PULL_BLOCKS
    DEFAULT_CHUNKS, DEFAULT_GATHER_SCALE
    IDLE_OPTIONS      options that mean nothing here, each with the reason
    profitable_m(...) rows from which fusing pays
    refuses(...)      the reasons against a combination of options on this target
    why_not(...)      the reason against a problem on this target, or None
    """
    if backend == "triton":
        return importlib.import_module("mori_gemm_ar.targets.triton")
    if backend not in TARGETS:
        raise TransportInert(
            f"backend {backend!r} is not part of this version of mori-gemm-ar; it has: {', '.join(TARGETS)}"
        )
    try:
        return importlib.import_module(TARGETS[backend])
    except ModuleNotFoundError as missing:
        if missing.name != "flydsl":
            raise
        raise TransportInert(
            f"backend {backend!r} compiles its kernels with flydsl 0.5.0, which is not installed: "
            "pip install 'mori-gemm-ar[rocm]'"
        ) from missing
