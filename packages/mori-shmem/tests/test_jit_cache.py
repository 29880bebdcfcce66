"""Compiled kernels are reused only when nothing that matters changed, also by many processes at once (PK-5).

The compiler is a fake: it records its calls in a folder and returns bytes made from what it was given.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import mori_shmem
import pytest
from mori_shmem.errors import ArgumentError, RankFailed, SettingError
from mori_shmem.jit import Source, Variant, build
from mori_shmem.jit import build as build_function
from mori_shmem.jit.cache import Cache, key_of


class FakeCompiler:
    name = "fake"

    def __init__(self, log: Path, version: str = "1.0", seconds: float = 0.0) -> None:
        self.log, self.version, self.seconds = log, version, seconds

    def compile(self, source: Source, flags: tuple[str, ...], arch: str) -> bytes:
        time.sleep(self.seconds)
        self.log.mkdir(exist_ok=True)
        (self.log / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        return repr((source, flags, arch, self.version)).encode() * 100

    @property
    def calls(self) -> int:
        return len(list(self.log.iterdir())) if self.log.exists() else 0


def write_kernel(folder: Path, helper: str = "int f() { return 1; }") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cu").write_text('#include "middle.cuh"\nvoid kernel() { g(); }\n')
    (folder / "middle.cuh").write_text('  #  include "helper.cuh"\nint g() { return f(); }\n')
    (folder / "helper.cuh").write_text(helper)
    return folder / "kernel.cu"


def variant(path: Path, *, flags: tuple[str, ...] = ("-DX=1",), arch: str = "sm_90a") -> Variant:
    return Variant("mori-shmem", Source.read(path), flags, arch)


def base_key(**changes: object) -> str:
    ingredients = {
        "flags": ("-DX=1",),
        "arch": "sm_90a",
        "compiler": "nvrtc",
        "compiler_version": "13.0",
        "package": "mori-gemm-ar",
        "package_version": "0.1.0",
    }
    source = changes.pop("source", Source("k.cu", (("k.cu", "a"), ("h.cuh", "b"))))
    return key_of(source, **{**ingredients, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"source": Source("k.cu", (("k.cu", "a"), ("h.cuh", "c")))},
        {"source": Source("k.cu", (("k.cu", "a"), ("i.cuh", "b")))},
        {"flags": ("-DX=2",)},
        {"flags": ()},
        {"arch": "sm_100a"},
        {"compiler": "nvcc"},
        {"compiler_version": "13.1"},
        {"package": "mori-ep"},
        {"package_version": "0.1.1"},
    ],
    ids=str,
)
def test_PK_5_each_ingredient_changes_the_key(change: dict[str, object]) -> None:
    assert base_key(**change) != base_key()


def test_PK_5_one_character_in_an_indirectly_included_file_is_another_kernel(tmp_path: Path) -> None:
    compiler = FakeCompiler(tmp_path / "log")
    before = variant(write_kernel(tmp_path / "a")).key(compiler)
    after = variant(write_kernel(tmp_path / "a", helper="int f() { return 2; }")).key(compiler)
    assert before != after


def test_PK_5_path_time_and_environment_are_no_ingredients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler(tmp_path / "log")
    one = variant(write_kernel(tmp_path / "here")).key(compiler)
    elsewhere = write_kernel(tmp_path / "some" / "where else")
    for path in elsewhere.parent.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setenv("AAA_FIRST", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert variant(elsewhere).key(compiler) == one


def test_an_include_of_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = write_kernel(tmp_path, helper="#include <cuda_fp8.h>\n")
    with pytest.raises(ArgumentError, match=r"helper\.cuh includes <cuda_fp8\.h>"):
        Source.read(path)


def test_a_missing_include_names_the_folders(tmp_path: Path) -> None:
    path = write_kernel(tmp_path)
    (tmp_path / "helper.cuh").unlink()
    with pytest.raises(ArgumentError, match=r'"helper\.cuh" is in none of '):
        Source.read(path)


def test_a_second_build_compiles_nothing(tmp_path: Path) -> None:
    compiler, cache = FakeCompiler(tmp_path / "log"), Cache(tmp_path / "cache")
    kernel = variant(write_kernel(tmp_path / "src"))
    first = build(kernel, compiler=compiler, cache=cache)
    assert build(kernel, compiler=compiler, cache=Cache(tmp_path / "cache")) == first
    assert compiler.calls == 1


def first_use(arguments: tuple[Path, Path, Path]) -> bytes:
    source, log, folder = arguments
    return build_function(variant(source), compiler=FakeCompiler(log, seconds=0.2), cache=Cache(folder))


def test_PK_5_eight_processes_at_once_make_one_artefact(tmp_path: Path) -> None:
    source = write_kernel(tmp_path / "src")
    job = (source, tmp_path / "log", tmp_path / "cache")
    got = mori_shmem.run_ranks(first_use, 8, job, timeout_s=60)
    assert len(set(got)) == 1
    assert FakeCompiler(tmp_path / "log").calls == 1
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == 1
    assert [p for p in (tmp_path / "cache").iterdir() if p.suffix not in (".cubin", ".lock")] == []


@pytest.mark.parametrize("damage", ["half", "empty", "flipped", "foreign"])
def test_PK_5_a_torn_file_is_made_again(tmp_path: Path, damage: str) -> None:
    compiler, cache = FakeCompiler(tmp_path / "log"), Cache(tmp_path / "cache")
    kernel = variant(write_kernel(tmp_path / "src"))
    whole = build(kernel, compiler=compiler, cache=cache)
    path = cache.path(kernel.key(compiler))
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(
        {"half": blob[: len(blob) // 2], "empty": b"", "flipped": blob, "foreign": b"x" * 200}[damage]
    )
    assert build(kernel, compiler=compiler, cache=cache) == whole
    assert compiler.calls == 2
    assert build(kernel, compiler=compiler, cache=cache) == whole
    assert compiler.calls == 2


def killed_while_writing(folder: Path, source: Path, log: Path) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), 9)  # type: ignore[assignment]
    build_function(variant(source), compiler=FakeCompiler(log), cache=Cache(folder))


def test_PK_5_a_writer_killed_half_way_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    source = write_kernel(tmp_path / "src")
    job = (tmp_path / "cache", source, tmp_path / "log")
    with pytest.raises(RankFailed, match="SIGKILL"):
        mori_shmem.run_ranks(killed_while_writing, 1, *job, timeout_s=60)
    compiler, cache = FakeCompiler(tmp_path / "log"), Cache(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.cubin"))
    assert build(variant(source), compiler=compiler, cache=cache)
    assert compiler.calls == 2


def not_a_folder(tmp_path: Path) -> Path:
    """A cache folder that nobody can make, root included: its parent is a file."""
    (tmp_path / "home").write_text("")
    return tmp_path / "home" / ".cache"


def test_PK_5_without_a_writable_home_each_call_works_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler, cache = FakeCompiler(tmp_path / "log"), Cache(not_a_folder(tmp_path))
    kernel = variant(write_kernel(tmp_path / "src"))
    with caplog.at_level(logging.WARNING, logger="mori_shmem"):
        assert build(kernel, compiler=compiler, cache=cache) == build(kernel, compiler=compiler, cache=cache)
    assert compiler.calls == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "MORI_JIT_CACHE_DIR" in caplog.text


def test_PK_5_with_the_cache_off_two_calls_in_one_process_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler(tmp_path / "log")
    monkeypatch.setenv("MORI_JIT_CACHE", "off")
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path / "cache"))
    kernel = variant(write_kernel(tmp_path / "src"))
    assert build(kernel, compiler=compiler) == build(kernel, compiler=compiler)
    assert compiler.calls == 2
    assert not (tmp_path / "cache").exists()


def test_the_settings_choose_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_JIT_CACHE_DIR", str(tmp_path / "chosen"))
    build(variant(write_kernel(tmp_path / "src")), compiler=FakeCompiler(tmp_path / "log"))
    assert len(list((tmp_path / "chosen").glob("*.cubin"))) == 1


def test_an_unknown_compiler_is_refused_with_the_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_JIT_COMPILER", "gcc")
    with pytest.raises(SettingError, match=r"MORI_JIT_COMPILER.*nvrtc"):
        build(variant(write_kernel(tmp_path / "src")))
