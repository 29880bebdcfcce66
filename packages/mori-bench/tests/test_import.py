"""`import mori_bench` costs nothing and does nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import mori_bench

CODE = """
import json, os, sys, time
before_environment, before_modules = dict(os.environ), set(sys.modules)
began = time.process_time()  # not the wall: a busy machine is not our fault
import mori_bench
seconds = time.process_time() - began
import logging, threading
outside = sorted({m.split(".")[0] for m in set(sys.modules) - before_modules} - set(sys.stdlib_module_names))
print(json.dumps({"seconds": seconds, "outside": outside, "threads": threading.active_count(),
                  "same_environment": dict(os.environ) == before_environment,
                  "handlers": len(logging.getLogger().handlers)}))
"""


def test_PK_1_import_is_quick_and_free_of_side_effects() -> None:
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(run["seconds"] for run in runs) < 0.2
    assert runs[0]["outside"] == ["mori_bench"]
    assert runs[0]["threads"] == 1
    assert runs[0]["same_environment"]
    assert runs[0]["handlers"] == 0


def test_every_public_name_exists() -> None:
    assert [name for name in mori_bench.__all__ if not hasattr(mori_bench, name)] == []


def test_the_package_declares_no_dependency() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []


def test_the_help_of_every_command() -> None:
    for command in ("compare", "sweep", "report"):
        done = subprocess.run(
            [sys.executable, "-m", "mori_bench", command, "-h"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert "usage: mori-bench" in done.stdout
