"""TU-6 with the op itself: tuned on the host, saved, and used by a new process from installed wheels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]


def find_uv() -> str | None:
    beside = str(Path(sys.executable).parent)
    return os.environ.get("UV") or shutil.which("uv") or shutil.which("uv", path=beside)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Wheels of the op and of mori-tune, installed before everything else; torch and mori-shmem are those of
    this environment. Returns how to run Python there."""
    uv = find_uv()
    if uv is None:
        pytest.skip("needs uv, to build wheels and install them")
    base = tmp_path_factory.mktemp("installed")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MORI_", "PYTHON", "RANK", "LOCAL_"))}
    paths = {"HOME": str(base), "PYTHONPATH": str(base / "site"), "MORI_TUNE_DIR": str(base / "rules")}
    clean |= {**paths, "UV_CACHE_DIR": clean.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))}

    def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**clean, **env}, cwd=base, capture_output=True, text=True, timeout=150
        )

    for name in ("mori-tune", "mori-gemm-ar"):
        copy = base / "src" / name
        shutil.copytree(PACKAGES / name, copy, ignore=shutil.ignore_patterns("tests", "__pycache__"))
        done = run(uv, "build", "-q", "--wheel", f"--out-dir={base / 'dist'}", str(copy))
        assert done.returncode == 0, done.stderr
    shutil.rmtree(base / "src")
    wheels = [str(wheel) for wheel in (base / "dist").glob("*.whl")]
    done = run(uv, "pip", "install", "-q", "--no-deps", f"--target={base / 'site'}", *wheels)
    assert done.returncode == 0, done.stderr
    return lambda *arguments, **env: run(sys.executable, *arguments, **env)


PROBLEM = ("--op", "gemm-ar", "--tokens", "130", "--hidden", "256", "-k", "256", "--gather-dtype", "fp8")

USES = """
    import json
    import mori_gemm_ar, mori_shmem, mori_tune
    from mori_gemm_ar import GemmAllReduce

    assert "site" in mori_gemm_ar.__file__ and "site" in mori_tune.__file__
    BASE = {"n": 256, "k": 256, "m_max": 130, "mode": "fused-sdma", "gather_dtype": "fp8"}
    OTHERS = [
        {}, {"n": 264}, {"k": 384}, {"m_max": 131}, {"quant": "ptpc"}, {"mode": "split-sdma"},
        {"gather_dtype": "bf16"}, {"gather_transport": "sdma"}, {"chunks": 1}, {"tuned": False},
    ]

    def ops():
        found = []
        with mori_shmem.init("host", timeout_s=60) as comm:
            for other in OTHERS:
                with GemmAllReduce(comm, **{**BASE, **other}) as op:
                    rule, chosen = op.rule(op.m_max), op.plan(op.m_max).options
                    found.append((rule.outcome, rule.used, rule.params, chosen.chunks, chosen.pull_blocks))
        return found

    print(json.dumps(mori_shmem.run_ranks(ops, 2, timeout_s=90)))
"""


def test_TU_6_the_op_uses_what_was_tuned_and_says_so(installed: Run) -> None:
    tune = installed("-m", "mori_tune", "run", *PROBLEM, "--backend", "host", "--reps", "3", "--save")
    assert tune.returncode == 0, tune.stdout + tune.stderr
    assert "ADDED gemm-ar layer quant=blockscale gather_dtype=fp8" in tune.stdout

    uses = installed("-c", textwrap.dedent(USES), MORI_TUNE_LOOKUP="exact")
    assert uses.returncode == 0, uses.stderr
    first, second = json.loads(uses.stdout)
    assert first == second, "all ranks launch the same"
    (outcome, used, params, chunks, pull_blocks), *others, given, by_hand = first
    assert (outcome, used) == ("MATCH", "rule")
    assert params == {"chunks": chunks, "pull_blocks": pull_blocks}
    assert [other[:3] for other in others] == [["NO MATCH", "default", None]] * 7
    assert [given[:3], by_hand[:3]] == [["MANUAL", "default", None]] * 2
    said = [line for line in uses.stderr.splitlines() if "gemm-ar layer: " in line]
    assert sum("MATCH chunks=" in line and "_layer.json:" in line for line in said) == 1
    for field in ("n asked 264", "k asked 384", "m asked 131", "quant asked ptpc", "mode asked split-sdma"):
        assert sum(field in line for line in said) == 1, (field, said)
    for words in ("gather_dtype asked bf16", "gather_transport asked sdma", "chunks given", "tuned=False"):
        assert any(words in line for line in said), (words, said)

    for field, device, ranks in (("world_size", "cpu", "3"), ("gpu_model", "other", "2")):
        arguments = ("--world-size", ranks, "--device", f"{os.uname().machine}/{device}/1")
        explain = installed("-m", "mori_tune", "explain", *PROBLEM, *arguments)
        assert explain.returncode == 1
        assert f"{field} asked" in explain.stdout, explain.stdout

    shipped = installed("-m", "mori_tune", "explain", "--op", "gemm-ar", "--device", "sm_90/h200/132")
    assert shipped.returncode == 0, "the wheel has the rules for H200: " + shipped.stdout
    assert shipped.stdout.count("_layer.json:") == shipped.stdout.count(": MATCH ") == 12

    verify = installed("-m", "mori_tune", "verify", *PROBLEM, "--backend", "host")
    assert verify.returncode == 0, verify.stdout + verify.stderr
    assert "queried with blockscale -> MATCH" in verify.stdout
