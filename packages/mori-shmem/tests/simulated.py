"""Programs of tests/rocm, run as a person without the hardware runs them: below `mori-sim run`.

mori-shmem does not depend on mori-sim, nor on flydsl; where one of them is missing these tests are skipped.
The group "sim" of pyproject.toml brings both.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "rocm"
MISSING = [name for name in ("mori_sim", "flydsl") if importlib.util.find_spec(name) is None]
needs_node = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: uv sync --package mori-shmem --group sim"
)


@dataclass
class Outcome:
    code: int
    output: str  # stdout and stderr

    @property
    def ok(self) -> list[str]:
        """The names in lines `ok NAME`."""
        return [line.split()[1] for line in self.output.splitlines() if line.startswith("ok ")]


def simulate(
    *command: object, devices: int, options: Sequence[str] = (), timeout_s: float = 200, **variables: str
) -> Outcome:
    """`mori-sim run` of a program of tests/rocm; `variables` are of the environment."""
    run = [sys.executable, "-m", "mori_sim", "run", "--devices", str(devices), *options, "--"]
    program = [sys.executable, *map(str, command)]
    env = os.environ | {"PYTHONPATH": str(PROGRAMS), "MORI_SHMEM_BACKEND": "rocm"} | variables
    done = subprocess.run(
        [*run, *program],
        cwd=PROGRAMS, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout)


STRICT = ("--coherence", "strict")
