"""TU-6: tuned here, saved, and found again by packages that are installed, away from any source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent
TOY_OP = Path(__file__).parent / "toy_op"


def find_uv() -> str | None:
    return (
        os.environ.get("UV")
        or shutil.which("uv")
        or shutil.which("uv", path=str(Path(sys.executable).parent))
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Builds both wheels, installs them into an empty environment; returns how to run something there."""
    uv = find_uv()
    if uv is None:
        pytest.skip("needs uv, to build wheels and an empty environment")
    base = tmp_path_factory.mktemp("installed")
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MORI_", "PYTHON", "VIRTUAL_ENV", "RANK"))
    }
    clean |= {
        "HOME": str(base),
        "UV_CACHE_DIR": clean.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")),
    }

    def run(*command: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**clean, **env}, cwd=base, check=check, capture_output=True, text=True, timeout=120
        )

    for source in (PACKAGE, TOY_OP):
        copy = base / "src" / source.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("tests", "__pycache__"))
        run(uv, "build", "-q", "--wheel", f"--out-dir={base / 'dist'}", str(copy))
    shutil.rmtree(base / "src")
    run(uv, "venv", "-q", f"--python={sys.executable}", str(base / "env"))
    python = str(base / "env" / "bin" / "python")
    fresh = (
        "--refresh-package=mori-tune",
        "--refresh-package=toy-op",
    )  # not a copy that uv has of another run
    found = ("--no-index", f"--find-links={base / 'dist'}", *fresh)
    run(uv, "pip", "install", "-q", *found, f"--python={python}", "toy-op")

    def here(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = str(base / "env" / "bin" / arguments[0])
        return run(command, *arguments[1:], check=False, **env)

    return here


LOOK_UP = """
    import sys
    from mori_tune import Query, lookup
    from mori_tune.device import Device, host_device
    from toy_op.op import COMBINE, DISPATCH, TOY
    import mori_tune, toy_op
    assert "site-packages" in mori_tune.__file__ and "site-packages" in toy_op.__file__
    changed = dict(pair.split("=") for pair in sys.argv[2:])
    device = Device("host", host_device().arch, changed.pop("model", "cpu"), 4)
    header = {"kernel_type": "Toy", "ep_size": int(changed.pop("ep_size", 2))}
    key = {"hidden_dim": 64, "topk": 8, "num_tokens": 2}
    key |= {name: int(value) for name, value in changed.items() if name in key}
    if sys.argv[1] == "dispatch":
        query = Query(DISPATCH, device, header, {"dtype": changed.get("dtype", "fp8"), **key})
    else:
        own = {"dtype": changed.get("dtype", "bf16"), "zero_copy": False, "quant_type": "none"}
        query = Query(COMBINE, device, header, {**own, **key})
    for _ in range(2):
        decision = lookup(query, formats=TOY.formats, package="toy_op")
    print(decision.outcome, decision.used, decision.params)
"""


def test_TU_6_round_trip_with_installed_wheels(
    installed: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = textwrap.dedent(LOOK_UP)
    home = {"MORI_TUNE_DIR": str(tmp_path), "MORI_TUNE_JOURNALS": str(tmp_path / "j")}
    run = installed("mori-tune", "run", "--op", "toy", "--tokens", "2", "--hidden", "64", "--save", **home)
    assert run.returncode == 0, run.stderr
    for phase in ("dispatch", "combine"):
        found = installed("python", "-c", script, phase, **home)
        assert found.stdout.startswith("MATCH rule {'block_num':"), found.stdout + found.stderr
        assert found.stderr.count("MATCH block_num") == 1, "said once, with file and line"
        assert f"{tmp_path}/" in found.stderr
    exact = {**home, "MORI_TUNE_LOOKUP": "exact"}
    for field in ("dtype=x", "hidden_dim=65", "num_tokens=3", "topk=4", "ep_size=4", "model=other"):
        for phase in ("dispatch", "combine"):
            missed = installed("python", "-c", script, phase, field, **exact)
            assert missed.stdout == "NO MATCH default None\n", (field, missed.stdout, missed.stderr)
            assert missed.stderr.count("NO MATCH") == 1, "reported once"
            assert f"{field.split('=')[0].replace('model', 'gpu_model')} asked" in missed.stderr
    near = installed("python", "-c", script, "dispatch", "num_tokens=1", **home)
    assert near.stdout.startswith("NO MATCH nearest {")
    verify = installed("mori-tune", "verify", "--op", "toy", "--tokens", "2", "--hidden", "64", **home)
    assert verify.returncode == 0, verify.stdout + verify.stderr


def test_the_installed_package_needs_nothing_else(
    installed: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = installed("python", "-I", "-c", "import mori_tune, sys; print('torch' in sys.modules)")
    assert done.stdout == "False\n"
    assert installed("mori-tune", "--help").returncode == 0
    assert "tunable" in installed("mori-tune", "run", "--op", "ep").stderr
    assert "MORI_EP_ROUNDS=10" in installed("mori-tune", "show", "--settings").stdout
