"""Fill a cache with this target's kernels, on any machine:

    python -m mori_gemm_ar.targets.rocm.compile --cache-dir DIR -n 7168 [--world-size 8] [--quant blockscale]

M and K do not matter: kernels take them at run time. Ship DIR, and run with
    FLYDSL_RUNTIME_CACHE_DIR=DIR FLYDSL_RUNTIME_RUN_ONLY=1
With the same versions of this package and of flydsl nothing is compiled then, and nothing can be: a kernel
that is missing is an error that says so.

Compiling takes an LLVM ld.lld below $ROCM_PATH/llvm/bin. Where there is no ROCm, mori-sim brings one: put
`mori-sim run --` in front of the command. FlyDSL's keys cover the device bitcode below $ROCM_PATH/amdgcn,
which no kernel of ours uses: where a machine that runs has other bitcode than the one that compiled, let
ROCM_PATH name a folder without any (run-only needs neither linker nor bitcode).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from mori_gemm_ar.options import QUANTS

ARCH = "gfx950"


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mori_gemm_ar.targets.rocm.compile",
        description="compile kernels ahead of time into a cache",
    )
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("-n", type=int, nargs="+", required=True, help="columns of C: kernels for each")
    parser.add_argument("--world-size", type=int, nargs="+", default=[8])
    parser.add_argument("--quant", choices=QUANTS, nargs="+", default=list(QUANTS))
    parser.add_argument("--only", default="", help="kernels whose name in resources.txt begins like this")
    args = parser.parse_args(argv)
    compiles_into(args.cache_dir)
    from mori_gemm_ar.targets.rocm.compile_variants import variants

    done: set[str] = set()  # by what was compiled: kernels of several n or world sizes may be the same code
    for n in args.n:
        for num_ranks in args.world_size:
            for variant in variants(n, num_ranks):
                quant = variant.name.split()[1] if variant.name.startswith("gemm ") else None
                wanted = quant in (None, *args.quant) and variant.name.startswith(args.only)
                if not wanted or variant.kernel.compiled in done:
                    continue
                start = time.monotonic()
                variant.compile()
                done.add(variant.kernel.compiled)
                seconds = time.monotonic() - start
                print(f"n={n}, {num_ranks} ranks: {variant.name}: {seconds:.1f} s", flush=True)
    stored = sum(1 for _ in args.cache_dir.rglob("*.pkl"))
    print(f"{len(done)} kernels compiled, {stored} in {args.cache_dir}")
    return 0 if done and stored >= len(done) else 1


def compiles_into(cache_dir: Path) -> None:
    """FlyDSL compiles for this target's architecture, launches nothing, and keeps the result there."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "COMPILE_ONLY": "1",
        "ARCH": ARCH,
        "FLYDSL_GPU_ARCH": ARCH,
        "FLYDSL_RUNTIME_CACHE_DIR": str(cache_dir),
    }


if __name__ == "__main__":
    sys.exit(main())
