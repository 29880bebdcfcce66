"""Slots with real processes: whatever a candidate does costs its own slot, and the report says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
FAULTY = ("run", "--op", "toy_op.faulty:FAULTY")


def alive(marker: str) -> list[str]:
    """Command lines of processes with this environment variable's value, as /proc shows them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


def until_none_alive(marker: str, limit_s: float = 30.0) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (found := alive(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_TU_3_each_fault_costs_its_slot_and_is_reported(cli: Cli, tmp_path: Path) -> None:
    began = time.monotonic()
    done = cli(*FAULTY, "--limit", "2", "--save", MARK=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 180
    assert "winner what=quick, average 50.00 us" in done.stdout
    assert "what=raises: raised (rank" in done.stdout
    assert "ValueError: x" in done.stdout
    assert "died by signal 9 (SIGKILL)" in done.stdout
    assert "what=hangs: hung (rank 0): timed out: no answer from all ranks within 2 s" in done.stdout
    assert "last words of the dying" in done.stderr
    assert "ADDED toy-faulty run kind=x size=1: what=quick" in done.stdout
    assert until_none_alive(str(tmp_path)) == [], "every process of the run has ended"


def test_TU_3_all_failing_saves_nothing_and_exits_non_zero(cli: Cli, tmp_path: Path) -> None:
    began = time.monotonic()
    done = cli(*FAULTY, "--what", "raises,dies,dies-with-child", "--save", MARK=str(tmp_path))
    assert done.returncode == 1
    assert time.monotonic() - began < 180, "a death is noticed at once, though a child holds the pipes open"
    assert "all 3 candidates failed" in done.stderr
    assert "nothing saved" in done.stderr
    assert "signal 11 (SIGSEGV)" in done.stderr
    assert not (tmp_path / "rules").exists()
    assert not list((tmp_path / "journals").iterdir()), "the next attempt starts over"
    assert until_none_alive(str(tmp_path)) == [], "the child that a dead candidate left behind has ended too"


def test_TU_5_wrong_output_never_wins_however_fast(cli: Cli) -> None:
    """One returns zeros at once, one is right first and wrong when repeated."""
    done = cli(*FAULTY, "--what", "zeros,late-zeros,slow")
    assert done.returncode == 0
    assert "winner what=slow" in done.stdout
    assert "what=zeros: wrong (rank" in done.stdout
    assert "what=late-zeros: wrong (rank" in done.stdout


def test_TU_2_a_fault_on_one_rank_drops_the_candidate_on_all(cli: Cli) -> None:
    began = time.monotonic()
    done = cli(*FAULTY, "--what", "raises-on-1,dies-on-1,zeros-on-1,refused-on-1,quick", "--limit", "300")
    assert done.returncode == 0, done.stderr
    assert "what=raises-on-1: raised (rank 1): ValueError: x" in done.stdout
    assert "what=dies-on-1: died (rank 1)" in done.stdout
    assert "what=zeros-on-1: wrong (rank 1)" in done.stdout
    assert "what=refused-on-1: refused (rank 1)" in done.stdout
    assert time.monotonic() - began < 180, "rank 0, which waits for rank 1, is not waited for"


def test_a_rank_that_dies_after_its_answer_is_noticed_by_the_next_question(cli: Cli) -> None:
    """It dies while rank 0 still measures. The next candidate is not to blame and nobody waits."""
    began = time.monotonic()
    done = cli(*FAULTY, "--what", "rank-1-dies-after,quick", "--limit", "300")
    assert done.returncode == 0, done.stderr
    assert "winner what=quick" in done.stdout
    assert time.monotonic() - began < 180


def test_refusals_and_spoilt_processes(cli: Cli) -> None:
    done = cli(*FAULTY, "--what", "quick,refused,spoilt,slow")
    assert done.returncode == 0
    assert "what=refused: refused" in done.stdout
    assert "1 of 4 candidates failed" in done.stdout, "the spoilt one works in new processes"
    assert "tried again in new processes" in done.stderr


def test_ranks_that_see_different_devices_are_named(cli: Cli) -> None:
    done = cli(*FAULTY, "--what", "quick", TOY_UNITS_OF_RANK_1="3")
    assert done.returncode == 2
    assert "ranks differ in their device" in done.stderr
    assert "rank 1 has" in done.stderr


def test_a_tunable_that_cannot_be_loaded_is_an_error(cli: Cli) -> None:
    for name, said in [
        ("nosuch", "mori-nosuch"),
        ("toy_op.op:NOT", "cannot be loaded"),
        ("os:path", "lacks"),
    ]:
        done = cli("run", "--op", name)
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_driver(toy_env: dict[str, str], tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mori_tune", *FAULTY, "--what", "quick,hangs", "--limit", "100"],
        env={**toy_env, "MARK": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background inherits that SIGINT is ignored; this one is to be interrupted.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for_visits(tmp_path, 2)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if number != signal.SIGKILL else -9)
    assert ("resumes" in said) == (number != signal.SIGKILL)
    assert until_none_alive(str(tmp_path)) == []


def test_resumption_after_kill_9(toy_env: dict[str, str], tmp_path: Path, cli: Cli) -> None:
    """Killed in the middle of a slot: what was measured counts, the candidate under test is tried again."""
    what = ("--what", "slow,quick,raises,hangs,refused", "--limit", "2")
    process = subprocess.Popen(
        [sys.executable, "-m", "mori_tune", *FAULTY, *what],
        env=toy_env,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_visits(tmp_path, 5)  # slow, slow (canary), quick, raises, and a canary: it now hangs
    process.kill()
    process.wait()
    (journal,) = (tmp_path / "journals").iterdir()
    with open(journal, "a") as file:
        file.write('{"visit": 3, "cut o')
    done = cli(*FAULTY, *what)
    assert done.returncode == 0, done.stderr
    assert "resuming a sweep" in done.stderr
    assert "from the journal" in done.stdout
    assert done.stderr.count("ValueError") == 0, "what had failed is not tried again"
    assert "ValueError: x" in done.stdout, "but still reported"
    assert "what=hangs: hung" in done.stdout
    assert "winner what=quick" in done.stdout
    assert not list((tmp_path / "journals").iterdir())


def test_fresh_starts_over(toy_env: dict[str, str], tmp_path: Path, cli: Cli) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mori_tune", *FAULTY, "--what", "slow,hangs"],
        env=toy_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_visits(tmp_path, 2)
    process.kill()
    process.wait()
    done = cli(*FAULTY, "--what", "slow,hangs", "--limit", "1", "--fresh")
    assert "from the journal" not in done.stdout
    assert done.returncode == 1 or "winner what=slow" in done.stdout


def wait_for_visits(tmp_path: Path, number: int, limit_s: float = 60.0) -> None:
    """Until that many visits are in the journal."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        texts = [file.read_text() for file in (tmp_path / "journals").glob("*.jsonl")]
        lines = [line for text in texts for line in text.split("\n")[1:-1]]
        if sum("visit" in json.loads(line) for line in lines) >= number:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {number} visits within {limit_s} s")
