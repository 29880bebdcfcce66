"""Builds the cuda target's kernels for the CPU, so that what they compute can be tested anywhere.

As mori-ep's tests do (on_cpu/emulator.py: each `asm` statement replaced by C++ that says the same, a block a
thread of the host, its threads fibers), with clusters, mbarriers, bulk copies and matrix instructions added
(cuda_on_cpu.h, which takes the place of async.cuh and mma.cuh).
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mori_megamoe.targets import cuda
from mori_shmem.jit import Source, cuda_headers
from mori_shmem.jit.driver import TensorMap

HERE = Path(__file__).parent
FIBERS = HERE.parent.parent / "mori-ep" / "tests" / "on_cpu"
KERNELS = Path(cuda.__file__).parent
TABLE = (  # instruction -> C++; looked up in front of mori-ep's
    ("ex2.approx.f32", "{o[0]} = power_by_sums({i[0]})"),
    ("rcp.approx.ftz.f32", "{o[0]} = about_reciprocal({i[0]})"),
    ("max.NaN.f32", "{o[0]} = larger_or_nan({i[0]}, {i[1]})"),
    ("min.NaN.f32", "{o[0]} = -larger_or_nan(-({i[0]}), -({i[1]}))"),
    ("mul.rn.bf16x2", "{o[0]} = times_bf16({i[0]}, {i[1]})"),
    ("cvt.rn.satfinite.e4m3x2.f32", "{o[0]} = two_e4m3({i[1]}, {i[0]})"),
    ("cvt.rn.f16x2.e4m3x2", "{o[0]} = halves_of({i[0]})"),
    ("cvt.f32.f16 %0, l", "{o[0]} = half_value({i[0]} & 0xffff)"),
    ("cvt.f32.f16 %0, h", "{o[0]} = half_value({i[0]} >> 16)"),
    ("ld.global.v4.u32", "v = *{i[0]}"),
    ("ld.acquire.sys.global.u64", "{o[0]} = look_long({i[0]})"),
    ("ld.acquire.gpu.global.u64", "{o[0]} = look_long({i[0]})"),
    ("st.release.sys.global.u64", "__atomic_store_n({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    ("st.release.gpu.global.u64", "__atomic_store_n({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    ("red.release.sys.global.add.u64", "__atomic_fetch_add({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    ("red.release.gpu.global.add.u64", "__atomic_fetch_add({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
)
REPLACED = ("async.cuh", "mma.cuh", "types.cuh")
SHARED = re.compile(r"extern __shared__ .*? (\w+)\[\];")


def _emulator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_cpu_emulator", FIBERS / "emulator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TABLE = TABLE + module.TABLE
    return module


_CPU_SOURCE = _emulator().cpu_source


class Library:
    """One source file. `kernels`: name -> types of its parameters. `tests`: C++ behind the kernels."""

    def __init__(
        self,
        name: str,
        flags: Sequence[str] = (),
        kernels: dict[str, list[str]] | None = None,
        tests: str = "",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mori-megamoe-cpu-")
        folder = Path(self._folder.name)
        for file, text in Source.read(KERNELS / name, [cuda_headers()]).files:
            text = '#include "cuda_on_cpu.h"\n' if file in REPLACED else _CPU_SOURCE(text)
            (folder / file).write_text(SHARED.sub(r"uint8_t* \1 = shared_base();", text))
        doors = "".join(_door(kernel, types) for kernel, types in (kernels or {}).items())
        (folder / "cpu.cpp").write_text(
            f'#include <stdio.h>\n#include "cuda_on_cpu.h"\n#include "{name}"\n{doors}{tests}'
        )
        made = folder / "cpu.so"
        command = [
            "g++",
            "-std=c++17",
            "-O2",
            "-g0",
            "-shared",
            "-fPIC",
            "-pthread",
            "-w",
            "-ffp-contract=off",
            "-fno-gnu-unique",
        ]
        paths = [f"-I{HERE}", f"-I{FIBERS}", f"-I{folder}"]
        done = subprocess.run(
            [*command, *flags, *paths, str(folder / "cpu.cpp"), "-o", str(made)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[:4000])
        self._made = made
        self.functions = ctypes.CDLL(str(made))
        self._copies: dict[int, Library] = {}

    def of_rank(self, rank: int) -> Library:
        """The same with variables of its own, for kernels that run at the same time."""
        if rank == 0:
            return self
        if rank not in self._copies:
            copy = self._made.with_name(f"cpu{rank}.so")
            shutil.copyfile(self._made, copy)
            other = object.__new__(Library)
            other.functions = ctypes.CDLL(str(copy))
            self._copies[rank] = other
        return self._copies[rank]

    def run(self, kernel: str, params: Sequence[ctypes.Structure], grid: int, block: int) -> None:
        """Returns when the grid has ended."""
        pointers = (ctypes.c_void_p * len(params))(*[ctypes.addressof(p) for p in params])
        getattr(self.functions, f"run_{kernel}")(pointers, grid, block)


def _door(kernel: str, types: list[str]) -> str:
    given = ", ".join(f"*(const {kind}*)q[{i}]" for i, kind in enumerate(types))
    return (
        f'extern "C" void run_{kernel}(const void* p, unsigned grid, unsigned block) {{\n  new_grid(grid);\n'
        f"  run_grid([](const void* v) {{ void* const* q = (void* const*)v; {kernel}({given}); }}, "
        f"p, grid, block);\n}}\n"
    )


def tensor_map(
    address: int, *, item_bytes: int, columns: int, rows: int, box_columns: int, box_rows: int, swizzled: bool
) -> TensorMap:
    """What cuda_on_cpu.h reads of a tensor map."""
    made = TensorMap()
    made.words[:8] = [
        *(address, columns, rows, columns * item_bytes, item_bytes, box_columns, box_rows),
        int(swizzled),
    ]
    return made
