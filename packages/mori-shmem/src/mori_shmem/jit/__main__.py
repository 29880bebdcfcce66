"""Fill a cache with compiled kernels, on any machine:

    python -m mori_shmem.jit --cache-dir DIR mori_gemm_ar.targets.cuda.variants [--compiler nvcc] [--report]

Each module named offers `VARIANTS`, an iterable of (name, Variant). Ship DIR and set MORI_JIT_CACHE_DIR to
it: a run with
the same package versions and compiler then compiles nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from mori_shmem.jit import resources
from mori_shmem.jit.build import build
from mori_shmem.jit.cache import Cache
from mori_shmem.jit.compilers import compiler_named


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mori_shmem.jit", description="compile kernels ahead of time into a cache"
    )
    parser.add_argument("modules", nargs="+", help="modules that offer VARIANTS")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--compiler", choices=("nvrtc", "nvcc"), default="nvrtc")
    parser.add_argument("--report", action="store_true", help="print registers and stack of each kernel")
    args = parser.parse_args(argv)
    compiler, cache = compiler_named(args.compiler), Cache(args.cache_dir)
    for module in args.modules:
        for name, variant in importlib.import_module(module).VARIANTS:
            start = time.monotonic()
            cubin = build(variant, compiler=compiler, cache=cache)
            if not cache.path(variant.key(compiler)).is_file():
                return 1  # the cache has said why
            line = f"{name}: {len(cubin)} bytes, {time.monotonic() - start:.1f} s"
            if args.report:
                used = resources.kernels_of(cubin)
                line += "".join(
                    f", {k} {u.registers} registers, {u.stack_bytes} bytes of stack" for k, u in used.items()
                )
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
