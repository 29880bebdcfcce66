"""`python -m mori_shmem [package ...]`: every effective setting, its value and where it comes from."""

from __future__ import annotations

import importlib
import sys

from mori_shmem.errors import SettingError
from mori_shmem.settings import effective


def main() -> int:
    """The exit status: 2 where a variable has a value that is refused; the others are shown all the same."""
    for package in sys.argv[1:]:
        importlib.import_module(package)  # declares its settings
    refusals: list[SettingError] = []
    lines = effective(refusals)
    width = max((len(line.variable) for line in lines), default=0)
    for line in lines:
        print(f"{line.variable:{width}}  {line.value!r:>12}  {line.origin:11}  {line.package}: {line.doc}")
    for refusal in refusals:
        print(refusal, file=sys.stderr)
    return 2 if refusals else 0


if __name__ == "__main__":
    sys.exit(main())
