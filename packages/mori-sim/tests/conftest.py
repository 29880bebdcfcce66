"""Programs of tests/programs run as a user runs them: in processes of their own, below `mori-sim run`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from mori_sim.inspect_code import disassembly

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(Path(__file__).parent))  # the tests share modules that lie beside them


@dataclass
class Outcome:
    code: int
    output: str  # stdout and stderr

    def ok(self) -> set[str]:
        """The names in lines `ok NAME ...`."""
        return {line.split()[1] for line in self.output.splitlines() if line.startswith("ok ")}


def run_program(
    *arguments: object, options: tuple[str, ...] = (), timeout_s: float = 120, **variables: str
) -> Outcome:
    command = [sys.executable, "-m", "mori_sim", "run", *options, "--", sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=PROGRAMS,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return Outcome(done.returncode, done.stdout)


@pytest.fixture(scope="session")
def program() -> Callable[..., Outcome]:
    return run_program


@dataclass
class Examples:
    outcome: Outcome
    code: Path  # the folder with the code objects they loaded
    report: Path

    def code_object(self, kernel: str, holding: str = "") -> Path:
        """The code object of a kernel, of several the one that holds a certain instruction."""
        files = sorted(self.code.glob(f"{kernel}_0-*.hsaco"))
        return next(f for f in files if holding in disassembly(f, None))


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    """All FlyDSL kernels of examples.py, compiled and run once; other tests use the code objects."""
    if importlib.util.find_spec("flydsl") is None:
        pytest.skip("flydsl is not installed: pip install 'mori-sim[flydsl]'")
    code, report = tmp_path_factory.mktemp("code"), tmp_path_factory.mktemp("report") / "report.jsonl"
    options = ("--devices", "8", "--save-code", str(code), "--report", str(report), "--counters")
    return Examples(run_program("examples.py", options=options, timeout_s=200), code, report)
