"""PK-4: environment variables are checked, spelling included, and every effective setting can be shown."""

import logging
import os
import subprocess
import sys

import mori_shmem
import pytest
from mori_shmem import settings
from mori_shmem.errors import RankFailed, SettingError
from mori_shmem.settings import Setting, SettingsTable
from mori_shmem.variables import ENGINES, QUEUES, TABLE, TIMEOUT_S


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> SettingsTable:
    """A table as an op package would declare it, unregistered afterwards."""
    monkeypatch.setattr(settings, "_TABLES", dict(settings._TABLES))
    monkeypatch.setattr(settings, "_reported", set())
    return SettingsTable("mori-made-up")


@pytest.fixture
def blocks(table: SettingsTable) -> Setting[int]:
    return table.add(Setting("MORI_MADE_UP_PULL_BLOCKS", 64, low=1, high=1024, doc="grid of the pull kernel"))


@pytest.mark.parametrize("text", ["abc", "", "-1", "0", "1e9", "1025", "64.0", "nan"])
def test_PK_4_a_bad_value_is_an_error_naming_variable_value_and_range(
    table: SettingsTable, blocks: Setting[int], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MORI_MADE_UP_PULL_BLOCKS", text)
    with pytest.raises(SettingError) as refused:
        table.read()
    message = str(refused.value)
    assert "MORI_MADE_UP_PULL_BLOCKS" in message
    assert repr(text) in message
    assert "an integer from 1 to 1024" in message


def test_PK_4_a_misspelt_variable_gives_one_warning_with_the_closest_name(
    table: SettingsTable,
    blocks: Setting[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MORI_MADE_UP_PULL_BLOKS", "64")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            table.read()
            TABLE.read()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "MORI_MADE_UP_PULL_BLOKS" in caplog.text
    assert "MORI_MADE_UP_PULL_BLOCKS?" in caplog.text


def test_PK_4_real_but_unused_and_foreign_variables_give_no_warning(
    table: SettingsTable,
    blocks: Setting[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MORI_MADE_UP_PULL_BLOCKS", "64")  # real, and not mori-shmem's
    monkeypatch.setenv("MORI_ENABLE_SDMA", "1")  # another project's, like none of ours
    with caplog.at_level(logging.WARNING):
        TABLE.read()
    assert not caplog.records


def test_PK_4_a_variable_of_an_installed_package_that_is_not_imported_is_left_to_it(
    table: SettingsTable,
    blocks: Setting[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: object,
) -> None:
    (package := tmp_path / "mori_made_up").mkdir()  # type: ignore[operator]
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MORI_MADE_UP_PULL_BLOCK", "64")
    with caplog.at_level(logging.WARNING):
        TABLE.read()
    assert not caplog.records


def test_PK_4_a_snapshot_does_not_follow_the_environment(
    table: SettingsTable, blocks: Setting[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_MADE_UP_PULL_BLOCKS", "32")
    values = table.read()
    monkeypatch.setenv("MORI_MADE_UP_PULL_BLOCKS", "16")
    assert values[blocks] == 32
    assert values.origin(blocks) == "environment"


def test_PK_4_effective_lists_value_and_origin_of_every_setting(
    table: SettingsTable, blocks: Setting[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_TIMEOUT_S", "7.5")
    lines = {line.variable: line for line in settings.effective()}
    assert lines["MORI_TIMEOUT_S"][2:4] == (7.5, "environment")
    assert lines["MORI_MADE_UP_PULL_BLOCKS"][:4] == (
        "mori-made-up",
        "MORI_MADE_UP_PULL_BLOCKS",
        64,
        "default",
    )


def test_PK_4_one_command_prints_them() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "mori_shmem"],
        env={**os.environ, "MORI_SHMEM_ENGINES": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("MORI_SHMEM_ENGINES")]
    assert line.split()[1:3] == ["3", "environment"]
    assert shown.stderr == ""


def test_PK_4_one_command_prints_the_rest_when_a_value_is_refused() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "mori_shmem"],
        env={**os.environ, "MORI_SHMEM_ENGINES": "none", "MORI_SHMEM_QUEUES": "0", "MORI_TIMEOUT_S": "7.5"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 2
    lines = {line.split()[0]: line.split()[1:3] for line in shown.stdout.splitlines()}
    assert lines["MORI_TIMEOUT_S"] == ["7.5", "environment"]
    assert lines.keys() == {s.variable for s in TABLE} - {"MORI_SHMEM_ENGINES", "MORI_SHMEM_QUEUES"}
    assert [line.split("=")[0] for line in shown.stderr.splitlines()] == [
        "MORI_SHMEM_ENGINES",
        "MORI_SHMEM_QUEUES",
    ]


def test_an_argument_wins_and_is_held_to_the_same_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_TIMEOUT_S", "7")
    assert TABLE.read({TIMEOUT_S: 3})[TIMEOUT_S] == 3.0
    assert TABLE.read({TIMEOUT_S: None})[TIMEOUT_S] == 7.0
    for bad in (0, -1.0, float("nan"), "5", True):
        with pytest.raises(SettingError, match=rf"^timeout_s={bad!r} is refused: .* a number from 0.01"):
            TABLE.read({TIMEOUT_S: bad})
    with pytest.raises(SettingError, match=r"^num_engines=1.5 is refused: .*MORI_SHMEM_ENGINES"):
        TABLE.read({ENGINES: 1.5})


def test_a_refused_argument_is_named_as_its_caller_wrote_it(table: SettingsTable) -> None:
    fast = table.add(Setting("MORI_MADE_UP_FAST", False, argument="fast"))
    with pytest.raises(SettingError, match=r"^fast='yes' is refused: it takes True or False"):
        table.read({fast: "yes"})
    nameless = table.add(Setting("MORI_MADE_UP_SLOW", False))
    with pytest.raises(SettingError, match=r"^the argument for MORI_MADE_UP_SLOW='yes' is refused"):
        table.read({nameless: "yes"})


def test_words_and_switches(table: SettingsTable, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = table.add(Setting("MORI_MADE_UP_PUBLISH", "fence", choices=("fence", "writethrough")))
    fast = table.add(Setting("MORI_MADE_UP_FAST", False))
    monkeypatch.setenv("MORI_MADE_UP_PUBLISH", "writethrough")
    monkeypatch.setenv("MORI_MADE_UP_FAST", "Yes")
    values = table.read()
    assert (values[publish], values[fast]) == ("writethrough", True)
    monkeypatch.setenv("MORI_MADE_UP_PUBLISH", "fense")
    with pytest.raises(SettingError, match=r"one of fence, writethrough"):
        table.read()
    monkeypatch.setenv("MORI_MADE_UP_PUBLISH", "fence")
    monkeypatch.setenv("MORI_MADE_UP_FAST", "2")
    with pytest.raises(SettingError, match=r"MORI_MADE_UP_FAST='2'"):
        table.read()


def test_PK_4_values_that_differ_between_ranks_are_an_error_with_both() -> None:
    def rank() -> None:
        if os.environ["RANK"] == "1":
            os.environ["MORI_SHMEM_QUEUES"] = "4"
        with pytest.raises(SettingError) as differ:
            mori_shmem.init()
        message = str(differ.value)
        assert "MORI_SHMEM_QUEUES" in message
        assert "rank 0 has 8 (default)" in message
        assert "rank 1 has 4 (environment)" in message

    mori_shmem.run_ranks(rank, 3)


def test_PK_4_a_bad_value_of_one_rank_does_not_leave_the_others_waiting() -> None:
    def rank() -> None:
        if os.environ["RANK"] == "1":
            os.environ["MORI_SHMEM_ENGINES"] = "none"
        mori_shmem.init()

    with pytest.raises(SettingError, match=r"MORI_SHMEM_ENGINES='none'"):
        mori_shmem.run_ranks(rank, 2)


def test_PK_4_changing_a_variable_after_init_changes_no_live_object() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            os.environ["MORI_TIMEOUT_S"] = "1"
            os.environ["MORI_SHMEM_QUEUES"] = "1"
            assert comm.timeout_s == 30.0
            assert comm.settings[QUEUES] == 8
            comm.queue(comm.rank, 7)

    mori_shmem.run_ranks(rank, 1)


def test_a_rank_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 exited with status 3"):
        mori_shmem.run_ranks(lambda: os._exit(3) if os.environ["RANK"] == "1" else None, 2)


def test_PK_4_an_interface_that_is_not_there_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MORI_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(SettingError, match=r"MORI_SOCKET_IFNAME='nosuch0'.* lo"):
        mori_shmem.run_ranks(os.getpid, 2)  # refused before a rank is started
    monkeypatch.setenv("MORI_SOCKET_IFNAME", "lo")
    assert mori_shmem.run_ranks(os.getenv, 2, "GLOO_SOCKET_IFNAME") == ["lo", "lo"]
