"""What a kernel's launches find out, and what is counted as compiled, with FlyDSL's part faked."""

from __future__ import annotations

import importlib.util
import pathlib
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("flydsl") is None:
    pytest.skip("not installed: flydsl; pip install 'mori-gemm-ar[rocm]'", allow_module_level=True)

from mori_gemm_ar.targets.rocm import compile as ahead
from mori_gemm_ar.targets.rocm import compile_variants
from mori_gemm_ar.targets.rocm import kernel as module
from mori_shmem import descriptors
from mori_shmem.errors import DescriptorLimitError, MoriError


def made(launches: list[int]) -> module.Kernel:
    kernel = module.Kernel.__new__(module.Kernel)
    kernel._name, kernel.compiled, kernel._handle = "add", "key", None
    kernel._launcher = SimpleNamespace(
        _sig=SimpleNamespace(bind=lambda *given: given),
        _make_compiled_function=lambda *_: lambda _args, blocks, _stream: launches.append(blocks),
    )
    return kernel


def test_a_kernel_that_cannot_be_loaded_is_an_error_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlyDSL prints what HIP says, and goes on. An error from before is somebody else's."""
    words = "of somebody else", "hipErrorOutOfMemory", "", "hipErrorInvalidImage", *[""] * 5, "full"
    said = iter(words)
    monkeypatch.setattr(module, "native", SimpleNamespace(rocm_take_error=lambda: next(said)))
    monkeypatch.setattr(descriptors, "shortage", lambda: 24)
    launches: list[int] = []
    kernel = made(launches)
    with pytest.raises(DescriptorLimitError, match="launching kernel add"):
        kernel.launch(None, 1, 0)
    monkeypatch.setattr(descriptors, "shortage", lambda: None)
    with pytest.raises(MoriError, match="kernel add could not be loaded or launched: hipErrorInvalidImage"):
        kernel.launch(None, 2, 0)
    for blocks in (3, 4):
        kernel.launch(None, blocks, 0)
    with pytest.raises(MoriError, match="launched: full"):  # later launches are looked at as well
        kernel.launch(None, 5, 0)
    assert launches == [1, 2, 3, 4, 5]
    assert next(said, "all asked") == "all asked"


def test_kernels_of_equal_code_are_counted_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two kernels of different n may come out the same: one artefact, and the cache is complete."""

    class Same:
        compiled = ""

        def compile(self, *_: object) -> None:
            self.compiled = "key"
            (tmp_path / "key.pkl").touch()

    def variants(n: int, num_ranks: int) -> list[SimpleNamespace]:
        kernel = Same()
        return [SimpleNamespace(name="quantize", kernel=kernel, compile=kernel.compile)]

    monkeypatch.setattr(compile_variants, "variants", variants)
    monkeypatch.setattr(ahead, "compiles_into", lambda folder: None)
    assert ahead.main(["--cache-dir", str(tmp_path), "-n", "128", "256"]) == 0
    assert "1 kernels compiled, 1 in" in capsys.readouterr().out
    (tmp_path / "key.pkl").unlink()
    monkeypatch.setattr(Same, "compile", lambda self, *_: setattr(self, "compiled", "other"))
    assert ahead.main(["--cache-dir", str(tmp_path), "-n", "128"]) == 1  # nothing came of it
