"""`mori-bench`: compare, sweep, report."""

from __future__ import annotations

import sys


def main() -> int:
    """The entry point of the console script."""
    print("mori-bench: compare, sweep, report")
    return 2


if __name__ == "__main__":
    sys.exit(main())
