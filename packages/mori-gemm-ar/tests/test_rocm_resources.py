"""Registers, LDS, scratch and spills of every kernel that this target ships, compiled anew."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

missing = [name for name in ("flydsl", "mori_sim") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"needs {', '.join(missing)}: pip install flydsl==0.5.0 mori-sim"
)
TARGET = Path(importlib.util.find_spec("mori_gemm_ar").origin).parent / "targets" / "rocm"
REWRITE = "to rewrite it: mori-sim run -- python -m mori_gemm_ar.targets.rocm.resources --write"


def test_the_table_is_what_is_compiled_and_nothing_spills():
    command = [sys.executable, "-m", "mori_gemm_ar.targets.rocm.resources"]
    node = [sys.executable, "-m", "mori_sim", "run", "--"]
    done = subprocess.run([*node, *command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found, listed = done.stdout.splitlines(), (TARGET / "resources.txt").read_text().splitlines()
    assert [line for line in found if line not in listed] == [], REWRITE
    assert found == listed, REWRITE


def test_every_kernel_of_the_sources_is_in_the_table():
    sources = "".join(path.read_text() for path in TARGET.glob("*.py") if path.name != "kernel.py")
    names = re.findall(r"@flyc\.kernel(?:\(.*\))?\n    def (\w+)\(", sources)
    listed = {line.split()[0] for line in (TARGET / "resources.txt").read_text().splitlines()[1:]}
    assert {name.replace("reduce_push", "reduce") for name in names} == listed
