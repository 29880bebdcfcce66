"""What a kernel's first launch finds out, with FlyDSL's part faked."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("flydsl") is None:
    pytest.skip("not installed: flydsl; pip install 'mori-gemm-ar[rocm]'", allow_module_level=True)

from mori_gemm_ar.targets.rocm import kernel as module
from mori_shmem import descriptors
from mori_shmem.errors import DescriptorLimitError, MoriError


def made(launches: list[int]) -> module.Kernel:
    kernel = module.Kernel.__new__(module.Kernel)
    kernel._name, kernel._compiled, kernel._handle = "add", "key", None
    kernel._launcher = SimpleNamespace(
        _sig=SimpleNamespace(bind=lambda *given: given),
        _make_compiled_function=lambda *_: lambda _args, blocks, _stream: launches.append(blocks),
    )
    return kernel


def test_a_kernel_that_cannot_be_loaded_is_an_error_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlyDSL prints what HIP says, and goes on. An error from before is somebody else's."""
    said = iter(["of somebody else", "hipErrorOutOfMemory", "", "hipErrorInvalidImage", "", ""])
    monkeypatch.setattr(module, "native", SimpleNamespace(rocm_take_error=lambda: next(said)))
    monkeypatch.setattr(descriptors, "shortage", lambda: 24)
    launches: list[int] = []
    kernel = made(launches)
    with pytest.raises(DescriptorLimitError, match="loading kernel add"):
        kernel.launch(None, 1, 0)
    monkeypatch.setattr(descriptors, "shortage", lambda: None)
    with pytest.raises(MoriError, match="kernel add could not be loaded or launched: hipErrorInvalidImage"):
        kernel.launch(None, 2, 0)
    for blocks in (3, 4):
        kernel.launch(None, blocks, 0)
    assert launches == [1, 2, 3, 4]
    assert next(said, "all asked") == "all asked"
