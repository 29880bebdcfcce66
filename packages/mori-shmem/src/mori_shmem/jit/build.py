"""From a variant to a cubin: settings, compiler, cache."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from mori_shmem.jit.cache import Cache, key_of
from mori_shmem.jit.compilers import Compiler, compiler_named
from mori_shmem.jit.source import Source
from mori_shmem.settings import Setting, SettingsTable

TABLE = SettingsTable("mori-shmem jit")
COMPILER = TABLE.add(
    Setting(
        "MORI_JIT_COMPILER", "nvrtc", choices=("nvrtc", "nvcc"), doc="what compiles CUDA kernels at run time"
    )
)
CACHE = TABLE.add(
    Setting("MORI_JIT_CACHE", True, doc="keep compiled kernels on disk", same_on_all_ranks=False)
)
CACHE_DIR = TABLE.add(
    Setting(
        "MORI_JIT_CACHE_DIR",
        "~/.cache/mori/jit",
        doc="where compiled kernels are kept",
        same_on_all_ranks=False,
    )
)


@dataclass(frozen=True)
class Variant:
    """One cubin: a kernel's source with its compile-time choices, for an architecture ("sm_90a")."""

    package: str  # distribution whose version is part of the key
    source: Source
    flags: tuple[str, ...]
    arch: str

    def key(self, compiler: Compiler) -> str:
        """Of the cubin that `compiler` makes of it."""
        return key_of(
            self.source,
            flags=self.flags,
            arch=self.arch,
            compiler=compiler.name,
            compiler_version=compiler.version,
            package=self.package,
            package_version=_version_of(self.package),
        )


@functools.cache
def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


@functools.cache
def _cache_in(folder: str) -> Cache:
    """One a folder and process, so that a warning comes once."""
    try:
        return Cache(Path(folder).expanduser())
    except RuntimeError:  # no home at all
        return Cache(Path("/nonexistent/mori-jit"))


def build(variant: Variant, *, compiler: Compiler | None = None, cache: Cache | None = None) -> bytes:
    """The variant's cubin. Without `compiler` and `cache` the settings choose them."""
    values = TABLE.read({})
    if compiler is None:
        compiler = compiler_named(values[COMPILER])
    if cache is None:
        cache = _cache_in(values[CACHE_DIR]) if values[CACHE] else Cache(None)
    chosen = compiler
    return cache.get(variant.key(chosen), lambda: chosen.compile(variant.source, variant.flags, variant.arch))
