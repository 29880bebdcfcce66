"""What each kernel takes of a compute unit, as compiled: resources.txt beside this file.

    python -m mori_gemm_ar.targets.rocm.resources            print the table
    python -m mori_gemm_ar.targets.rocm.resources --write    ... into resources.txt, when a kernel has changed

It compiles all of them, so it wants a linker: put `mori-sim run --` in front where there is no ROCm. The
table is for n=7168 and 8 ranks. A spill, or a byte of scratch, in any kernel is an error.

VGPR counts those that AGPR counts, too: one file of 512 per lane and SIMD serves both, in steps of 8. A CU
has 160 KiB of LDS and 4 SIMDs of at most 8 waves each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from mori_gemm_ar.targets.rocm.compile import compiles_into
from mori_gemm_ar.targets.rocm.compile_variants import Variant, variants

TABLE = Path(__file__).with_name("resources.txt")
N, NUM_RANKS = 7168, 8
LDS_BYTES, SIMDS, WAVES, REGISTERS, REGISTER_STEP = 160 * 1024, 4, 8, 512, 8


@dataclass(frozen=True)
class Resources:
    """One row."""

    kernel: str
    vgpr: int
    agpr: int
    sgpr: int
    lds_bytes: int
    scratch_bytes: int
    spills: int
    waves_per_simd: int


def resources_of(name: str, isa: str) -> Resources:
    """From the metadata at the end of a kernel's assembly."""

    def value(key: str) -> int:
        found = re.search(rf"^[\s-]+\.{key}:\s+(\d+)\s*$", isa, re.M)
        return int(found.group(1)) if found else 0

    vgpr, lds = value("vgpr_count"), value("group_segment_fixed_size")
    waves = value("max_flat_workgroup_size") // 64
    by_registers = REGISTERS // (-(-vgpr // REGISTER_STEP) * REGISTER_STEP)
    by_lds = LDS_BYTES // lds * waves // SIMDS if lds else WAVES
    return Resources(
        name,
        vgpr,
        value("agpr_count"),
        value("sgpr_count"),
        lds,
        value("private_segment_fixed_size"),
        value("vgpr_spill_count") + value("sgpr_spill_count"),
        min(WAVES, by_registers, max(1, by_lds)),
    )


def measured(num_workers: int | None = None) -> list[Resources]:
    """Every kernel, compiled anew."""
    workers = num_workers or min(4, len(os.sched_getaffinity(0)))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool,
    ):
        compiles_into(Path(folder) / "cache")
        count = sum(1 for _ in _all())
        return list(pool.map(_measure, range(count), [folder] * count))


def _all() -> Iterator[Variant]:
    return variants(N, NUM_RANKS)


def _measure(index: int, folder: str) -> Resources:
    variant = next(v for i, v in enumerate(_all()) if i == index)
    with tempfile.TemporaryDirectory(dir=folder) as dump:
        os.environ |= {"FLYDSL_DEBUG_DUMP_ASM": "1", "FLYDSL_DUMP_DIR": dump}
        with contextlib.redirect_stdout(io.StringIO()):  # FlyDSL tells where it wrote
            variant.compile()
        (assembly,) = Path(dump).rglob("*final_isa.s")
        return resources_of(variant.name, assembly.read_text(encoding="latin1"))


def table(rows: list[Resources]) -> str:
    """As resources.txt holds it."""
    titles = ("kernel", "VGPR", "AGPR", "SGPR", "LDS", "scratch", "spills", "waves/SIMD")
    width = max(len(row.kernel) for row in rows)
    lines = [titles, *(astuple(row) for row in rows)]
    text = (
        f"{name:{width}}"
        + "".join(f"{value:>{len(title) + 4}}" for value, title in zip(line, titles[1:], strict=True))
        for name, *line in lines
    )
    return "\n".join(line.rstrip() for line in text) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mori_gemm_ar.targets.rocm.resources", description="registers and LDS of every kernel"
    )
    parser.add_argument("--write", action="store_true", help="rewrite resources.txt")
    args = parser.parse_args(argv)
    rows = measured()
    if args.write:
        TABLE.write_text(table(rows))
    print(table(rows), end="")
    bad = [row.kernel for row in rows if row.spills or row.scratch_bytes]
    if bad:
        print(f"spills or scratch in: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
