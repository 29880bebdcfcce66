"""A result line says exactly what ran, in strict JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mori_bench import Result, check_row, problems, results_in
from mori_bench.result import FIELDS, PREFIX


def test_BE_2_the_line_holds_every_field_and_parses(make_row, capsys: pytest.CaptureFixture[str]) -> None:
    row = make_row(settings={"pull_blocks": 64, "fuse_quantize": False}, extra={"wire_bytes": 205520896})
    assert FIELDS.keys() <= row.keys()
    assert problems(row) == []
    text = json.dumps(row, allow_nan=False)
    assert json.loads(text) == row
    assert row["settings"] == {"pull_blocks": 64, "fuse_quantize": False}
    assert row["shape"] == {"m": 1024, "n": 7168}
    assert row["max_rank_time_us"] == row["median_us"] == 100.0
    assert row["rank_us"] == [100.0]
    assert row["slow_us"] == []
    assert row["versions"]["mori-bench"]


def result(**changes: object) -> Result:
    fields: dict[str, object] = {
        "op": "x",
        "backend": "host",
        "device": "cpu",
        "world_size": 2,
        "mode": "a",
        "shape": {"m": 1},
        "dtype": {},
        "timing": None,
        "validated": True,
        "rel_l2": 0.01,
    }
    return Result(**{**fields, **changes})  # type: ignore[arg-type]


def test_BE_2_two_modes_give_two_lines_that_share_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    result(mode="a", rel_l2=0.01, settings={"blocks": 1}).emit()
    result(mode="b", rel_l2=0.02, settings={"blocks": 2}).emit()
    first, second = results_in(capsys.readouterr().out.splitlines())
    assert (first["mode"], first["rel_l2"], first["settings"]) == ("a", 0.01, {"blocks": 1})
    assert (second["mode"], second["rel_l2"], second["settings"]) == ("b", 0.02, {"blocks": 2})


def test_emit_prints_and_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.jsonl"
    row = result().emit(file)
    result(mode="b").emit(file)
    printed = capsys.readouterr().out.splitlines()
    assert all(line.startswith(PREFIX) for line in printed)
    assert json.loads(printed[0][len(PREFIX) :]) == row
    assert [json.loads(line)["mode"] for line in file.read_text().splitlines()] == ["a", "b"]


def test_BE_2_byte_counts_are_whole_numbers_at_any_depth() -> None:
    with pytest.raises(ValueError, match=r"wire_bytes is 1\.5: byte counts are whole numbers"):
        result(extra={"wire_bytes": 1.5}).row()
    with pytest.raises(ValueError, match=r"settings\.window_bytes"):
        result(settings={"window_bytes": 1e6}).row()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_json_has_not_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"gbps is .*JSON has no such number"):
        result(extra={"gbps": bad}).row()


def test_objects_that_json_has_not_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="extra_thing is a object"):
        result(extra={"extra_thing": object()}).row()


def test_BE_1_a_nan_error_is_written_as_null_and_cannot_be_validated() -> None:
    row = result(rel_l2=float("nan"), validated=False).row()
    assert row["rel_l2"] is None
    with pytest.raises(ValueError, match="validated is true with neither"):
        result(rel_l2=float("nan"), validated=True).row()


def test_BE_1_validated_needs_an_error_measure_of_this_run() -> None:
    with pytest.raises(ValueError, match="validated is true with neither"):
        result(rel_l2=None).row()
    assert result(rel_l2=None, mismatched_rows=0).row()["validated"] is True


def test_extra_fields_cannot_hide_the_common_ones() -> None:
    with pytest.raises(ValueError, match=r"'mode'.*names of fields that every row has"):
        result(extra={"mode": "other"}).row()


def test_a_broken_bench_says_so_in_its_row() -> None:
    assert result(validated=False, fault="one_nan").row()["broken_on_purpose"] == "one_nan"
    assert "broken_on_purpose" not in result().row()


def test_the_schema_check_names_everything_that_is_wrong(make_row) -> None:
    row = make_row()
    del row["commit"]
    row["world_size"] = "8"
    row["validated"] = 1
    row["reps"] = True
    found = problems(row)
    assert "commit is missing" in found
    assert "world_size is '8'" in found
    assert "validated is 1" in found
    assert "reps is True" in found
    with pytest.raises(ValueError, match="commit is missing; "):
        check_row(row)


def test_lines_of_other_output_are_passed_over(make_row) -> None:
    lines = ["hello", "[rank0]: RESULT_JSON " + json.dumps(make_row()), "RESULT_JSO", ""]
    assert len(results_in(lines)) == 1
