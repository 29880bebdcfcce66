"""`mori-bench sweep`: the grid, the log that survives anything, the progress bar."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mori_bench.__main__ import main
from mori_bench.progress import Progress, duration
from mori_bench.sweep import UsageError, grid


def commands(tokens: str) -> list[str]:
    return [" ".join(cell.command[1:]) for cell in grid(tokens.split(), ["true"])]


def test_the_last_option_turns_fastest() -> None:
    assert commands("-m 1,2 --mode a,b") == [
        "-m 1 --mode=a",
        "-m 1 --mode=b",
        "-m 2 --mode=a",
        "-m 2 --mode=b",
    ]


def test_flags_commas_and_negative_values() -> None:
    assert commands("--fuse @on,@off") == ["--fuse", ""]
    assert commands("--tokens 4\\,8,16") == ["--tokens=4,8", "--tokens=16"]
    assert commands("--bias=-1,-2") == ["--bias=-1", "--bias=-2"]


def test_no_grid_is_one_cell() -> None:
    assert commands("") == [""]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ("1,2", "'1,2' is not an option"),
        ("-m", "-m has no values; if it takes none, write -m @on,@off"),
        ("-m 1,,2", "an empty value"),
        ("-m 1,1", "given twice"),
        ("-m 1 -m 2", "-m is given twice"),
        ("-- 1", "'--' is not an option"),
    ],
)
def test_a_grid_that_cannot_be_meant_is_refused(tokens: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        grid(tokens.split(), ["true"])


def test_a_command_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path, capsys) -> None:
    out = tmp_path / "r.jsonl"
    assert main(["sweep", "--out", str(out), "-m", "1", "--", "no-such-bench"]) == 2
    assert main(["sweep", "--out", str(out), "-m", "1"]) == 2
    err = capsys.readouterr().err
    assert "there is no command 'no-such-bench'" in err
    assert "no command: write it after `--`" in err
    assert not out.exists()


def sweep(out: Path, bench: list[str], *options: str, m: str = "1,2,4") -> int:
    return main(["sweep", "--out", str(out), "-m", m, *options, "--", *bench])


def records(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def done(out: Path) -> list[tuple[str, str]]:
    return [(r["sweep_cell"]["-m"], r["status"]) for r in records(out) if "sweep_cell" in r]


def test_every_cell_leaves_its_rows_and_a_closing_line(tmp_path: Path, bench: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    assert sweep(out, bench) == 0
    assert done(out) == [("1", "ok"), ("2", "ok"), ("4", "ok")]
    rows = [r for r in records(out) if "op" in r]
    assert [(r["shape"]["m"], r["sweep"]) for r in rows] == [(m, {"-m": str(m)}) for m in (1, 2, 4)]


def test_what_is_done_is_skipped_and_what_failed_is_tried_again(
    tmp_path: Path, bench: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    failing = [*bench, "--fail-at", "2"]
    assert sweep(out, failing) == 1
    shown = capsys.readouterr()
    assert "2 of 3 cells ok" in shown.out
    assert "failed: m=2\n        exit code 1: no kernel for this m: 火" in shown.out
    assert "2/3  m=2  FAILED: exit code 1" in shown.err

    assert sweep(out, failing, "--skip-failed") == 1
    assert "failed in an earlier run: m=2" in capsys.readouterr().out
    assert len(done(out)) == 3

    assert sweep(out, failing) == 1
    assert "2 of 3 cells were done before" in capsys.readouterr().err
    assert done(out)[3:] == [("2", "failed")]


def test_another_command_is_another_cell(tmp_path: Path, bench: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    sweep(out, bench, m="1")
    sweep(out, [*bench, "--us", "7"], m="1")
    assert len(done(out)) == 2


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_end_is_cut_off_and_its_cell_runs_again(
    tmp_path: Path, bench: list[str], cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    sweep(out, bench)
    whole = out.read_bytes()
    out.write_bytes(whole[:-cut])
    assert sweep(out, bench) == 0
    assert "was cut off while it was written" in capsys.readouterr().err
    assert done(out) == [("1", "ok"), ("2", "ok"), ("4", "ok")]
    assert len([r for r in records(out) if "op" in r]) == 3


def test_zeros_at_the_end_are_a_torn_end(tmp_path: Path, bench: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    sweep(out, bench, m="1")
    with out.open("ab") as file:
        file.write(b"\0" * 512)
    assert sweep(out, bench, m="1,2") == 0
    assert done(out) == [("1", "ok"), ("2", "ok")]


@pytest.mark.parametrize("content", ["hello", "hello\nyou\n", '{"a": 1}\n', '{"op": "x"}\n{"op": "y"}\n'])
def test_somebody_elses_file_is_left_alone(
    tmp_path: Path, bench: list[str], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    out.write_text(content)
    assert sweep(out, bench) == 2
    assert out.read_text() == content
    assert "no sweep wrote" in capsys.readouterr().err


def test_a_damaged_line_in_the_middle_is_not_repaired_silently(tmp_path: Path, bench: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    sweep(out, bench)
    lines = out.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:2], lines[2][:50] + b"\n", *lines[3:]])
    out.write_bytes(damaged)
    assert sweep(out, bench) == 2
    assert out.read_bytes() == damaged


def test_dry_run_prints_the_commands_and_touches_nothing(
    tmp_path: Path, bench: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    assert sweep(out, bench, "--dry-run") == 0
    assert not out.exists()
    sweep(out, bench, m="1,2")
    out.write_bytes(out.read_bytes()[:-5])
    before = out.read_bytes()
    capsys.readouterr()
    assert sweep(out, bench, "--dry-run") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "to", "to"]
    assert out.read_bytes() == before


def test_a_cell_over_its_limit_fails_and_the_others_go_on(tmp_path: Path, bench: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    assert sweep(out, [*bench, "--sleep", "30"], "--limit-s", "0.3", m="1,2") == 1
    assert [r["cause"] for r in records(out)] == ["still running after its limit of 0.3 s"] * 2


def test_two_sweeps_cannot_write_one_file(tmp_path: Path, bench: list[str], capsys) -> None:
    import fcntl

    out = tmp_path / "r.jsonl"
    with out.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(out, bench) == 2
    assert "is in use by another sweep" in capsys.readouterr().err


def _start(out: Path, bench: list[str], sleep_s: str) -> subprocess.Popen[bytes]:
    arguments = ["sweep", "--out", str(out), "-m", "1,2,3,4", "--", *bench, "--sleep", sleep_s]
    return subprocess.Popen([sys.executable, "-m", "mori_bench", *arguments], stderr=subprocess.DEVNULL)


def _wait_for(condition: object, limit_s: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the sweep did not get there"
        time.sleep(0.01)


def test_after_kill_9_it_goes_on_where_it_was(tmp_path: Path, bench: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    started = _start(out, bench, "0.2")
    _wait_for(lambda: out.exists() and out.read_bytes().count(b'"sweep_cell"') >= 2)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    before = done(out)
    assert 2 <= len(before) < 4
    assert _start(out, bench, "0.2").wait() == 0
    assert done(out)[: len(before)] == before
    assert [m for m, _ in done(out)] == ["1", "2", "3", "4"]


def test_ctrl_c_ends_the_bench_and_keeps_what_is_done(tmp_path: Path, bench: list[str]) -> None:
    out = tmp_path / "r.jsonl"
    started = _start(out, bench, "0.3")
    _wait_for(lambda: out.exists() and b'"sweep_cell"' in out.read_bytes())
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(10) == 130
    assert done(out)[0] == ("1", "ok")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_bar_counts_and_estimates(clock) -> None:
    stream = Terminal()
    progress = Progress(8, 2, stream, clock=lambda: clock() / 1e9)
    progress.begin("m=1")
    clock.advance(30e6)
    progress.end(None)
    progress.begin("m=2")
    assert progress.line() == "[█████████░░░░░░░░░░░░░░░] 3/8  about 2 min left  m=2"
    clock.advance(30e6)
    progress.end("exit code 1")
    assert "1 failed" in progress.line()
    progress.close()
    text = stream.getvalue()
    assert "2 of 8 cells were done before" in text
    assert "4/8  m=2  FAILED: exit code 1\n" in text
    assert text.endswith("\n")


def test_without_a_terminal_each_cell_is_a_line(clock) -> None:
    stream = io.StringIO()
    progress = Progress(1, 0, stream, clock=lambda: clock() / 1e9)
    progress.begin("m=1")
    progress.end(None)
    progress.close()
    assert stream.getvalue() == "1/1  m=1  ok\n"


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (720, "12 min"), (12000, "3 h 20 min")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
