"""Tests that do not name a backend are about the host target, also on a machine with GPUs."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("MORI_SHMEM_BACKEND", "host")
sys.path.insert(0, str(Path(__file__).parent))  # the tests share modules that lie beside them


@pytest.fixture
def cuda_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("MORI_SHMEM_BACKEND", "cuda")
