"""`mori-bench report`: tables, Markdown, odd files, and plots where matplotlib is."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mori_bench.__main__ import main
from mori_bench.result import PREFIX


@pytest.fixture
def write(tmp_path: Path):
    """Write rows as a bench's output; give the file's name."""

    def write(rows: list[dict[str, object]], name: str = "log.txt") -> str:
        path = tmp_path / name
        path.write_text("some log\n" + "".join(PREFIX + json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_constants_stand_above_and_what_differs_in_columns(
    make_row, write, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row(us, mode=mode) for us, mode in ((1472.9, "split-sdma"), (1148.8, "fused-sdma"))]
    assert main(["report", write(rows)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "gemm_ar"
    assert "world_size=8" in out[1]
    assert "m=1024" in out[1]
    assert out[2].split()[:2] == ["mode", "max_rank_time_us"]
    assert out[4].split()[:2] == ["split-sdma", "1472.9"]
    assert out[5].split()[:2] == ["fused-sdma", "1148.8"]


def test_runs_of_one_configuration_are_merged_with_their_spread(
    make_row, write, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row(us) for us in (100, 104, 102)]
    main(["report", write(rows), "--columns", "max_rank_time_us,runs,spread_pct,min_us,max_us"])
    numbers = capsys.readouterr().out.splitlines()[4].split()
    assert numbers == ["102.0", "3", "3.92", "99.0", "105.0"]


def test_a_slow_run_is_told_and_not_averaged_in(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(us) for us in (100, 180, 104, 102)]
    main(["report", write(rows), "--columns", "max_rank_time_us,runs,max_us,marks"])
    assert capsys.readouterr().out.splitlines()[4].split(maxsplit=3) == [
        "102.0",
        "3",
        "105.0",
        "1 slow left out",
    ]


def test_two_runs_have_no_spread(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", write([make_row(100), make_row(104)]), "--columns", "max_rank_time_us,spread_pct"])
    assert capsys.readouterr().out.splitlines()[4].split() == ["102.0", "–"]


def test_an_unvalidated_result_is_shown_apart_and_fails(
    make_row, write, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row(100), make_row(50, validated=False, fault="one_nan")]
    assert main(["report", write(rows)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "NO" in lines[-2]
    assert "broken on purpose" in lines[-2]
    assert "100.0" in lines[-3]


def test_a_valid_and_an_invalid_run_are_never_merged(
    make_row, write, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        [
            "report",
            write([make_row(100), make_row(50, validated=False)]),
            "--columns",
            "max_rank_time_us,validated",
        ]
    )
    assert [line.split() for line in capsys.readouterr().out.splitlines()[4:6]] == [
        ["100.0", "yes"],
        ["50.0", "NO"],
    ]


def test_settings_that_differ_keep_rows_apart(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(100, settings={"blocks": 8}), make_row(90, settings={"blocks": 16})]
    main(["report", write(rows)])
    out = capsys.readouterr().out
    assert "blocks" in out
    assert "100.0" in out
    assert "90.0" in out


def test_one_table_per_op(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(1), make_row(2, op="ep_dispatch", shape={"tokens": 4}), make_row(3, mode="b")]
    main(["report", write(rows)])
    out = capsys.readouterr().out
    assert out.index("gemm_ar") < out.index("ep_dispatch")
    assert out.count("max_rank_time_us") == 2


def test_markdown(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", "--markdown", write([make_row(1.5), make_row(3, mode="a|b")])])
    out = capsys.readouterr().out
    assert "## gemm_ar" in out
    assert "| mode | max_rank_time_us |" in out
    assert "a\\|b" in out


def test_an_ops_own_numbers_get_columns(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", write([make_row(1, extra={"wire_gbps": 470.25})])])
    assert "470.2" in capsys.readouterr().out


def test_odd_files(make_row, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = PREFIX + json.dumps(make_row(123.4, mode="火事"))
    mixed = tmp_path / "火.txt"
    mixed.write_bytes(
        b"\xff\xfe\0 binary\n" + good.encode() + b"\n" + good[:200].encode() + b"\n{not ours}\n"
    )
    empty = tmp_path / "empty"
    empty.touch()
    assert main(["report", str(mixed), str(empty)]) == 1
    shown = capsys.readouterr()
    assert "123.4" in shown.out
    assert "火事" in shown.out
    assert f"{mixed}, line 3: not strict JSON" in shown.err
    assert f"{empty}: no results in it" in shown.err


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "No such file" in err
    assert "Is a directory" in err


def test_an_incomplete_row_is_shown_with_a_complaint(write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", write([{"op": "old", "max_rank_time_us": 5.0, "validated": True}])]) == 0
    shown = capsys.readouterr()
    assert "5.00" in shown.out
    assert "not a complete result: backend is missing" in shown.err


def test_an_unknown_column_lists_the_known(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", write([make_row()]), "--columns", "speed"]) == 2
    assert "no row has a field 'speed'; there are " in capsys.readouterr().err


def test_standard_input(
    make_row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(make_row(7.25)) + "\n"))
    assert main(["report", "-"]) == 0
    assert "7.25" in capsys.readouterr().out


def test_a_plot_without_the_extra_names_the_extra(
    make_row, write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", write([make_row()]), "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'mori-bench[plot]'" in capsys.readouterr().err


def test_a_plot_of_another_kind_is_refused(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", write([make_row()]), "--plot", "x.pdf"]) == 2
    assert "x.pdf: a plot is .png or .svg" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots(make_row, write, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    rows = [
        make_row(m * (1 + (mode == "a")), mode=mode, shape={"m": m, "n": 8})
        for m in (1, 16, 256)
        for mode in "ab"
    ]
    target = tmp_path / f"picture{suffix}"
    assert main(["report", write(rows), "--plot", str(target)]) == 0
    start = target.read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start
    assert main(["report", write(rows), "--plot", str(target), "--x", "mode"]) == 0


def test_a_plot_that_would_hide_results_is_refused(
    make_row, write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    rows = [make_row(1, mode=mode, shape={"m": m, "n": 8}) for m in (1, 2) for mode in "ab"]
    assert main(["report", write(rows), "--plot", str(tmp_path / "x.svg"), "--x", "m", "--by", "n"]) == 2
    assert "has several results for one shape.m: add mode to --by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--x", "m"], "need --plot FILE"),
        (["--plot", "/no/such/folder/x.png"], "there is no folder /no/such/folder"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_read(
    make_row, write, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", write([make_row()]), *options]) == 2
    shown = capsys.readouterr()
    assert problem in shown.err
    assert shown.out == ""


def test_a_column_of_one_op_is_empty_in_another(make_row, write, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(1, extra={"wire_gbps": 3.5}), make_row(2, op="ep_dispatch")]
    assert main(["report", write(rows), "--columns", "mode,wire_gbps"]) == 0
    assert "–" in capsys.readouterr().out


def test_a_terminal_without_our_characters(make_row, write) -> None:
    command = [sys.executable, "-m", "mori_bench", "report", write([make_row(1), make_row(2, mode="火")])]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert "split-sdma" in done.stdout
