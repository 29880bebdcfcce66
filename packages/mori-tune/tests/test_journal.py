"""The journal: what a kill may leave behind, and what must not be taken for this sweep's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mori_tune import LaunchError
from mori_tune.journal import Journal

KEY = {"op": "x", "candidates": ["a", "b"]}


def written(folder: Path, *events: dict[str, Any]) -> Path:
    journal = Journal(folder, KEY)
    journal.open()
    for event in events:
        journal.write(event)
    journal.close()
    return journal.path


@pytest.mark.parametrize("left", [b'{"visit": 2', b"\x00\xff garbage\n", b"[1]\n", b"3\n", b'{"visit": 2}'])
def test_half_a_line_is_cut_off_and_the_rest_goes_on(tmp_path: Path, left: bytes) -> None:
    path = written(tmp_path, {"visit": 0}, {"visit": 1})
    path.write_bytes(path.read_bytes() + left)
    journal = Journal(tmp_path, KEY)
    assert journal.events == [{"visit": 0}, {"visit": 1}]
    journal.open()
    journal.write({"visit": 7})
    journal.close()
    assert Journal(tmp_path, KEY).events == [{"visit": 0}, {"visit": 1}, {"visit": 7}]


def test_another_sweeps_journal_does_not_count(tmp_path: Path) -> None:
    path = written(tmp_path, {"visit": 0})
    assert Journal(tmp_path, {**KEY, "candidates": ["a"]}).events == []
    path.write_text(path.read_text().replace('"a"', '"z"'))
    assert Journal(tmp_path, KEY).events == []


def test_dropped_events_are_gone_from_the_file(tmp_path: Path) -> None:
    written(tmp_path, {"visit": 0}, {"visit": 1})
    journal = Journal(tmp_path, KEY)
    journal.keep(1)
    journal.open()
    journal.close()
    assert Journal(tmp_path, KEY).events == [{"visit": 0}]


def test_two_runs_of_one_sweep_do_not_mix(tmp_path: Path) -> None:
    first, second = Journal(tmp_path, KEY), Journal(tmp_path, KEY)
    first.open()
    with pytest.raises(LaunchError, match="another run"):
        second.open()
    first.write({"visit": 0})
    first.done()
    assert list(tmp_path.iterdir()) == []


def test_PK_5_a_folder_that_cannot_be_written_costs_resumption_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "journals", KEY)
    journal.open()
    journal.write({"visit": 0})
    journal.done()
    assert "cannot be resumed" in caplog.text
