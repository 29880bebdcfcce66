"""PK-4: variables are read once, checked, listed; a misspelt one is noticed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from mori_tune import SettingError, settings
from mori_tune.settings import SETTINGS, Settings


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("MORI_EP_ROUNDS", text) for text in ("1", "0", "-1", "", "abc", "1e9", "2.5", "100001")],
        *[("MORI_EP_TUNING_MARGIN", text) for text in ("-1", "-0.01", "abc", "", "nan", "inf", "1", "1.5")],
        *[("MORI_EP_TUNING_VERBOSE", text) for text in ("yes", "2", "")],
        *[("MORI_TUNING_SCOPE", text) for text in ("fast", "Full", "")],
        *[("MORI_TUNE_LIMIT_S", text) for text in ("0", "-5", "1e9", "")],
        *[("MORI_EP_TUNING_CONFIG", text) for text in ("/no/such/file.json", "")],
        ("MORI_GEMM_AR_LAUNCH_CONFIG_MODE", "auto"),
        ("MORI_TUNE_LOOKUP", "closest"),
    ],
)
def test_PK_4_a_bad_value_names_variable_value_and_range(name: str, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        Settings({name: text})
    assert f"{name}={text!r}" in str(caught.value)
    assert SETTINGS[name].allowed in str(caught.value)


def test_PK_4_good_values_and_their_origin(tmp_path: Path) -> None:
    using = Settings({"MORI_EP_ROUNDS": "25", "MORI_EP_TUNING_CONFIG": str(tmp_path)})
    effective = {one.name: one for one in using.effective()}
    assert (using["MORI_EP_ROUNDS"], effective["MORI_EP_ROUNDS"].origin) == (25, "environment")
    assert (using["MORI_EP_TUNING_MARGIN"], effective["MORI_EP_TUNING_MARGIN"].origin) == (0.0, "default")
    assert using["MORI_EP_TUNING_CONFIG"] == tmp_path
    assert set(effective) == set(SETTINGS)


def test_PK_4_misspelt_names_are_noticed_and_others_variables_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = {"MORI_EP_DISABLE_VIEW_CACHE": "1", "MORI_TIMEOUT_S": "3", "MORI_GEMM_AR_PULL_BLOCKS": "64"}
    Settings({**others, "MORI_RDMA_TC": "41", "MORI_SOCKET_IFNAME": "eth0", "MORI_ENABLE_SDMA": "1"})
    assert caplog.records == []
    Settings({"MORI_EP_ROUND": "5"})
    Settings({"MORI_EP_TUNNING_MARGIN": "0.1"})
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 2
    assert "did you mean MORI_EP_ROUNDS?" in messages[0]
    assert "did you mean MORI_EP_TUNING_MARGIN?" in messages[1]


def test_PK_4_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.settings.cache_clear()
    try:
        monkeypatch.setenv("MORI_EP_ROUNDS", "7")
        assert settings.settings()["MORI_EP_ROUNDS"] == 7
        monkeypatch.setenv("MORI_EP_ROUNDS", "9")
        assert settings.settings()["MORI_EP_ROUNDS"] == 7
    finally:
        settings.settings.cache_clear()


def test_folders_follow_the_users_conventions() -> None:
    assert Settings({"HOME": "/h"}).user_dir == Path("/h/.config/mori/tuning")
    assert Settings({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}).user_dir == Path("/c/mori/tuning")
    assert Settings({"HOME": "/h", "XDG_CACHE_HOME": "/k"}).journal_dir == Path("/k/mori/tune")
    assert Settings({"HOME": "/h", "MORI_TUNE_DIR": "/x"}).user_dir == Path("/x")


def test_PK_4_one_rank_speaks_for_all(caplog: pytest.LogCaptureFixture) -> None:
    misspelt = {"MORI_GEMM_AR_TUNNING_CONFIG": "x"}
    for rank in ("1", "0"):
        Settings({**misspelt, "LOCAL_RANK": rank})
        assert ("did you mean MORI_GEMM_AR_TUNING_CONFIG" in caplog.text) == (rank == "0")
