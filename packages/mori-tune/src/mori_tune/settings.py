"""Every environment variable of this package: read once, typed, range-checked, listed by one call.

The names that begin with MORI_EP_ are those that EP users know; all tuners share them. A variable that
begins with MORI_ and is nearly one of ours gets one WARNING with the name that was probably meant.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mori_tune.errors import SettingError

log = logging.getLogger("mori_tune")
OPS_WITH_RULES = ("ep", "gemm-ar", "megamoe")


@dataclass(frozen=True)
class Setting:
    name: str
    parse: Callable[[str], Any]
    default: Any
    allowed: str
    doc: str


@dataclass(frozen=True)
class Effective:
    """One setting as it holds in this process, and where it came from."""

    name: str
    value: Any
    origin: str  # "environment" or "default"
    allowed: str
    doc: str


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def number(low: float, below: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and low <= value < below):
            raise ValueError(text)
        return value

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return parse


def flag(text: str) -> bool:
    return one_of("0", "1")(text) == "1"


def some_path(text: str) -> Path:
    if not text:
        raise ValueError(text)
    return Path(text).expanduser()


def existing_path(text: str) -> Path:
    path = some_path(text)
    if not path.exists():
        raise ValueError(text)
    return path


def variable(op: str, what: str) -> str:
    """`variable("gemm-ar", "TUNING_CONFIG")` is "MORI_GEMM_AR_TUNING_CONFIG"."""
    return f"MORI_{op.upper().replace('-', '_')}_{what}"


def per_op_settings() -> list[Setting]:
    """Where an op's rules come from, and whether they are used, for each op that has rules."""
    found = []
    for op in OPS_WITH_RULES:
        config, mode = variable(op, "TUNING_CONFIG"), variable(op, "LAUNCH_CONFIG_MODE")
        doc = f"{op}: take rules from this file or folder and from nowhere else"
        found.append(Setting(config, existing_path, None, "an existing file or folder", doc))
        doc = f"{op}: AUTO uses tuned rules, MANUAL ignores them"
        found.append(Setting(mode, one_of("AUTO", "MANUAL"), "AUTO", "AUTO or MANUAL", doc))
    return found


SETTINGS = {
    setting.name: setting
    for setting in [
        Setting("MORI_EP_ROUNDS", integer(2, 100_000), 10, "a whole number from 2 to 100000",
                "rounds of each measurement; the first is dropped"),
        Setting("MORI_EP_TUNING_MARGIN", number(0.0, 1.0), 0.0, "a number from 0 to below 1",
                "what a candidate must gain over the present default, relative, to replace it"),
        Setting("MORI_EP_TUNING_VERBOSE", flag, False, "0 or 1", "print the full table of each measurement"),
        Setting("MORI_TUNING_SCOPE", one_of("quick", "full"), "full", "quick or full",
                "how much of the space a sweep covers; only a full one can be saved"),
        Setting("MORI_TUNE_LIMIT_S", number(0.1, 86_400.0), 60.0, "seconds, 0.1 to below 86400",
                "time limit of one candidate's slot"),
        Setting("MORI_TUNE_DIR", some_path, None, "a folder",
                "the user's rules; default $XDG_CONFIG_HOME/mori/tuning or ~/.config/mori/tuning"),
        Setting("MORI_TUNE_JOURNALS", some_path, None, "a folder",
                "unfinished sweeps; default $XDG_CACHE_HOME/mori/tune or ~/.cache/mori/tune"),
        Setting("MORI_TUNE_LOOKUP", one_of("exact", "nearest", "any-model"), "nearest",
                "exact, nearest or any-model", "what may stand in for a rule that is not there"),
        Setting("MORI_TUNE_REPORT", one_of("line", "misses", "full"), "line", "line, misses or full",
                "what a lookup says: one line, nothing for a MATCH, or the whole decision"),
        *per_op_settings(),
    ]
}  # fmt: skip


class Settings:
    """The values of one environment, fixed when this was made."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._effective = {name: read(setting, environ) for name, setting in SETTINGS.items()}
        self._home = Path(environ.get("HOME") or "~").expanduser()
        self._config_home = environ.get("XDG_CONFIG_HOME")
        self._cache_home = environ.get("XDG_CACHE_HOME")
        warn_of_misspelt(environ)

    def __getitem__(self, name: str) -> Any:
        return self._effective[name].value

    def effective(self) -> list[Effective]:
        return list(self._effective.values())

    @property
    def user_dir(self) -> Path:
        base = Path(self._config_home) if self._config_home else self._home / ".config"
        return self["MORI_TUNE_DIR"] or base / "mori" / "tuning"

    @property
    def journal_dir(self) -> Path:
        base = Path(self._cache_home) if self._cache_home else self._home / ".cache"
        return self["MORI_TUNE_JOURNALS"] or base / "mori" / "tune"


def read(setting: Setting, environ: Mapping[str, str]) -> Effective:
    text = environ.get(setting.name)
    if text is None:
        return Effective(setting.name, setting.default, "default", setting.allowed, setting.doc)
    try:
        value = setting.parse(text)
    except ValueError:
        raise SettingError(f"{setting.name}={text!r}: wanted {setting.allowed} ({setting.doc})") from None
    return Effective(setting.name, value, "environment", setting.allowed, setting.doc)


def warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Said by a machine's first rank for all: they share their environment."""
    if environ.get("LOCAL_RANK", "0") != "0":
        return
    for name in sorted(environ):
        if name.startswith("MORI_") and name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.9)
            if close:
                log.warning(
                    "%s is not a setting of mori-tune and has no effect; did you mean %s?", name, close[0]
                )


@functools.cache
def settings() -> Settings:
    """The settings of this process: the environment is read at the first call and never again."""
    return Settings(os.environ)
