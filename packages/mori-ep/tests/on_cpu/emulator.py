"""Builds the cuda target's kernels for the CPU (fibers.h), so that what they do can be tested anywhere.

Each `asm` statement is replaced by the C++ that says the same, found by its instruction; one that is not
in the table is an error. The rest of the source is compiled as it is.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ASM = re.compile(r"asm(?: volatile)?\(\s*((?:\"(?:[^\"\\]|\\.)*\"\s*)+)(.*?)\);", re.DOTALL)
_LOOK, _LOOK_64 = "{o[0]} = look({i[0]})", "{o[0]} = look_64({i[0]})"
TABLE = (  # instruction -> C++, with its operands o (written) and i (read)
    ("ld.acquire.sys.global.u32", _LOOK),
    ("ld.acquire.gpu.global.u32", _LOOK),
    ("ld.relaxed.sys.global.u32", _LOOK),
    ("ld.relaxed.gpu.global.u32", _LOOK),
    ("ld.global.u32", _LOOK),
    ("ld.acquire.sys.global.u64", _LOOK_64),
    ("st.release.sys.global.u64", "__atomic_store_n({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    ("st.relaxed.sys.global.u64", "__atomic_store_n({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    ("st.release.sys.global.u32", "__atomic_store_n({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    ("st.relaxed.sys.global.u32", "__atomic_store_n({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    ("red.release.sys.global.add.u32", "__atomic_fetch_add({i[0]}, {i[1]}, __ATOMIC_RELEASE)"),
    (
        "atom.add.acq_rel.gpu.global.u32",
        "{o[0]} = __atomic_fetch_add((unsigned*){i[0]}, 1u, __ATOMIC_ACQ_REL)",
    ),
    ("atom.acq_rel.sys.global.inc.u32", "{o[0]} = atomicInc({i[0]}, {i[1]})"),
    ("atom.acq_rel.gpu.global.inc.u32", "{o[0]} = atomicInc({i[0]}, {i[1]})"),
    ("fence.acq_rel.sys", "__atomic_thread_fence(__ATOMIC_SEQ_CST)"),
    ("mov.u64 %0, %%globaltimer", "{o[0]} = clock_ns()"),
    ("st.relaxed.sys.global.b128", "store_16({i[0]}, {i[1]}, {i[2]})"),
    ("ld.relaxed.sys.global.b128", "load_16({i[0]}, {o[0]}, {o[1]})"),
    ("ld.global.L1::no_allocate.v4.u32", "v = *{i[0]}"),
    ("cvt.rn.bf16x2.f32", "{o[0]} = two_bf16({i[1]}, {i[0]})"),
    ("cvt.rn.f16x2.f32", "{o[0]} = two_halves({i[1]}, {i[0]})"),
    ("cvt.f32.f16", "{o[0]} = half_value({i[0]})"),
)


def _operands(text: str) -> list[str]:
    return re.findall(r'"[=+]?\w"\(((?:[^()]|\([^()]*\))*)\)', text)


def _in_cpp(match: re.Match[str]) -> str:
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match.group(1)))
    outputs, inputs = _sections(match.group(2))
    for instruction, cpp in TABLE:
        if instruction in code:
            return cpp.format(o=_operands(outputs), i=_operands(inputs)) + ";"
    raise ValueError(f"no C++ for the assembly {code!r}")


def _sections(text: str) -> tuple[str, str]:
    """Outputs and inputs of an asm statement: what stands between its colons, parentheses aside."""
    found, depth, current = [], 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == ":" and depth == 0:
            found.append(current)
            current = ""
        else:
            current += char
    found.append(current)
    found += ["", "", ""]
    return found[1], found[2]


def cpu_source(text: str) -> str:
    """A kernel's source with its assembly replaced."""
    return ASM.sub(_in_cpp, text)


class Library:
    """The kernels of one source file; `run(kernel, params, grid, block)` returns when the grid has ended."""

    def __init__(
        self, files: dict[str, str], name: str, flags: tuple[str, ...], kernels: dict[str, str], folder: Path
    ) -> None:
        for file, text in files.items():
            (folder / file).write_text(cpu_source(text))
        doors = "".join(
            f'extern "C" void run_{kernel}(const void* p, unsigned grid, unsigned block) {{\n'
            f"  run_grid([](const void* q) {{ {kernel}(*(const {params}*)q); }}, p, grid, block);\n}}\n"
            for kernel, params in kernels.items()
        )
        (folder / "cpu.cpp").write_text(f'#include "fibers.h"\n#include "{name}"\n{doors}')
        made = folder / "cpu.so"
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-g0",
            "-shared",
            "-fPIC",
            "-pthread",
            "-w",
            "-ffp-contract=off",
            *flags,
        ]
        done = subprocess.run(
            [*command, f"-I{HERE}", f"-I{folder}", str(folder / "cpu.cpp"), "-o", str(made)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        self._library = ctypes.CDLL(str(made))

    def run(self, kernel: str, params: ctypes.Structure, grid: int, block: int) -> None:
        getattr(self._library, f"run_{kernel}")(ctypes.byref(params), grid, block)
