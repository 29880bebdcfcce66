"""What a kernel consists of: its file and every file that it includes, as text.

Only names as they are written in `#include "..."` are kept, no paths: the same sources in another checkout
are
the same kernel. All files are handed to the compiler as strings, so that what was hashed is what is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mori_shmem.errors import ArgumentError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
COMPILERS_OWN = {"stdint.h"}  # only reached where there is no NVRTC


@dataclass(frozen=True)
class Source:
    """`name` is the kernel's file; `files` maps it and all it includes, directly or not, to their text."""

    name: str
    files: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: Path, include_dirs: Sequence[Path] = ()) -> Source:
        """The file at `path` and its includes, looked up beside it and then in `include_dirs`."""
        folders = [path.parent, *include_dirs]
        files: dict[str, str] = {}
        wanted = [path.name]
        while wanted:
            name = wanted.pop()
            if name in files:
                continue
            files[name] = _find(name, folders).read_text(encoding="utf-8")
            wanted += _includes_of(name, files[name])
        return cls(path.name, tuple(sorted(files.items())))


def _includes_of(name: str, text: str) -> list[str]:
    found = []
    for kind, included in _INCLUDE.findall(text):
        if included in COMPILERS_OWN:
            continue
        if kind == "<":
            raise ArgumentError(
                f'{name} includes <{included}>: kernels include only their own files, by "...", so that the '
                "cache knows all that a cubin was made from"
            )
        found.append(included)
    return found


def _find(name: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ArgumentError(f'#include "{name}" is in none of {", ".join(map(str, folders))}')
