"""What a compiled kernel uses, read from the cubin, and what its main loop holds, read from its disassembly.

Registers and stack stand in the ELF's `.nv.info` section. Spills show as stack, and in the disassembly as
LDL and STL.
The disassembler is NVIDIA's; Triton's wheel carries one, so most installations have it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NV_INFO, _SYMTAB, _STRTAB = ".nv.info", ".symtab", ".strtab"
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info, each a (symbol, value) pair
_SIZED_VALUE = 0x04
_FUNCTION = 2  # symbol type


@dataclass(frozen=True)
class Resources:
    """Of one kernel or device function."""

    registers: int
    stack_bytes: int


def kernels_of(cubin: bytes) -> dict[str, Resources]:
    """By name."""
    sections = _sections(cubin)
    names = _symbol_names(cubin, sections)
    values: dict[int, dict[int, int]] = {_REGCOUNT: {}, _FRAME_SIZE: {}}
    for attribute, payload in _attributes(_bytes_of(cubin, sections, _NV_INFO)):
        if attribute in values and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            values[attribute][symbol] = value
    return {
        names[symbol]: Resources(registers, values[_FRAME_SIZE].get(symbol, 0))
        for symbol, registers in values[_REGCOUNT].items()
    }


def _sections(elf: bytes) -> dict[str, tuple[int, int, int]]:
    """(offset, bytes, entry bytes) by name."""
    if elf[:4] != b"\x7fELF" or elf[4] != 2:
        raise ValueError("not a 64-bit ELF file, so not a cubin")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_bytes) for i in range(count)]
    names_at = headers[names_index][4]
    return {_c_string(elf, names_at + h[0]): (h[4], h[5], h[9]) for h in headers}


def _bytes_of(elf: bytes, sections: dict[str, tuple[int, int, int]], name: str) -> bytes:
    offset, nbytes, _ = sections[name]
    return elf[offset : offset + nbytes]


def _symbol_names(elf: bytes, sections: dict[str, tuple[int, int, int]]) -> dict[int, str]:
    table, strings = _bytes_of(elf, sections, _SYMTAB), _bytes_of(elf, sections, _STRTAB)
    names = {}
    for i in range(len(table) // 24):
        name, info = struct.unpack_from("<IB", table, i * 24)
        if info & 0xF == _FUNCTION:
            names[i] = _c_string(strings, name)
    return names


def _c_string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED_VALUE:
            yield attribute, info[at : at + size]
            at += size


def find_disassembler() -> str | None:
    """A cuobjdump, or None where there is none."""
    on_path = shutil.which("cuobjdump")
    if on_path:
        return on_path
    spec = importlib.util.find_spec("triton")
    for folder in spec.submodule_search_locations or () if spec else ():
        beside = Path(folder, "backends", "nvidia", "bin", "cuobjdump")
        if beside.is_file():
            return str(beside)
    return None


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)


def instructions_of(cubin: bytes, disassembler: str) -> list[str]:
    """The machine code as text, one instruction each, in the order of addresses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [disassembler, "-sass", file.name], capture_output=True, text=True, check=True, timeout=120
        )
    return _INSTRUCTION.findall(done.stdout)


def main_loop(instructions: list[str]) -> list[str]:
    """From the first matrix instruction to the last: the part of a GEMM that runs k / 128 times a tile."""
    matrix = [i for i, text in enumerate(instructions) if "GMMA" in text]
    return instructions[matrix[0] : matrix[-1] + 1] if matrix else []


def waits_for_loads(instructions: list[str]) -> list[str]:
    """Instructions of a main loop that read what a global load brings, before the next matrix instruction.

    Such an instruction stalls the warpgroup for the load's whole latency in every step."""
    found, loading = [], set[str]()
    for text in instructions:
        if "GMMA" in text:
            loading.clear()
            continue
        operands = re.findall(r"\bR\d+\b", text)
        if re.search(r"\bLDG\b", text) and operands:
            loading.add(operands[0])
        elif loading.intersection(operands[1:]):
            found.append(text)
    return found
