"""Text tables."""

from __future__ import annotations

import pytest
from mori_bench import table

ROWS = [
    {"mode": "split-sdma", "m": 1024, "time_us": 1472.93, "rel_l2": 2.5051e-2, "validated": True},
    {"mode": "火", "m": 8, "time_us": 9.876, "rel_l2": None, "validated": False},
]


def test_numbers_stand_to_the_right_and_words_to_the_left() -> None:
    assert table(ROWS, ["mode", "m", "time_us", "rel_l2", "validated"]).splitlines() == [
        "mode           m  time_us     rel_l2  validated",
        "──────────  ────  ───────  ─────────  ─────────",
        "split-sdma  1024   1472.9  2.505e-02  yes",
        "火             8     9.88          –  NO",
    ]


def test_markdown_escapes_and_aligns() -> None:
    assert table([{"a": "x|y", "n": 1}], ["a", "n"], markdown=True) == "| a | n |\n|---|---:|\n| x\\|y | 1 |"


def test_a_column_that_no_row_has_is_empty() -> None:
    assert table(ROWS, ["nothing"]).splitlines()[2:] == ["–", "–"]


def test_what_would_move_the_cursor_is_not_printed() -> None:
    assert "\x1b" not in table([{"a": "\x1b[2Jgone\nnext"}], ["a"])


def test_no_rows_and_no_columns() -> None:
    assert table([], ["a"]).splitlines() == ["a", "─"]
    with pytest.raises(ValueError, match="at least one column"):
        table(ROWS, [])


def test_nested_values_are_written_flat() -> None:
    assert "m=1 n=2" in table([{"shape": {"m": 1, "n": 2}}], ["shape"])
    assert "1, 2" in table([{"list": [1, 2]}], ["list"])
