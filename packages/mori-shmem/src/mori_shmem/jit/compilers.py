"""The compilers: NVRTC, which comes with torch's CUDA wheels, and nvcc where it is asked for by name.

Both take all files as text and give a cubin. A compiler that is not there raises CompilerMissing when it is
made,
with what would bring it; there is no silent change from one to the other.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Protocol

from mori_shmem.errors import MoriError
from mori_shmem.jit.source import Source


class CompilerMissing(MoriError):
    """The compiler that was asked for is not on this machine."""


class CompileError(MoriError):
    """The compiler refused a kernel; its log is in the message."""


class Compiler(Protocol):
    """`name` and `version` are part of a cubin's key."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    def compile(self, source: Source, flags: Sequence[str], arch: str) -> bytes: ...


@functools.cache
def compiler_named(name: str) -> Compiler:
    """ "nvrtc" or "nvcc"."""
    if name == "nvrtc":
        return Nvrtc()
    if name == "nvcc":
        return Nvcc()
    raise CompilerMissing(f"no compiler is called {name!r}: nvrtc, nvcc")


class Nvrtc:
    """The run-time compiler. About one second a kernel, in this process."""

    name = "nvrtc"

    def __init__(self) -> None:
        self._lib = _load_nvrtc()
        self._lib.nvrtcGetErrorString.restype = c_char_p
        major, minor = c_int(), c_int()
        self._check("nvrtcVersion", self._lib.nvrtcVersion(byref(major), byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: Source, flags: Sequence[str], arch: str) -> bytes:
        text = dict(source.files)
        headers = [name for name in text if name != source.name]
        program = c_void_p()
        self._check(
            "nvrtcCreateProgram",
            self._lib.nvrtcCreateProgram(
                *[byref(program), text[source.name].encode(), source.name.encode(), len(headers)],
                *[_strings(text[name] for name in headers), _strings(headers)],
            ),
        )
        try:
            options = [f"--gpu-architecture={arch}", "--std=c++17", *flags]
            code = self._lib.nvrtcCompileProgram(program, len(options), _strings(options))
            if code:
                raise CompileError(
                    f"nvrtc {self.version} refused {source.name} {list(flags)} for {arch}:\n"
                    f"{self._log(program)}"
                )
            return self._text(program, "CUBIN")
        finally:
            self._lib.nvrtcDestroyProgram(byref(program))

    def _log(self, program: c_void_p) -> str:
        return self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")

    def _text(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._check(f"nvrtcGet{what}Size", getattr(self._lib, f"nvrtcGet{what}Size")(program, byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, call: str, code: int) -> None:
        if code:
            raise CompileError(f"{call} failed: {code} ({self._lib.nvrtcGetErrorString(code).decode()})")


def _strings(texts: Sequence[str] | Iterator[str]) -> ctypes.Array[c_char_p]:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def _load_nvrtc() -> ctypes.CDLL:
    """The newest NVRTC among torch's wheels and the loader's path. Its builtins lie beside it and are loaded
    first,
    since NVRTC looks them up by their bare name."""
    tried = []
    for path in _nvrtc_candidates():
        try:
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if "/" in path else ():
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        except OSError as e:
            tried.append(f"{path} ({e})")
    raise CompilerMissing(
        "NVRTC was not found: pip install nvidia-cuda-nvrtc, or set MORI_JIT_COMPILER=nvcc. Tried: "
        + "; ".join(tried)
    )


def _nvrtc_candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        found = [p for p in Path(folder).glob("*/lib/libnvrtc.so.*") if ".alt." not in p.name]
        yield from map(str, sorted(found, key=lambda p: p.name, reverse=True))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class Nvcc:
    """The compiler driver of a CUDA toolkit, as a process."""

    name = "nvcc"

    def __init__(self) -> None:
        found = shutil.which("nvcc")
        if found is None:
            raise CompilerMissing(
                "MORI_JIT_COMPILER=nvcc, but no nvcc is on PATH: install a CUDA toolkit, or use nvrtc"
            )
        self._path = found
        said = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        version = re.search(r"V(\d+\.\d+\.\d+)", said)
        self.version = version.group(1) if version else said.strip()

    def compile(self, source: Source, flags: Sequence[str], arch: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="mori-jit-") as folder:
            for name, text in source.files:
                Path(folder, name).write_text(text, encoding="utf-8")
            target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
            command = [
                self._path,
                target,
                "-cubin",
                "-O3",
                "-std=c++17",
                *flags,
                "-o",
                "out.cubin",
                source.name,
            ]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise CompileError(
                    f"nvcc {self.version} refused {source.name} {list(flags)} for {arch}:\n{done.stderr}"
                )
            return Path(folder, "out.cubin").read_bytes()
