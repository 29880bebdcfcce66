"""Tests that do not name a backend are about the host target, also on a machine with GPUs."""

import os

os.environ.setdefault("MORI_SHMEM_BACKEND", "host")
