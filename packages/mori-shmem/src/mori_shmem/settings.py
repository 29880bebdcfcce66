"""Environment variables: declared once, read as a whole, checked, and shown on request.

    TABLE = SettingsTable("mori-shmem")
    TIMEOUT_S = TABLE.add(Setting("MORI_TIMEOUT_S", 30.0, low=0.01, high=86400.0, doc="limit of every wait"))

    values = TABLE.read({TIMEOUT_S: timeout_s})  # one snapshot, taken when an object is made; None: not given
    values[TIMEOUT_S]                            # typed: float

The rules, the same in every mori package:
  * An object reads the environment once, at its construction, and keeps the snapshot. A variable that changes
    later has no effect on live objects, and no object can end up with half of one state and half of another.
  * A value that does not parse or is out of range is a SettingError naming variable, value and range. An
    empty string is such a value: unset the variable to get the default.
  * An explicit argument overrides the variable and is held to the same range.
  * A variable MORI_* that nobody declares, but that is close to a declared name, is reported once per
    process, at WARNING, with the closest name. Variables that belong to an installed mori package which is
    not imported are that package's business.
  * Values that must be equal on all ranks are compared when ranks meet (`check_same`): the error names the
    variable, both values and the ranks that hold them.
  * `effective()` lists every setting of the imported packages with its value and where it comes from;
    `python -m mori_shmem mori_gemm_ar` prints that list for mori-shmem and the packages named.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from mori_shmem.errors import SettingError

T = TypeVar("T", bool, int, float, str)

_LOG = logging.getLogger("mori_shmem")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One variable. The type of `default` is the type of the value; `low` and `high` are inclusive."""

    variable: str
    default: T
    _: KW_ONLY
    low: float | None = None
    high: float | None = None
    power_of_two: bool = False
    choices: tuple[str, ...] = ()
    argument: str = ""  # what callers pass to override it, by its own name
    doc: str = ""
    same_on_all_ranks: bool = True

    @property
    def range(self) -> str:
        """What is allowed, in words."""
        if isinstance(self.default, bool):
            return "one of 1, true, yes, on, 0, false, no, off"
        if isinstance(self.default, str):
            return "one of " + ", ".join(self.choices) if self.choices else "a non-empty string"
        low = "" if self.low is None else f" from {type(self.default)(self.low)}"
        high = "" if self.high is None else f" to {type(self.default)(self.high)}"
        kind = "an integer" if isinstance(self.default, int) else "a number"
        return (f"a power of two, {kind}" if self.power_of_two else kind) + low + high

    def parse(self, text: str) -> T:
        """The value that the variable's `text` stands for."""
        try:
            value = self._convert(text.strip())
        except ValueError:
            raise self._refuse(text, self.variable, self.range) from None
        if not self._allows(value):
            raise self._refuse(text, self.variable, self.range)
        return value  # type: ignore[no-any-return]

    def check(self, value: Any) -> T:
        """An argument's value itself, if its type and range are right."""
        given = value
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(self.default) or not self._allows(value):
            wanted = "True or False" if isinstance(self.default, bool) else self.range
            raise self._refuse(given, self.argument or f"the argument for {self.variable}", wanted)
        return value

    def _allows(self, value: Any) -> bool:
        """Whether a value of the right type is in range."""
        if isinstance(value, bool):
            return True
        if isinstance(value, str):
            return value in self.choices if self.choices else bool(value)
        too_low = self.low is not None and not value >= self.low  # "not >=": a NaN is refused as well
        too_high = self.high is not None and not value <= self.high
        return not (too_low or too_high or (self.power_of_two and int(value).bit_count() != 1))

    def _convert(self, text: str) -> Any:
        if isinstance(self.default, bool):
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError(text)
            return text.lower() in _TRUE
        return type(self.default)(text)

    def _refuse(self, value: object, given_as: str, wanted: str) -> SettingError:
        default = f"default {self.default!r}"
        if given_as != self.variable:
            default = f"without it {self.variable} holds, {default}"
        meaning = f"; meaning: {self.doc}" if self.doc else ""
        return SettingError(f"{given_as}={value!r} is refused: it takes {wanted} ({default}){meaning}")


class Effective(NamedTuple):
    """One line of `effective()`."""

    package: str
    variable: str
    value: bool | int | float | str
    origin: str  # "default", "environment", "argument"
    doc: str


class Snapshot:
    """The values of one table at one moment. Index it with the Setting: `values[TIMEOUT_S]`."""

    def __init__(self, table: SettingsTable, values: Mapping[str, tuple[Any, str]]) -> None:
        self._table = table
        self._values = dict(values)

    def __getitem__(self, setting: Setting[T]) -> T:
        return self._values[setting.variable][0]  # type: ignore[no-any-return]

    def origin(self, setting: Setting[Any]) -> str:
        """Where the value comes from: "default", "environment" or "argument"."""
        return self._values[setting.variable][1]

    def effective(self) -> list[Effective]:
        """Every setting of the table as this snapshot holds it."""
        return [
            Effective(self._table.package, s.variable, *self._values[s.variable], s.doc) for s in self._table
        ]

    def check_same(self, rank: int, all_gather: Callable[[object], list[Any]]) -> None:
        """Collective: raise on every rank if a setting that must be equal on all ranks is not."""
        mine = {s.variable: self._values[s.variable] for s in self._table if s.same_on_all_ranks}
        for variable, differing in _differences(all_gather(mine)):
            said = "; ".join(f"rank {r} has {value!r} ({origin})" for r, (value, origin) in differing)
            raise SettingError(
                f"{variable} must be the same on all ranks: {said}. Set it alike everywhere, or nowhere"
            )


def _differences(gathered: list[dict[str, tuple[Any, str]]]) -> Iterator[tuple[str, list[tuple[int, Any]]]]:
    """Each variable that is not equal everywhere, with the first rank that holds each of its values."""
    for variable in gathered[0]:
        first_with: dict[Any, tuple[int, Any]] = {}
        for rank, values in enumerate(gathered):
            if variable in values:
                first_with.setdefault(values[variable][0], (rank, values[variable]))
        if len(first_with) > 1:
            yield variable, list(first_with.values())


class SettingsTable:
    """The settings of one package. Making one registers it for `effective()` and for the spelling check."""

    def __init__(self, package: str) -> None:
        self.package = package
        self._settings: dict[str, Setting[Any]] = {}
        _TABLES[package] = self

    def add(self, setting: Setting[T]) -> Setting[T]:
        """Declare a variable; returns it, to be used as the key into a snapshot."""
        if not setting.variable.startswith("MORI_"):
            raise ValueError(f"{setting.variable}: variables of the mori packages begin with MORI_")
        setting.check(setting.default)
        self._settings[setting.variable] = setting
        return setting

    def __iter__(self) -> Iterator[Setting[Any]]:
        return iter(self._settings.values())

    def read(self, arguments: Mapping[Setting[Any], Any] | None = None) -> Snapshot:
        """A checked snapshot of the whole table. `arguments` (None values are ignored) win over variables."""
        warn_of_misspelt_variables()
        given = {s.variable: v for s, v in (arguments or {}).items() if v is not None}
        return Snapshot(self, {s.variable: _value_and_origin(s, given.get(s.variable)) for s in self})


def _value_and_origin(setting: Setting[Any], argument: Any = None) -> tuple[Any, str]:
    variable = setting.variable
    if argument is not None:
        return setting.check(argument), "argument"
    if variable in os.environ:
        return setting.parse(os.environ[variable]), "environment"
    return setting.default, "default"


_TABLES: dict[str, SettingsTable] = {}
_reported: set[str] = set()
_report_lock = threading.Lock()


def effective(refusals: list[SettingError] | None = None) -> list[Effective]:
    """Every setting of the imported mori packages, as an object made now would get it.

    A variable with a bad value is raised, or, where a list is given for them, left out and its error
    appended there.
    """
    warn_of_misspelt_variables()
    lines = []
    for table in list(_TABLES.values()):
        for setting in table:
            try:
                value, origin = _value_and_origin(setting)
            except SettingError as refusal:
                if refusals is None:
                    raise
                refusals.append(refusal)
            else:
                lines.append(Effective(table.package, setting.variable, value, origin, setting.doc))
    return lines


def warn_of_misspelt_variables() -> None:
    """One WARNING for each MORI_* variable that nobody declares but that is close to a declared name.

    Rank 0 speaks for all: the ranks of one job share their environment, and eight copies of a line help
    nobody.
    """
    declared = {s.variable for table in list(_TABLES.values()) for s in table}
    unknown = [
        v for v in os.environ if v.upper().startswith("MORI_") and v not in declared and v not in _reported
    ]
    if not unknown or os.environ.get("RANK", "0") != "0":
        return
    for variable in unknown:
        closest = difflib.get_close_matches(variable.upper(), declared, n=1, cutoff=0.8)
        if not closest or _belongs_to_unimported_package(variable):
            continue
        with _report_lock:
            if variable in _reported:
                continue
            _reported.add(variable)
        _LOG.warning("%s is not a setting of any mori package: did you mean %s?", variable, closest[0])


def _belongs_to_unimported_package(variable: str) -> bool:
    """Whether MORI_GEMM_AR_X could be declared by an installed `mori_gemm_ar` that nobody imported yet."""
    words = variable.lower().split("_")
    names = ["_".join(words[:n]) for n in range(2, len(words))]
    return any(name not in sys.modules and _is_installed(name) for name in names)


def _is_installed(name: str) -> bool:
    finders = [f for f in sys.meta_path if hasattr(f, "find_spec")]
    return any(finder.find_spec(name, None) is not None for finder in finders)
