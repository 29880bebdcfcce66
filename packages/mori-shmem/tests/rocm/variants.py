"""Copies of mori_shmem.device.flydsl with a line changed, to see whether the change is noticed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import mori_shmem.device

PACKAGE = "mori_shmem.device.flydsl"
FOLDER = Path(mori_shmem.device.__file__).parent / "flydsl"


def variant(folder: Path, name: str, changes: list[tuple[str, str, str]]) -> ModuleType:
    """The helpers as package `name` below `folder`, with each (file, old text, new text) applied."""
    target = folder / name
    target.mkdir()
    for source in FOLDER.glob("*.py"):
        text = source.read_text()
        for file, old, new in changes:
            if file == source.name:
                assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old!r}"
                text = text.replace(old, new)
        (target / source.name).write_text(text.replace(PACKAGE, name))
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)
