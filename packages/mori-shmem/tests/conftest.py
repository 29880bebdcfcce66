"""Tests that do not name a backend are about the host target, also on a machine with GPUs."""

import os
import sys
from pathlib import Path

os.environ.setdefault("MORI_SHMEM_BACKEND", "host")
sys.path.insert(0, str(Path(__file__).parent))  # the tests share modules that lie beside them
