"""CUDA C++ compiled when it is needed, kept on disk, launched through the driver.

    variant = Variant("mori-gemm-ar", Source.read(folder / "gemm.cu", [cuda_headers()]), ("-DHALVES=2",),
    "sm_90a")
    cubin = build(variant)                                      # from the cache, or compiled into it
    function = driver.Module(cubin).function("gemm_allreduce", shared_bytes=213_000)
    driver.PreparedLaunch(function, grid=132, block=384, args=[...]).launch(stream)

Where to read:  source.py (what a kernel consists of)   compilers.py (NVRTC, nvcc)   cache.py (the key, the
files)
                driver.py (modules, launches, tensor maps, stream operations)          resources.py (what a
                cubin uses)
`python -m mori_shmem.jit --help` fills a cache on a machine without a GPU.
"""

from __future__ import annotations

from pathlib import Path

from mori_shmem.jit.build import Variant, build
from mori_shmem.jit.source import Source

__all__ = ["Source", "Variant", "build", "cuda_headers"]


def cuda_headers() -> Path:
    """The folder of the device-side helpers, for a kernel's include path."""
    return Path(__file__).parent.parent / "device" / "cuda"
