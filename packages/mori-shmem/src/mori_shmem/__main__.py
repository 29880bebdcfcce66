"""`python -m mori_shmem [package ...]`: every effective setting, its value and where it comes from."""

from __future__ import annotations

import importlib
import sys

from mori_shmem.errors import SettingError
from mori_shmem.settings import effective, warn_of_misspelt_variables


def main() -> int:
    """The exit status: 2 where a variable has a value that is refused."""
    for package in sys.argv[1:]:
        importlib.import_module(package)  # declares its settings
    warn_of_misspelt_variables()
    try:
        lines = effective()
    except SettingError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    width = max(len(line.variable) for line in lines)
    for line in lines:
        print(f"{line.variable:{width}}  {line.value!r:>12}  {line.origin:11}  {line.package}: {line.doc}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
