"""Running a bench: every way to fail has its cause, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mori_bench import commands
from mori_bench.commands import run_command


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def is_running(pid: int) -> bool:
    """Whether the process exists and is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_rows_are_read_from_the_output(bench: list[str]) -> None:
    outcome = run_command([*bench, "-m", "16", "--us", "12.5"])
    assert outcome.cause is None
    assert [(row["shape"]["m"], row["max_rank_time_us"]) for row in outcome.rows] == [(16, 12.5)]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (["/no/such/bench"], "cannot start /no/such/bench: No such file or directory"),
        (["/etc"], "cannot start /etc: Permission denied"),
        (python("import sys; sys.exit('no kernel: 火')"), "exit code 1: no kernel: 火"),
        (python("import sys; sys.exit(3)"), "exit code 3: nothing on stderr"),
        (python("import os; os.kill(os.getpid(), 11)"), "ended by SIGSEGV"),
        (python("print('hello')"), "it printed no RESULT_JSON line"),
        (python("print('RESULT_JSON {\"op\": ')"), "its output, line 1: not strict JSON"),
        (python("print('RESULT_JSON {\"op\": NaN}')"), "NaN is not JSON"),
        (python("import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n')"), "it printed no RESULT_JSON line"),
    ],
)
def test_every_failure_has_a_cause(command: list[str], cause: str) -> None:
    assert cause in str(run_command(command).cause)


def test_a_result_that_is_not_validated_is_a_failure(make_row) -> None:
    import json

    row = json.dumps(make_row(validated=False))
    outcome = run_command(python(f"print({'RESULT_JSON ' + row!r})"))
    assert outcome.cause == "1 of 1 results not validated"


def test_at_the_limit_the_whole_process_group_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child and its own child, which ignores the polite signal."""
    monkeypatch.setattr(commands, "GRACE_S", 0.3)
    pid_file = tmp_path / "pid"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "code = 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', code])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    outcome = run_command(python(code), limit_s=0.5)
    assert outcome.cause == "still running after its limit of 0.5 s"
    assert time.monotonic() - began < 40
    assert wait_until_gone(int(pid_file.read_text()))


def test_a_full_pipe_cannot_block(bench: list[str]) -> None:
    outcome = run_command(
        python("print('x' * 1000000); import sys; sys.stderr.write('y' * 1000000)"), limit_s=20
    )
    assert outcome.cause == "it printed no RESULT_JSON line"


def test_when_the_parent_is_killed_the_bench_ends_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    bench = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"from mori_bench.commands import run_command; run_command({python(bench)!r})"]
    )
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = int(pid_file.read_text())
    assert is_running(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until_gone(pid)
