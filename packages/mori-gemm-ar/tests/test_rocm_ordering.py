"""Every obligation of the rocm protocol is needed: left out, strict mode or the result shows it
(rocm_omissions.py).

The table says what has caught each omission; one may be caught by more. The first lines leave nothing out,
and nothing may be found: neither in calls that are queued all at once nor with one rank late, with copies
that take their time and kernels whose end publishes nothing at other devices.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "rocm_omissions.py"
MISSING = [name for name in ("flydsl", "mori_sim") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}; pip install 'mori-sim[flydsl]'"),
    pytest.mark.timeout(600),
]

NOTHING_LEFT_OUT = (
    "fused-sdma",
    "split-sdma",
    "fused-lsa",
    "split-lsa",
    "fused-lsa sdma True",
    "fused-lsa sdma True fence",
    "fused-lsa fp8 sdma True True",
)
CAUGHT_BY = {
    "chunk: tiles past the caches": "rule a",
    "chunk: each wave waits for its stores": "rule a",
    "chunk: the workgroup meets": "rule a",
    "chunk: posted by the last tile": "result",
    "chunk: counted behind its bytes": "result",
    "call: counters are noted": "deadline",
    "meet: M is compared": "result",
    "scatter: counted behind its bytes": "result",
    "drain: waits for partial sums": "result",
    "drain: tells the peers (lsa)": "deadline",
    "drain: waits for partial sums (lsa)": "result",
    "push: rows past the caches": "rule a",
    "push: codes past the caches": "rule a",
    "push: each wave waits for its stores": "rule a",
    "push: the workgroup meets": "rule a",
    "push: posted by the last workgroup": "result",
    "push: counted behind its bytes": "result",
    "push (fence): writes back its L2": "rule a",
    "push (fence): each wave waits for its stores": "rule a",
    "push (fence): the workgroup meets": "rule a",
    "gather: counted behind its bytes": "result",
    "gather: waits for finished rows": "result",
    "gather: waits for its own puts": "result",
    "pull: tells the peers": "deadline",
    "pull: waits for finished rows": "result",
    "drain: tiles in peers past the caches (lsa)": "rule c",
}


@functools.cache
def outcome(folder: Path) -> dict[str, str]:
    """By name, how it was noticed, or "nobody"."""
    report = folder / "report.jsonl"
    command = [
        *(sys.executable, "-m", "mori_sim", "run", "--devices", "2", "--coherence", "strict"),
        *("--schedule", "random", "--seed", "1", "--report", str(report)),
        *("--", sys.executable, str(PROGRAM), str(report)),
    ]
    settings = {"MORI_SIM_KERNEL_END": "agent", "MORI_SIM_COPY_DELAY_US": "30000"}
    done = subprocess.run(
        command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert "Traceback" not in done.stdout, done.stdout[-4000:]
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("LEFT OUT\t")]
    return {name: how for _, name, how in lines}


@pytest.fixture(scope="module")
def caught(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return outcome(tmp_path_factory.mktemp("omissions"))


@pytest.mark.parametrize("op", NOTHING_LEFT_OUT)
def test_the_protocol_as_it_is_breaks_no_rule(caught: dict[str, str], op: str) -> None:
    assert caught[f"nothing: {op}"] == "nobody"


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_an_obligation_that_is_left_out_is_noticed(caught: dict[str, str], name: str) -> None:
    assert CAUGHT_BY[name] in caught[name]


def test_ranks_with_different_m_are_told_and_nothing_else_would_tell(caught: dict[str, str]) -> None:
    assert caught["nothing: different M"] == "other M"
    assert caught["meet: M is compared"] == "result"


def test_all_obligations_are_in_the_table(caught: dict[str, str]) -> None:
    assert caught.keys() == {*CAUGHT_BY, *(f"nothing: {op}" for op in (*NOTHING_LEFT_OUT, "different M"))}
