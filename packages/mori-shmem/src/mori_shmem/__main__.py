"""`python -m mori_shmem [package ...]`: every effective setting, its value and where it comes from."""

from __future__ import annotations

import importlib
import sys

from mori_shmem.settings import effective


def main() -> None:
    for package in sys.argv[1:]:
        importlib.import_module(package)  # declares its settings
    lines = effective()
    width = max(len(line.variable) for line in lines)
    for line in lines:
        print(f"{line.variable:{width}}  {line.value!r:>12}  {line.origin:11}  {line.package}: {line.doc}")


if __name__ == "__main__":
    main()
