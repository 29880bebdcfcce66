"""The one place that loads the C++ core. `import mori_shmem` works without it; whatever needs it says what
is wrong."""

from __future__ import annotations

import os

from mori_shmem.errors import CoreMissing

try:
    from mori_shmem import _core as native
except ImportError as error:
    missing = CoreMissing(
        f"the native part of mori-shmem cannot be loaded: {error}. It belongs at "
        f"{os.path.join(os.path.dirname(__file__), '_core*.so')}: install mori-shmem again for this Python"
    )
    missing.name, missing.path = "mori_shmem._core", error.path
    raise missing from error

CoreError = native.CoreError

__all__ = ["CoreError", "native"]
