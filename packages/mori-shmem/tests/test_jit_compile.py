"""NVRTC as it comes with torch, and what is read from a cubin. No GPU is needed for either."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mori_shmem.jit import Source, Variant, build, cuda_headers, resources
from mori_shmem.jit.__main__ import main
from mori_shmem.jit.cache import Cache
from mori_shmem.jit.compilers import CompileError, Compiler, CompilerMissing, compiler_named

KERNEL = """
#include "async.cuh"
#include "signal.cuh"
extern "C" __device__ const unsigned answer = 42;
extern "C" __global__ void wait_then_add(const unsigned* flag, unsigned wanted, Fault* fault, float* x) {
  if (threadIdx.x == 0) wait_flag(flag, wanted, fault, 1000, 0, 1, 2, 3);
  __syncthreads();
  x[threadIdx.x] += BIAS;
}
"""


def compiler_or_skip(name: str) -> Compiler:
    try:
        return compiler_named(name)
    except CompilerMissing as missing:
        pytest.skip(str(missing))


def kernel(tmp_path: Path, text: str = KERNEL) -> Variant:
    path = tmp_path / "kernel.cu"
    path.write_text(text)
    return Variant("mori-shmem", Source.read(path, [cuda_headers()]), ("-DBIAS=1.0f",), "sm_90a")


@pytest.mark.parametrize("name", ["nvrtc", "nvcc"])
def test_the_device_helpers_compile_to_a_cubin(tmp_path: Path, name: str) -> None:
    cubin = build(kernel(tmp_path), compiler=compiler_or_skip(name), cache=Cache(None))
    used = resources.kernels_of(cubin)
    assert list(used) == ["wait_then_add"]
    assert 8 <= used["wait_then_add"].registers <= 40
    assert used["wait_then_add"].stack_bytes == 0


def test_a_kernel_that_does_not_compile_shows_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"nvrtc .* refused kernel\.cu .*sm_90a:\n(?s:.*)nonsense"):
        build(kernel(tmp_path, "nonsense;"), compiler=compiler_or_skip("nvrtc"), cache=Cache(None))


def test_stack_is_found_where_an_array_is_indexed_at_run_time(tmp_path: Path) -> None:
    text = """extern "C" __global__ void k(float* x, int i) {
      float a[64];
      for (int j = 0; j < 64; ++j) a[j] = x[j * j] * i;
      for (int j = 0; j < i; ++j) a[(j * i) & 63] += x[j];
      x[0] = a[i & 63];
    }"""
    cubin = build(kernel(tmp_path, text), compiler=compiler_or_skip("nvrtc"), cache=Cache(None))
    assert resources.kernels_of(cubin)["k"].stack_bytes == 256


def test_instructions_are_read_from_the_disassembly(tmp_path: Path) -> None:
    disassembler = resources.find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump: neither on PATH nor in Triton's wheel")
    cubin = build(kernel(tmp_path), compiler=compiler_or_skip("nvrtc"), cache=Cache(None))
    text = resources.instructions_of(cubin, disassembler)
    assert any(line.startswith("LDG.E.STRONG.SYS") for line in text)
    assert any("EXIT" in line for line in text)
    assert resources.main_loop(text) == []


def test_a_read_of_a_loaded_register_before_the_next_matrix_instruction_is_found() -> None:
    step = ["QGMMA.64x128x32 R24, gdesc[UR8], R24", "LDG.E R5, desc[UR4][R2.64]", "FFMA R90, R24, R6, R90"]
    assert resources.waits_for_loads(step) == []
    waiting = [*step, "MOV R6, R5", "QGMMA.64x128x32 R24, gdesc[UR8], RZ"]
    assert resources.waits_for_loads(waiting) == ["MOV R6, R5"]


def test_the_cache_is_filled_ahead_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler_or_skip("nvrtc")
    (tmp_path / "some_variants.py").write_text("VARIANTS = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    import some_variants  # type: ignore[import-not-found]

    some_variants.VARIANTS = [("add", kernel(tmp_path))]
    assert main(["--cache-dir", str(tmp_path / "cache"), "--report", "some_variants"]) == 0
    assert "add: " in capsys.readouterr().out
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == 1
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file is in the way")
    assert main(["--cache-dir", str(tmp_path / "cache"), "some_variants"]) == 1
