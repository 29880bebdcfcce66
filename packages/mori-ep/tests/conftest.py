"""What the tests of mori-ep share: the folder of harnesses, and kernels for the CPU where a test's device is
that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "on_cpu"))


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        import cuda_node

        cuda_node.use_kernels_for_the_cpu(monkeypatch)
