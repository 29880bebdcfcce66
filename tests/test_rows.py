"""mori-tune depends on no sibling, so what it shares with mori-bench is compared here: rows and options."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mori_bench
import pytest
from mori_bench.result import problems
from mori_tune.__main__ import make_parser

COPY = ("--op", "mori_tune.example:COPY", "--tokens", "8", "--hidden", "64", "--reps", "3")


def tune(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    """The rows that a command of mori-tune appends to its --json file."""
    home = {"MORI_TUNE_DIR": str(tmp_path / "rules"), "MORI_TUNE_JOURNALS": str(tmp_path / "journals")}
    command = [sys.executable, "-m", "mori_tune", *arguments, *COPY, "--json", str(tmp_path / "rows")]
    subprocess.run(command, env={**os.environ, **home}, timeout=60, capture_output=True)
    return [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]


@pytest.mark.timeout(120)
def test_rows_of_mori_tune_pass_the_schema_of_mori_bench(tmp_path: Path) -> None:
    rows = tune(tmp_path, "verify")  # no rule yet
    rows = tune(tmp_path, "run", "--save")
    rows = tune(tmp_path, "verify")
    assert [row["mode"] for row in rows] == ["verify-copy", "tune-copy", "verify-copy"]
    assert [row["validated"] for row in rows] == [False, True, True]
    assert [problems(row) for row in rows] == [[], [], []]


def test_the_common_options_are_there() -> None:
    common = argparse.ArgumentParser()
    mori_bench.add_common_options(common)
    wanted = set(re.findall(r"--[a-z-]+", common.format_help()))
    _, made = make_parser()
    assert {"--backend", "--world-size", "--reps", "--warmup", "--seed", "--json", "--trace"} <= wanted
    assert wanted <= set(re.findall(r"--[a-z-]+", made["run"].format_help()))
