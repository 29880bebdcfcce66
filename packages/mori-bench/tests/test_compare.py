"""`mori-bench compare`, with scripted runs instead of processes, and once with real ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from mori_bench.__main__ import main
from mori_bench.commands import Outcome


class Script:
    """Stands in for `run_command`: a command's rows come from the list of its times."""

    def __init__(self, rows_of: dict[str, Iterator[list[dict[str, object]]]]) -> None:
        self.rows_of = rows_of
        self.order: list[str] = []

    def __call__(self, command: Sequence[str], limit_s: float | None) -> Outcome:
        self.order.append(command[0])
        rows = next(self.rows_of[command[0]])
        return Outcome(tuple(command), rows, 1.0, None)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, make_row):
    """Compare "a" with "b", whose runs take the given times; the first of each is the discarded one."""

    def run(a: list[float], b: list[float], *options: str, of_a: object = None, of_b: object = None):
        script = Script(
            {
                "a": iter([[make_row(us, **(of_a or {}))] for us in a]),
                "b": iter([[make_row(us, **(of_b or {}))] for us in b]),
            }
        )
        code = _main_with(monkeypatch, script, ["compare", "a", "b", *options])
        return code, script.order

    return run


def _main_with(monkeypatch: pytest.MonkeyPatch, run_one: object, arguments: list[str]) -> int:
    import functools

    from mori_bench import compare as module

    monkeypatch.setattr(module, "run", functools.partial(module.run, run_one=run_one))
    return main(arguments)


def test_the_runs_alternate_and_the_first_round_is_discarded(
    compare, capsys: pytest.CaptureFixture[str]
) -> None:
    code, order = compare([999, 100, 101, 102, 101], [1, 200, 201, 202, 203], "--rounds", "4")
    assert code == 0
    assert "".join(order) == "ab" + "ba" + "ab" + "ba" + "ab"
    out = capsys.readouterr().out
    assert "A against B: 2.00x faster (gap 100.5 us, spread 3.0 us)" in out
    assert "999" not in out


def test_a_gap_below_the_spread_is_no_difference(compare, capsys: pytest.CaptureFixture[str]) -> None:
    compare([0, 100, 110, 105], [0, 103, 104, 106], "--rounds", "3")
    assert "A against B: no difference (gap 1.0 us, spread 10.0 us)" in capsys.readouterr().out


def test_a_slow_run_is_marked_and_left_out(compare, capsys: pytest.CaptureFixture[str]) -> None:
    compare([0, 100, 100, 150, 100], [0, 200, 200, 200, 200], "--rounds", "4")
    out = capsys.readouterr().out
    assert "2.00x faster (gap 100.0 us, spread 0.0 us); 1 slow run(s) of A left out" in out


def test_different_problems_are_refused_unless_the_field_is_named(
    compare, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"shape": {"m": 2048, "n": 7168}}
    code, order = compare([1, 1], [1, 1], of_b=other)
    assert code == 2
    assert "m is 1024 in A, 2048 in B. To compare them all the same, say --vary m" in capsys.readouterr().err
    assert len(order) == 2  # found out after the first round
    code, _ = compare([0, 100, 100, 100], [0, 200, 200, 200], "--rounds", "3", "--vary", "m", of_b=other)
    assert code == 0
    assert "A / B differ in m: 1024 / 2048" in capsys.readouterr().out


def test_different_dtypes_are_refused_too(compare, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = compare([1, 1], [1, 1], of_b={"dtype": {"quant": "ptpc"}})
    assert code == 2
    assert "quant is 'blockscale' in A, 'ptpc' in B" in capsys.readouterr().err


def test_mode_and_settings_may_differ_and_are_told(compare, capsys: pytest.CaptureFixture[str]) -> None:
    compare(
        [0, 2, 2, 2], [0, 1, 1, 1], "--rounds", "3", of_b={"mode": "fused-sdma", "settings": {"blocks": 8}}
    )
    out = capsys.readouterr().out
    assert "differ in mode: split-sdma / fused-sdma" in out
    assert "differ in blocks: None / 8" in out


def test_a_field_that_does_not_vary_is_noted(compare, capsys: pytest.CaptureFixture[str]) -> None:
    compare([0, 1, 1, 1], [0, 1, 1, 1], "--rounds", "3", "--vary", "m")
    assert "note: --vary shape.m, but it is 1024 on both sides" in capsys.readouterr().err


def test_an_unknown_field_to_vary_is_refused(compare, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = compare([1, 1], [1, 1], "--vary", "mm")
    assert code == 2
    assert "no row has a field 'mm'" in capsys.readouterr().err


def test_several_rows_are_paired_by_what_they_are_about(
    monkeypatch: pytest.MonkeyPatch, make_row, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(scale: float, modes: str) -> list[dict[str, object]]:
        return [make_row(scale * (1 + index), mode=mode) for index, mode in enumerate(modes)]

    script = Script({"a": iter([rows(100, "xy")] * 4), "b": iter([rows(300, "xy")] * 4)})
    assert _main_with(monkeypatch, script, ["compare", "a", "b", "--rounds", "3"]) == 0
    out = capsys.readouterr().out
    assert out.index("mode=x") < out.index("mode=y")
    assert out.count("3.00x faster") == 2

    script = Script({"a": iter([rows(100, "xy")]), "b": iter([rows(300, "xz")])})
    assert _main_with(monkeypatch, script, ["compare", "a", "b"]) == 2
    assert "only A has mode=y; only B has mode=z" in capsys.readouterr().err

    script = Script({"a": iter([rows(100, "xx")]), "b": iter([rows(300, "xx")])})
    assert _main_with(monkeypatch, script, ["compare", "a", "b"]) == 2
    assert "A has rows that differ only in settings" in capsys.readouterr().err


def test_interrupted_it_still_tells_what_it_has(
    monkeypatch: pytest.MonkeyPatch, make_row, capsys: pytest.CaptureFixture[str]
) -> None:
    def times(us: float, rounds: int) -> Iterator[list[dict[str, object]]]:
        for _ in range(rounds):
            yield [make_row(us)]
        raise KeyboardInterrupt

    script = Script({"a": times(100, 5), "b": times(300, 4)})
    assert _main_with(monkeypatch, script, ["compare", "a", "b"]) == 130
    shown = capsys.readouterr()
    assert "interrupted after 3 whole rounds" in shown.err
    assert "3.00x faster" in shown.out


def test_a_failing_command_is_told_with_its_cause(
    bench: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = shlex.join(bench), shlex.join([*bench, "--fail-at", "1024"])
    assert main(["compare", good, bad, "--rounds", "3"]) == 1
    assert "compare: B failed: exit code 1: no kernel for this m: 火" in capsys.readouterr().err


@pytest.mark.parametrize("commands", [["", "b"], ["'unbalanced", "b"]])
def test_what_is_no_command_is_refused(commands: list[str]) -> None:
    assert main(["compare", *commands]) == 2


def test_real_processes_and_the_json_outcome(
    bench: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = shlex.join([*bench, "--us", "100"]), shlex.join([*bench, "--us", "300"])
    file = tmp_path / "outcome.jsonl"
    assert main(["compare", a, b, "--rounds", "3", "--json", str(file)]) == 0
    outcome = json.loads(file.read_text())
    assert (outcome["verdict"], outcome["ratio"], outcome["spread_us"]) == ("faster", 3.0, 0.0)
    assert outcome["a"]["times_us"] == [100, 100, 100]


def test_an_outcome_file_that_cannot_be_written_is_refused_before_the_runs(bench: list[str]) -> None:
    assert main(["compare", "no-such-bench", "no-such-bench", "--json", "/no/such/folder/x"]) == 2
