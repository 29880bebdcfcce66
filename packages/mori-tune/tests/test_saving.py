"""Saving: what changed is always printed, a file is whole or untouched, comparisons never mislead."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from mori_tune import EP_COMBINE, EP_DISPATCH, Query, RulesError
from mori_tune.device import Device
from mori_tune.rules import saving
from mori_tune.rules.files import read_tables
from mori_tune.rules.saving import changes_between, save_rules

DEVICE = Device("rocm", "gfx942", "mi300x", 304)
FORMATS = (EP_DISPATCH, EP_COMBINE)
BY_NAME = {(f.op, f.phase): f for f in FORMATS}
HEADER = {"kernel_type": "InterNodeV1LL", "ep_size": 16}


def query(num_tokens: int = 4, topk: int | None = 8, **fields: Any) -> Query:
    key = {"dtype": "fp8", "hidden_dim": 6144, "topk": topk, "num_tokens": num_tokens, **fields}
    return Query(EP_DISPATCH, DEVICE, HEADER, key)


def values(
    block_num: int = 64, latency_us: Any = 40.0, metric: str | None = "grand_mean", **more: Any
) -> dict[str, Any]:
    found = {"block_num": block_num, "rdma_block_num": 8, "warp_per_block": 4, "latency_us": latency_us}
    return {**found, "bandwidth_gbps": 3.9, **({"bandwidth_metric": metric} if metric else {}), **more}


def save(target: Path, *entries: tuple[Query, dict[str, Any]]) -> list[str]:
    return [str(change) for change in save_rules(entries, target, FORMATS)]


def test_T4_added_then_replaced_always_with_both_figures(tmp_path: Path) -> None:
    (added,) = save(tmp_path, (query(), values()))
    assert added.startswith("ADDED ep dispatch dtype=fp8 hidden_dim=6144 topk=8 num_tokens=4: block_num=64")
    (replaced,) = save(tmp_path, (query(), values(128, 50.0)))
    assert replaced.startswith("REPLACED")
    assert "block_num=64 rdma_block_num=8 warp_per_block=4 -> block_num=128" in replaced
    assert "latency 40 -> 50 us (25.0% worse)" in replaced
    (better,) = save(tmp_path, (query(), values(128, 25.0, bandwidth_gbps=7.8)))
    assert "latency 50 -> 25 us (50.0% better)" in better
    assert "bandwidth 3.9 -> 7.8 GB/s (100.0% better)" in better
    (same,) = save(tmp_path, (query(), values(128, 25.0, bandwidth_gbps=7.8)))
    assert "(0.0% same)" in same


@pytest.mark.parametrize(
    ("old", "new", "percentage"),
    [
        ({"metric": "grand_mean"}, {"metric": "grand_mean"}, True),
        ({"metric": None}, {"metric": None}, True),  # both older than the field: comparable
        ({"metric": None}, {"metric": "grand_mean"}, False),
        ({"metric": "slowest_rank"}, {"metric": "grand_mean"}, False),
        ({"latency_us": 0, "bandwidth_gbps": 0}, {}, False),
        ({"latency_us": "fast", "bandwidth_gbps": True}, {}, False),
    ],
)
def test_T5_no_percentage_across_definitions(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], percentage: bool
) -> None:
    save(tmp_path, (query(), values(**old)))
    (text,) = save(tmp_path, (query(), values(**{"latency_us": 20.0, **new})))
    assert ("%" in text) == percentage
    assert "-> 20 us" in text
    assert ("not comparable" in text) == (old.get("metric", "grand_mean") != new.get("metric", "grand_mean"))


def test_rules_are_found_under_the_name_that_lookups_expect_and_sorted(tmp_path: Path) -> None:
    save(tmp_path, (query(32), values()), (query(4, topk=None), values()), (query(4), values()))
    (file,) = tmp_path.iterdir()
    assert file.name == "gfx942_mi300x_InterNodeV1LL_ep16_dispatch.json"
    (table,) = read_tables(file, BY_NAME)
    assert [(r.values.get("topk"), r.values["num_tokens"]) for r in table.rules] == [
        (None, 4),
        (8, 4),
        (8, 32),
    ]
    assert json.loads(file.read_text())["version"] == "2.0"


def test_one_file_holds_both_phases(tmp_path: Path) -> None:
    key = {"dtype": "bf16", "zero_copy": True, "quant_type": "none", "hidden_dim": 6144, "topk": 8}
    combine = Query(EP_COMBINE, DEVICE, HEADER, {**key, "num_tokens": 4})
    target = tmp_path / "sub" / "mine.json"
    save(target, (query(), values()), (combine, values()))
    assert {t.phase for t in read_tables(target, BY_NAME)} == {"dispatch", "combine"}
    (again,) = save(target, (combine, values(8)))
    assert again.startswith("REPLACED ep combine")
    assert len(read_tables(target, BY_NAME)) == 2


def test_other_rules_and_their_unknown_fields_survive(tmp_path: Path) -> None:
    save(tmp_path, (query(8), values(comment="keep me")))
    save(tmp_path, (query(4), values()))
    (file,) = tmp_path.iterdir()
    assert "keep me" in file.read_text()


def test_an_older_file_is_kept_and_brought_up_to_date(tmp_path: Path) -> None:
    file = tmp_path / "gfx942_mi300x_InterNodeV1LL_ep16_dispatch.json"
    head = {"version": "1.0", "gpu_arch": "gfx942", "gpu_model": "mi300x", **HEADER, "phase": "dispatch"}
    old = {"dtype": "fp8", "hidden_dim": 6144, "num_tokens": 8, **values(metric=None)}
    file.write_text(json.dumps({**head, "rules": [old]}))
    save(tmp_path, (query(4), values()))
    (table,) = read_tables(file, BY_NAME)
    assert table.version == "2.0"
    assert len(table.rules) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace('"block_num": 64', '"block_num": -1'),  # would vanish when rewritten
        lambda text: text.replace('"version": "2.0"', '"version": "7.0"'),
        lambda text: text[:-20],
        lambda text: text.replace("\n  ]", "," + text.split("[\n")[1].split("\n")[0] + "\n  ]"),  # twice
    ],
)
def test_a_file_that_would_lose_something_is_not_written(tmp_path: Path, spoil: Any) -> None:
    save(tmp_path, (query(8), values()))
    (file,) = tmp_path.iterdir()
    spoilt = spoil(file.read_text())
    assert spoilt != file.read_text()
    file.write_text(spoilt)
    with pytest.raises(RulesError, match=str(file)):
        save(tmp_path, (query(4), values()))
    assert file.read_text() == spoilt
    assert [p.name for p in tmp_path.iterdir()] == [file.name], "nothing is left lying about"


def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, (query(), values()))
    (file,) = tmp_path.iterdir()
    before = file.read_text()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(saving.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, (query(), values(8)))
    assert file.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def save_many(folder: str, first: int) -> None:
    for i in range(first, first + 10):
        save_rules([(query(i), values())], Path(folder), FORMATS)


def test_two_runs_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=save_many, args=(str(tmp_path), first)) for first in (0, 100, 200)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(30)
        assert run.exitcode == 0
    (file,) = tmp_path.iterdir()
    assert len(read_tables(file, BY_NAME)[0].rules) == 30


def test_diff_names_what_was_added_replaced_and_removed(tmp_path: Path) -> None:
    save(tmp_path / "old.json", (query(4), values()), (query(8), values()))
    save(tmp_path / "new.json", (query(4), values(8, 30.0)), (query(16), values()))
    old, new = (read_tables(tmp_path / name, BY_NAME) for name in ("old.json", "new.json"))
    kinds = [str(change).split()[0] for change in changes_between(old, new, BY_NAME)]
    assert sorted(kinds) == ["ADDED", "REMOVED", "REPLACED"]
    assert changes_between(old, old, BY_NAME) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file" / "rules", (query(), values()))
    assert os.listdir(tmp_path) == ["file"]
